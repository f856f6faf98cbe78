"""Where data of the `datasets` library may be, which part of it is taken, and what is said of what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.huggingface.dataset_hub import TOKEN, DatasetHub

from distributed_training.data.text.loading import load_splits
from distributed_training.data.text.settings import LoadSettings
from distributed_training.huggingface import load_data
from distributed_training.runtime.errors import ConfigError, DataError

ROWS = [{"text": f"sentence number {n}", "label": n % 2} for n in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def texts(dataset: Any) -> list[str]:
    return list(dataset["text"])


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """A file of these rows, of the kind that its name says."""
    import datasets

    path.parent.mkdir(exist_ok=True)
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".txt":
        path.write_text("".join(f"{row['text']}\n" for row in rows))
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table.data.table, path)
    return path


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.jsonl", "rows.txt", "rows.parquet"])
def test_files_of_every_kind(name: str, tmp_path: Path) -> None:
    train, held_out = load_splits(LoadSettings(), write(tmp_path / name))
    assert texts(train) == [row["text"] for row in ROWS]
    assert held_out is None


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    parts = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:3])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "kept"))
    train, held_out = load_splits(LoadSettings(split="train[2:6]"), tmp_path / "kept")
    assert texts(train) == [row["text"] for row in ROWS[2:6]]
    assert texts(held_out) == [row["text"] for row in ROWS[:3]]


class TestSplits:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write(tmp_path / "data" / "train.csv")
        write(tmp_path / "data" / "validation.csv", ROWS[:4])
        return tmp_path / "data"

    def test_are_found_by_the_names_of_files(self, folder: Path) -> None:
        train, held_out = load_splits(LoadSettings(), folder)
        assert (len(train), len(held_out)) == (10, 4)

    def test_may_be_cut_and_added(self, folder: Path) -> None:
        settings = LoadSettings(split="train[:20%]+train[-1:]", validation_split="train[50%:]")
        train, held_out = load_splits(settings, folder)
        assert texts(train) == ["sentence number 0", "sentence number 1", "sentence number 9"]
        assert len(held_out) == 5

    def test_the_first_samples(self, folder: Path) -> None:
        train, held_out = load_splits(LoadSettings(samples=3), folder)
        assert (len(train), len(held_out)) == (3, 3)

    def test_an_unknown_one_names_those_there(self, folder: Path) -> None:
        with pytest.raises(DataError, match=r"split=trian: .*train, validation, not 'trian'; did you mean train\?"):
            load_splits(LoadSettings(split="trian"), folder)

    def test_an_empty_one(self, folder: Path) -> None:
        with pytest.raises(DataError, match=r"split=train\[:0\]: this split of .* holds no samples"):
            load_splits(LoadSettings(split="train[:0]"), folder)

    def test_nonsense(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"split=train\[a:b\]"):
            load_splits(LoadSettings(split="train[a:b]"), folder)


class TestStreams:
    def test_their_beginning_is_kept_on_disk(self, tmp_path: Path) -> None:
        path = write(tmp_path / "rows.jsonl")
        settings = LoadSettings(streaming=True, samples=4)
        train, _ = load_splits(settings, path)
        assert texts(train) == [row["text"] for row in ROWS[:4]]
        kept = list((tmp_path / "cache" / "dtrain-streams").glob("*/state.json"))
        assert len(kept) == 1
        before = kept[0].stat().st_mtime_ns
        assert texts(load_splits(settings, path)[0]) == texts(train)
        assert kept[0].stat().st_mtime_ns == before  # read, not made again

    def test_need_a_number_of_samples(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.samples"):
            load_splits(LoadSettings(streaming=True), write(tmp_path / "rows.jsonl"))


class TestNotThere:
    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"nowhere: no such file or folder.*data\.args\.name"):
            load_splits(LoadSettings(), tmp_path / "nowhere")

    def test_a_kind_of_file_that_is_not_known(self, tmp_path: Path) -> None:
        (tmp_path / "rows.xyz").write_text("?")
        with pytest.raises(DataError, match=r"rows\.xyz: unknown kind.*data\.args\.format"):
            load_splits(LoadSettings(), tmp_path / "rows.xyz")

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        (tmp_path / "rows.parquet").write_text("not parquet")
        with pytest.raises(DataError, match=r"rows\.parquet: cannot be read"):
            load_splits(LoadSettings(), tmp_path / "rows.parquet")

    def test_offline_and_not_in_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets
        import huggingface_hub.constants

        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setenv("HF_TOKEN", "hf_" + "s" * 34)
        with pytest.raises(
            DataError, match=r"name=nobody/nothing: HF_HUB_OFFLINE is set, and it is not in the cache"
        ) as caught:
            load_splits(LoadSettings(name="nobody/nothing"))
        assert "hf_s" not in str(caught.value)


PROGRAM = """
import os, sys, time
from distributed_training.huggingface import load_data
from distributed_training.runtime.errors import DataError

def said(**settings):
    try:
        return list(load_data("me/topics", **settings)["text"])
    except DataError as error:
        return str(error)

print(said(split="train"))
os.environ["HF_TOKEN"] = "TOKEN_HERE"
print(said(split="train[1:3]"))
print(said(split="train", streaming=True, samples=2))
print(said(split="trian"))
sys.stdout.flush()
input()  # now the Hub is gone
time.sleep = lambda seconds: None  # its library tries again and again
print(said(split="train[:1]"))
try:
    load_data("me/other")
except DataError as error:
    print(error)
"""


def test_a_dataset_on_the_hub(tmp_path: Path) -> None:
    hub = DatasetHub("me/topics", {"train.csv": b"text,label\none,0\ntwo,1\nthree,0\n"})
    environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    program = [sys.executable, "-c", PROGRAM.replace("TOKEN_HERE", TOKEN)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(program, env=environment, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        with process:
            assert process.stdout is not None
            before = [process.stdout.readline() for _ in range(4)]
            hub.close()
            after, errors = process.communicate("go on\n", timeout=120)
    finally:
        process.kill()
        if not hub.closed:
            hub.close()
    assert "me/topics: the Hub has no such dataset, or it is private" in before[0]
    assert "set HF_TOKEN" in before[0]
    assert before[1] == "['two', 'three']\n"
    assert before[2] == "['one', 'two']\n"
    assert "the splits train, not 'trian'; did you mean train?" in before[3]
    kept, missing = after.splitlines()
    assert kept == "['one']"  # what was downloaded needs no network
    assert "me/other: the Hub cannot be reached, and it is not in the cache here; check the network" in missing
    assert TOKEN not in "".join([*before, after, errors])
    assert hub.tokens == {None, f"Bearer {TOKEN}"}


def test_load_data_takes_paths_and_gives_the_librarys_datasets(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv")
    assert set(load_data(path)) == {"train"}
    assert texts(load_data(path, split="train[:2]")) == ["sentence number 0", "sentence number 1"]
    with pytest.raises(ConfigError, match=r"load_data\(\) does not take smaples.*did you mean samples\?"):
        load_data(path, smaples=3)
