"""The folder of a run: made once, never overwritten, found again, and readable after a crash."""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from distributed_training.config import Config
from distributed_training.runtime import run_directory
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import RunDirectory, create_run_directory, newest_run, read_jsonl


@pytest.fixture(autouse=True)
def _here(in_tmp: Path) -> None:
    """Every test in its own folder."""


def config(**sections: Any) -> Config:
    return Config.from_dict(sections)


def made(name: str, age: int = 0, **sections: Any) -> RunDirectory:
    """A run of that name, as old as that."""
    run = create_run_directory(config(run={"name": name}, **sections))
    stamp = 1_700_000_000 - age
    os.utime(run.config_file, (stamp, stamp))
    return run


class TestPaths:
    def test_are_inside_the_folder(self) -> None:
        run = RunDirectory(Path("runs/mine"))
        assert run.name == "mine"
        assert [
            path.name for path in (run.config_file, run.events_file, run.ledger_file, run.checkpoints, run.report)
        ] == ["config.yaml", "events.jsonl", "ledger.jsonl", "checkpoints", "report"]
        assert run.config_file.parent == run.path


class TestCreate:
    def test_makes_the_folder_and_saves_the_settings(self) -> None:
        settings = config(run={"name": "mine", "root": "all/runs"}, training={"batch_size": 17})
        run = create_run_directory(settings)
        assert run.path == Path("all/runs/mine")
        assert run.checkpoints.is_dir()
        assert run.load_config().training.batch_size == 17
        assert run.load_config() == settings

    def test_a_name_is_made_of_model_and_time(self) -> None:
        today = f"{datetime.now():%Y}"
        assert create_run_directory(config(model={"name": "mlp"})).name.startswith(f"mlp-{today}")
        assert create_run_directory(config(), model="MyNet").name.startswith(f"mynet-{today}")

    def test_runs_of_one_second_get_names_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stopped(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2024, 5, 6, 7, 8, 9)

        monkeypatch.setattr(run_directory, "datetime", Stopped)
        names = [create_run_directory(config(model={"name": "mlp"})).name for _ in range(3)]
        assert names == ["mlp-20240506-070809", "mlp-20240506-070809-2", "mlp-20240506-070809-3"]

    def test_a_given_folder_is_used(self, tmp_path: Path) -> None:
        run = create_run_directory(config(run={"name": "other"}), given=tmp_path / "here")
        assert run.path == tmp_path / "here"
        assert run.config_file.is_file()

    def test_an_existing_run_is_never_overwritten(self) -> None:
        run = made("mine", training={"batch_size": 3})
        with pytest.raises(RunDirectoryError, match=r"runs/mine: a run of this name exists; continue it with --resume"):
            made("mine")
        with pytest.raises(RunDirectoryError, match="a run of this name exists"):
            create_run_directory(config(), given=run.path)
        assert run.load_config().training.batch_size == 3

    def test_an_empty_folder_of_that_name_is_taken(self) -> None:
        Path("runs/mine").mkdir(parents=True)
        assert made("mine").config_file.is_file()

    @pytest.mark.parametrize("root", ["file.txt", "file.txt/x"])
    def test_a_place_that_cannot_be_written_is_an_error_that_says_what_to_do(self, root: str) -> None:
        Path("file.txt").write_text("not a folder")
        for name in ("mine", None):
            with pytest.raises(RunDirectoryError, match=r"cannot be written \(.+\); choose another .* run.root=FOLDER"):
                create_run_directory(config(run={"root": root, "name": name}))


class TestLoad:
    def test_a_folder_that_is_no_run_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match=r"not a run directory \(no config.yaml\)"):
            RunDirectory(tmp_path / "nothing").load_config()


class TestEvents:
    def test_are_read_in_order(self) -> None:
        run = made("mine")
        assert list(run.events()) == []
        run.events_file.write_text('{"event": "start"}\n{"event": "finish", "loss": 0.5}\n')
        assert list(run.events()) == [{"event": "start"}, {"event": "finish", "loss": 0.5}]

    def test_lines_that_a_crash_cut_off_are_skipped(self, tmp_path: Path) -> None:
        file = tmp_path / "events.jsonl"
        file.write_bytes(b'{"a": 1}\n{"a": 2, "b\n\n\x00\x00\xff\n{"a": 3}\n{"a": "\xc3')
        assert list(read_jsonl(file)) == [{"a": 1}, {"a": 3}]

    def test_can_be_read_while_they_are_written(self, tmp_path: Path) -> None:
        file = tmp_path / "events.jsonl"
        with file.open("w") as writer:
            writer.write('{"a": 1}\n{"a"')
            writer.flush()
            assert list(read_jsonl(file)) == [{"a": 1}]
            writer.write(": 2}\n")
            writer.flush()
            assert list(read_jsonl(file)) == [{"a": 1}, {"a": 2}]


class TestNewestRun:
    def test_there_may_be_none(self) -> None:
        assert newest_run(config()) is None
        Path("runs/empty").mkdir(parents=True)
        assert newest_run(config()) is None

    def test_is_the_newest_of_the_same_job(self) -> None:
        made("old", age=300)
        newer = made("newer", age=200)
        made("other-model", age=100, model={"name": "resnet18"})
        made("other-data", age=50, data={"dataset": "synthetic"})
        assert newest_run(config()) == newer
        assert newest_run(config(training={"batch_size": 5})) == newer, "other settings may have changed"

    def test_of_any_job_is_the_newest_of_all(self) -> None:
        made("old", age=300)
        newest = made("other-model", age=100, model={"name": "resnet18"})
        assert newest_run(config(), any_job=True) == newest

    def test_a_name_chooses_that_run_whatever_its_job(self) -> None:
        made("newest", age=1)
        named = made("named", age=500, model={"name": "resnet18"})
        assert newest_run(config(run={"name": "named"})) == named
        assert newest_run(config(run={"name": "missing"})) is None

    def test_only_the_configured_root_is_searched(self) -> None:
        made("mine")
        assert newest_run(config(run={"root": "elsewhere"})) is None

    @pytest.mark.parametrize(
        "damage", ["training: [", "no_such_section: {}", "training: {no_such_key: 1}", "just text"]
    )
    def test_a_damaged_run_does_not_hide_the_others(self, damage: str, caplog: pytest.LogCaptureFixture) -> None:
        good = made("good", age=100)
        made("bad", age=1).config_file.write_text(damage)
        with caplog.at_level(logging.WARNING):
            assert newest_run(config()) == good
        assert "runs/bad: left out of the search for a run to resume" in caplog.text
