"""What every tracker has to pass. A tracker's own test inherits `TrackerContract` and says how to read back."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from distributed_training.config import Config
from distributed_training.tracking import RunInfo, Tracker

Points = dict[str, list[tuple[int, float]]]


def run_info(directory: Path, resumed_from: int | None = None) -> RunInfo:
    """A run as the trainer would describe it."""
    facts = {"host": "node-1", "torch": "2.13", "parameters": 1234, "gpus": [], "path": None}
    return RunInfo(
        name=directory.name, directory=directory, config=Config().to_dict(), resumed_from=resumed_from, facts=facts
    )


class TrackerContract:
    """Inherit, give `make` and, where the record can be read, `points`."""

    @pytest.fixture(autouse=True)
    def no_leftovers(self) -> Iterator[None]:
        """Fail when a test leaves a thread, a process or a changed environment behind."""

        def environment() -> dict[str, str]:
            return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

        process, threads, variables = psutil.Process(), set(threading.enumerate()), environment()
        children = set(process.children(recursive=True))
        yield
        assert set(threading.enumerate()) <= threads
        assert set(process.children(recursive=True)) <= children
        assert environment() == variables

    @pytest.fixture
    def run_directory(self, tmp_path: Path) -> Path:
        path = tmp_path / "mlp-digits"
        path.mkdir()
        return path

    def make(self) -> Tracker:
        """A new tracker, not started."""
        raise NotImplementedError

    def points(self, directory: Path) -> Points:
        """Each metric's (step, value) pairs, as the tracker's own tools would show them."""
        raise NotImplementedError

    def test_a_whole_run_can_be_read_back(self, run_directory: Path) -> None:
        checkpoint = run_directory / "checkpoints" / "step-2"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights.bin").write_bytes(b"w" * 1000)
        tracker = self.make()
        tracker.start(run_info(run_directory))
        tracker.log({"train_loss": 2.5, "lr": 1e-3}, step=1)
        tracker.log({"train_loss": 1.5, "lr": 1e-4}, step=2)
        tracker.log({"val_loss": 1.75}, step=2)  # the same step again: both belong to it
        tracker.checkpoint(checkpoint, 2, {"val_loss": 1.75})
        shutil.rmtree(checkpoint)  # the run's own clean-up
        tracker.log({"train_loss": float("nan"), "lr": float("inf")}, step=3)
        tracker.finish("completed", {"val_loss": 1.75, "seconds": 3.0})
        points = self.points(run_directory)
        assert points["train_loss"][:2] == [(1, 2.5), (2, 1.5)]
        assert points["val_loss"] == [(2, 1.75)]
        assert [step for step, _ in points["lr"]][:2] == [1, 2]

    def test_a_resume_continues_the_same_record(self, run_directory: Path) -> None:
        first = self.make()
        first.start(run_info(run_directory))
        first.log({"train_loss": 3.0}, step=1)
        first.log({"train_loss": 2.0}, step=2)
        first.finish("interrupted", {})
        second = self.make()
        second.start(run_info(run_directory, resumed_from=2))
        second.log({"train_loss": 1.0}, step=3)
        second.finish("completed", {"train_loss": 1.0})
        assert self.points(run_directory)["train_loss"] == [(1, 3.0), (2, 2.0), (3, 1.0)]

    def test_its_files_stay_in_the_run_directory(self, run_directory: Path, tmp_path: Path) -> None:
        before = set(tmp_path.iterdir())
        tracker = self.make()
        tracker.start(run_info(run_directory))
        tracker.finish("failed", {})
        assert set(tmp_path.iterdir()) == before
        assert any(run_directory.iterdir())
