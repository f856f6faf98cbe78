"""Parquet files: number and list columns, several files, and the place of every mistake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources import load_dataset
from distributed_training.runtime.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COLUMNS = {"a": [1.5, 2.5, 3.5, 4.5], "b": [1, 2, 3, 4], "kind": ["x", "y", "x", "z"]}


def write(path: Path, columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def load(root: Path, fraction: float = 0.0, **args: object) -> Splits:
    return load_dataset(DataConfig(dataset="parquet", root=str(root), args=args, validation_fraction=fraction))


def everything(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = dataset.fetch(np.arange(len(dataset)))
    return inputs, targets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.parquet"


class TestParquet(DatasetContract):
    @pytest.fixture
    def dataset(self, path: Path) -> Dataset:
        return load(write(path, COLUMNS)).train

    def test_values(self, dataset: Dataset) -> None:
        inputs, targets = everything(dataset)
        assert inputs.dtype == torch.float32
        assert inputs.tolist() == [[1.5, 1], [2.5, 2], [3.5, 3], [4.5, 4]]
        assert targets.tolist() == [0, 1, 0, 2]
        assert dataset.classes == ["x", "y", "z"]


class TestColumns:
    @pytest.mark.parametrize(
        ("labels", "dtype", "classes"),
        [
            (pa.array([0, 2], pa.int8()), torch.int64, 3),
            (pa.array([True, False]), torch.int64, 2),
            (pa.array([0.5, 1.5]), torch.float32, None),
            (pa.array(["b", "a"], pa.large_string()), torch.int64, 2),
            (pa.array(["b", "a"]).dictionary_encode(), torch.int64, 2),
        ],
    )
    def test_kinds_of_labels(self, path: Path, labels: object, dtype: torch.dtype, classes: int | None) -> None:
        dataset = load(write(path, {"a": [1, 2], "y": labels})).train
        assert everything(dataset)[1].dtype == dtype
        assert dataset.num_classes == classes

    @pytest.mark.parametrize("kind", [pa.list_(pa.float64()), pa.list_(pa.int16(), 3), pa.large_list(pa.float32())])
    def test_lists_are_laid_side_by_side(self, path: Path, kind: object) -> None:
        lists = pa.array([[1, 2, 3], [4, 5, 6]], kind)
        dataset = load(write(path, {"v": lists, "flag": [True, False], "y": [0, 1]})).train
        assert everything(dataset)[0].tolist() == [[1, 2, 3, 1], [4, 5, 6, 0]]

    def test_label_and_features_by_name(self, path: Path) -> None:
        dataset = load(write(path, COLUMNS), label="b", features=["a"], regression=True).train
        assert everything(dataset)[0].tolist() == [[1.5], [2.5], [3.5], [4.5]]
        assert everything(dataset)[1].tolist() == [1, 2, 3, 4]

    def test_folders_with_equal_signs_add_no_column(self, tmp_path: Path) -> None:
        (tmp_path / "year=2020").mkdir()
        dataset = load(write(tmp_path / "year=2020" / "data.parquet", COLUMNS)).train
        assert everything(dataset)[0].shape == (4, 2)


@pytest.mark.parametrize(
    ("columns", "args", "message"),
    [
        (COLUMNS, {"label": "kin"}, r"data\.parquet: no column 'kin' among .*did you mean kind\?"),
        (COLUMNS, {"features": ["c"]}, r"data\.parquet: no column 'c'"),
        ({"y": [1]}, {}, "no feature columns"),
        ({"a": pa.array([], pa.int64()), "y": pa.array([], pa.int64())}, {}, r"data\.parquet: holds no rows"),
        ({"t": ["u", "v"], "y": [0, 1]}, {}, "column t: holds string, not numbers"),
        ({"t": [b"u", b"v"], "y": [0, 1]}, {}, "column t: holds binary, not numbers"),
        ({"t": [["u"], ["v"]], "y": [0, 1]}, {}, "column t: holds list<.*, not numbers"),
        ({"a": [1, None], "y": [0, 1]}, {}, "column a, row 1: empty cell"),
        ({"a": [1.0, float("nan")], "y": [0, 1]}, {}, "row 1, column a: not a finite number"),
        ({"a": [1.0, 1e300], "y": [0, 1]}, {}, "row 1, column a: not a finite number"),
        ({"a": [[1, 2], [3]], "y": [0, 1]}, {}, "column a, row 1: a list of 1, not of 2"),
        ({"a": pa.array([[], []], pa.list_(pa.int8())), "y": [0, 1]}, {}, "column a, row 0: a list of 0"),
        ({"a": [[1, 2], [3, None]], "y": [0, 1]}, {}, "column a, row 1: empty cell in its list"),
        ({"a": [[1, 2], [3.0, float("inf")]], "y": [0, 1]}, {}, r"row 1, column a\[1\]: not a finite number"),
        ({"a": [1, 2], "y": [0, None]}, {}, "column y, row 1: empty cell"),
        ({"a": [1, 2], "y": ["u", None]}, {}, "column y, row 1: empty cell"),
        ({"a": [1, 2], "y": [[0], [1]]}, {}, "column y: holds list.*neither numbers nor text"),
        ({"a": [1, 2], "y": [0, -1]}, {}, r"row 1, column y: class label -1 is not in"),
        ({"a": [1, 2], "y": [0, 2]}, {"classes": 2}, r"row 1, column y: class label 2 is not in 0\.\.1"),
        ({"a": [1, 2], "y": ["u", "v"]}, {"regression": True}, "row 0, column y: label 'u' is text"),
        ({"a": [1, 2], "y": [0.5, float("nan")]}, {}, "row 1, column y: target nan"),
    ],
)
def test_bad_columns(path: Path, columns: object, args: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(path, columns), **args)
    assert str(path) in str(caught.value)


def test_label_among_the_features(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.args\.features names 'kind'"):
        load(write(path, COLUMNS), features=["a", "kind"])


class TestFolder:
    def test_files_in_the_order_of_their_names(self, tmp_path: Path) -> None:
        write(tmp_path / "part-2.parquet", {"a": [3, 4], "y": ["n", "k"]})
        write(tmp_path / "part-1.parquet", {"a": [1, 2], "y": ["m", "k"]})
        write(tmp_path / "part-0.parquet", pa.table({"a": [0], "y": ["k"]}).slice(0, 0))
        dataset = load(tmp_path).train
        assert everything(dataset)[0].flatten().tolist() == [1, 2, 3, 4]
        assert everything(dataset)[1].tolist() == [1, 0, 2, 0]

    @pytest.mark.parametrize("held", ["validation", "val-00000-of-00001", "test"])
    def test_own_validation_files(self, tmp_path: Path, held: str) -> None:
        write(tmp_path / "train-00000-of-00002.parquet", COLUMNS)
        write(tmp_path / "train-00001-of-00002.parquet", COLUMNS)
        write(tmp_path / f"{held}.parquet", {"kind": ["z"], "b": [9], "a": [8]})
        splits = load(tmp_path, fraction=0.5)
        assert splits.validation is not None
        assert len(splits.train) == 8
        assert everything(splits.validation)[0].tolist() == [[8, 9]]
        assert everything(splits.validation)[1].tolist() == [2]

    def test_rows_are_held_out(self, tmp_path: Path) -> None:
        write(tmp_path / "one.parquet", COLUMNS)
        splits = load(tmp_path, fraction=0.5)
        assert (len(splits.train), len(splits.validation or [])) == (2, 2)

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            ({"a": [1], "kind": ["x"]}, r"p2\.parquet: no column 'b'"),
            ({"a": [1], "b": [None], "kind": ["x"]}, r"p2\.parquet, column b, row 0: empty cell"),
            ({"a": [1], "b": [[1, 2]], "kind": ["x"]}, r"p2\.parquet: rows of 3 numbers, but of 2"),
            ({"a": [1], "b": [1], "kind": [0]}, r"p2\.parquet, column kind: labels are text in some"),
            ({"a": [1], "b": [float("nan")], "kind": ["x"]}, r"p2\.parquet, row 0, column b: not a finite"),
        ],
    )
    def test_files_must_fit(self, tmp_path: Path, second: object, message: str) -> None:
        write(tmp_path / "p1.parquet", COLUMNS)
        write(tmp_path / "p2.parquet", second)
        with pytest.raises(DataError, match=message):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("held", "message"),
        [
            ({"a": [1], "b": [1], "kind": ["new"]}, r"val\.parquet, row 0, column kind: class 'new'"),
            ({"a": [1], "b": [1], "kind": [0]}, r"val\.parquet: column kind is text in one"),
            ({"a": [1], "b": [[1, 2]], "kind": ["x"]}, r"val\.parquet: rows of 3 numbers for validation"),
        ],
    )
    def test_validation_must_fit(self, tmp_path: Path, held: object, message: str) -> None:
        write(tmp_path / "train.parquet", COLUMNS)
        write(tmp_path / "val.parquet", held)
        with pytest.raises(DataError, match=message):
            load(tmp_path)

    def test_fractions_against_classes(self, tmp_path: Path) -> None:
        write(tmp_path / "train.parquet", {"a": [1, 2], "y": [0, 1]})
        write(tmp_path / "val.parquet", {"a": [1], "y": [0.5]})
        with pytest.raises(DataError, match=r"val\.parquet: column y holds fractions"):
            load(tmp_path)

    def test_no_files(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no \*\.parquet files"):
            load(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 40, -20])
def test_damage(path: Path, keep: int) -> None:
    write(path, COLUMNS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"data\.parquet: not a Parquet file, or a damaged one"):
        load(path)


def test_fingerprint_tells_changes(tmp_path: Path) -> None:
    one = load(write(tmp_path / "one.parquet", COLUMNS)).train.fingerprint()
    same = load(write(tmp_path / "same.parquet", COLUMNS)).train.fingerprint()
    other = load(write(tmp_path / "other.parquet", {**COLUMNS, "b": [1, 2, 3, 5]})).train.fingerprint()
    assert one == same != other
