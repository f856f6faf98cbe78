"""CSV files: what becomes of each kind of column, and the place of every mistake."""

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

FLOWERS = "width,height,species\n1.5,2,setosa\n2.5,3,virginica\n0.5,1,setosa\n3.5,4,versicolor\n"


def load(path: Path, content: str | bytes | None = None, fraction: float = 0.0, **args: object) -> Splits:
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_dataset(DataConfig(dataset="csv", root=str(path), args=args, validation_fraction=fraction))


def everything(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = dataset.fetch(np.arange(len(dataset)))
    return inputs, targets


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.csv"


class TestCsv(DatasetContract):
    @pytest.fixture
    def dataset(self, path: Path) -> Dataset:
        return load(path, FLOWERS).train


class TestLabels:
    def test_text_labels_are_sorted_classes(self, path: Path) -> None:
        dataset = load(path, FLOWERS).train
        inputs, targets = everything(dataset)
        assert inputs.dtype == torch.float32
        assert inputs.tolist() == [[1.5, 2], [2.5, 3], [0.5, 1], [3.5, 4]]
        assert targets.dtype == torch.int64
        assert targets.tolist() == [0, 2, 0, 1]
        assert dataset.classes == ["setosa", "versicolor", "virginica"]
        assert dataset.num_classes == 3

    def test_whole_numbers_are_classes(self, path: Path) -> None:
        dataset = load(path, "x,y\n1,0\n2, 2\n").train
        assert everything(dataset)[1].tolist() == [0, 2]
        assert everything(dataset)[1].dtype == torch.int64
        assert dataset.num_classes == 3
        assert dataset.classes is None

    def test_fractions_are_values(self, path: Path) -> None:
        dataset = load(path, "x,y\n1,0\n2,2.5\n").train
        assert everything(dataset)[1].tolist() == [0, 2.5]
        assert everything(dataset)[1].dtype == torch.float32
        assert dataset.num_classes is None

    def test_whole_numbers_as_values_when_asked(self, path: Path) -> None:
        dataset = load(path, "x,y\n1,-3\n2,250000\n", regression=True).train
        assert everything(dataset)[1].tolist() == [-3, 250000]
        assert dataset.num_classes is None

    def test_number_of_classes_may_be_given(self, path: Path) -> None:
        assert load(path, "x,y\n1,0\n2,1\n", classes=5).train.num_classes == 5
        assert load(path, "x,y\n1,a\n2,b\n", classes=5).train.num_classes == 5

    def test_classes_survive_the_split(self, path: Path) -> None:
        splits = load(path, FLOWERS, fraction=0.5)
        assert splits.validation is not None
        assert splits.validation.classes == splits.train.classes == ["setosa", "versicolor", "virginica"]

    @pytest.mark.parametrize(
        ("content", "args", "message"),
        [
            ("x,y\n1,0\n2,-1\n", {}, r"line 3, column y: class label -1 is not in 0\.\.0"),
            ("x,y\n1,0\n2,3\n", {"classes": 3}, r"line 3, column y: class label 3 is not in 0\.\.2"),
            ("x,y\n1,0.5\n2,nan\n", {}, r"line 3, column y: target nan is not a finite number"),
            ("x,y\n1,0.5\n2,1e300\n", {}, r"line 3, column y: target 1e\+300 is not a finite number"),
            ("x,y\n1,2\n2,b\n", {"regression": True}, r"line 3, column y: label 'b' is not a number"),
            ("x,y\n1,a\n2,b\n", {"classes": 1}, r"column y has 2 classes, not 1"),
        ],
    )
    def test_bad_labels(self, path: Path, content: str, args: dict[str, object], message: str) -> None:
        with pytest.raises(DataError, match=r"data\.csv.*" + message):
            load(path, content, **args)

    def test_classes_of_values(self, path: Path) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.classes=3"):
            load(path, "x,y\n1,0.5\n2,1.5\n", classes=3)


class TestColumns:
    def test_label_and_features_by_name(self, path: Path) -> None:
        dataset = load(path, "id,kind,a,b\nr1,1,10,20\nr2,0,30,40\n", label="kind", features=["b", "a"]).train
        assert everything(dataset)[0].tolist() == [[20, 10], [40, 30]]
        assert everything(dataset)[1].tolist() == [1, 0]

    def test_other_delimiters(self, path: Path) -> None:
        assert everything(load(path, "a;y\n1;0\n2;1\n", delimiter=";").train)[0].tolist() == [[1], [2]]
        assert everything(load(path, "a\ty\n1\t0\n2\t1\n", delimiter="\t").train)[0].tolist() == [[1], [2]]

    def test_byte_order_mark_quotes_blank_lines_and_windows_lines(self, path: Path) -> None:
        dataset = load(path, '\ufeff"a", y\r\n"1",0\r\n\r\n2,1\r\n\r\n').train
        assert everything(dataset)[0].tolist() == [[1], [2]]
        assert dataset.columns == ["a", "y"]

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ({"label": "specie"}, r"no column 'specie' among .*did you mean species\?"),
            ({"features": ["width", "hight"]}, r"no column 'hight' among .*did you mean height\?"),
            ({"features": []}, "no feature columns"),
        ],
    )
    def test_missing_columns(self, path: Path, args: dict[str, object], message: str) -> None:
        with pytest.raises(DataError, match=r"data\.csv: " + message):
            load(path, FLOWERS, **args)

    def test_label_among_the_features(self, path: Path) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.features names 'species'"):
            load(path, FLOWERS, features=["species", "width"])

    @pytest.mark.parametrize("delimiter", ["", ";;", "\n", '"'])
    def test_impossible_delimiter(self, path: Path, delimiter: str) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.delimiter"):
            load(path, FLOWERS, delimiter=delimiter)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ("a,y\n", "holds no rows"),
        ("y\n1\n", "no feature columns"),
        ("5.1,3.5,0\n4.9,3.0,1\n", "line 1: the first line holds numbers"),
        ("a,a,y\n1,2,0\n", "column name 'a' occurs 2 times"),
        ("a,b,y\n1,2,0\n1,2\n", "line 3: 2 cells, but the header has 3"),
        ("a,b,y\n1,2,0\n\n1,2,0,9\n", "line 4: 4 cells, but the header has 3"),
        ("a,b,y\n1,2,0\n1,two,0\n", "line 3, column b: 'two' is not a number"),
        ("a,b,y\n1,2,0\n,2,0\n", "line 3, column a: empty cell"),
        ("a,b,y\n1,2,0\n1, ,0\n", "line 3, column b: empty cell"),
        ("a,b,y\n1,2,0\n1,2,\n", "line 3, column y: empty cell"),
        ("a,b,y\n1,2,0\n1,nan,0\n", "line 3, column b: not a finite number"),
        ("a,b,y\n1,2,0\n1,1e300,0\n", "line 3, column b: not a finite number"),
        ('a,b,y\n1,2,0\n1,"2,0\n', "line 3: unexpected end of data"),
        (b"a,y\n1,0\n\xff\xfe,0\n", "not UTF-8 text"),
        (b"a,y\n1,0\n2\x00,0\n", "line 3"),
    ],
)
def test_bad_files(path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=rf"data\.csv.*{message}"):
        load(path, content)


class TestFolder:
    @pytest.mark.parametrize("name", ["validation.csv", "val.csv", "test.csv"])
    def test_own_validation_file(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "train.csv").write_text(FLOWERS)
        (tmp_path / name).write_text("species,height,width\nversicolor,7,8\n")
        splits = load(tmp_path, fraction=0.5)
        assert len(splits.train) == 4
        assert splits.validation is not None
        inputs, targets = everything(splits.validation)
        assert (inputs.tolist(), targets.tolist()) == ([[8, 7]], [1])

    def test_without_one_rows_are_held_out(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text(FLOWERS)
        splits = load(tmp_path, fraction=0.25)
        assert splits.validation is not None
        assert (len(splits.train), len(splits.validation)) == (3, 1)

    @pytest.mark.parametrize(
        ("train", "held", "message"),
        [
            (FLOWERS, "width,height,species\n1,2,tulip\n", "val.csv, line 2, column species: class 'tulip'"),
            (FLOWERS, "width,species\n1,setosa\n", "val.csv: no column 'height'"),
            (FLOWERS, "width,height,species\n", "val.csv: holds no rows"),
            ("x,y\n1,0\n2,1\n", "x,y\n1,2\n", r"val.csv, line 2, column y: class label 2 is not in 0\.\.1"),
            ("x,y\n1,0\n2,1\n", "x,y\n1,1\n1,b\n", "val.csv, line 3, column y: label 'b' is not a whole number"),
            ("x,y\n1,0\n2,1\n", "x,y\n1,0.5\n", "val.csv, line 2, column y: label '0.5' is not a whole number"),
        ],
    )
    def test_validation_must_fit(self, tmp_path: Path, train: str, held: str, message: str) -> None:
        (tmp_path / "train.csv").write_text(train)
        (tmp_path / "val.csv").write_text(held)
        with pytest.raises(DataError, match=message):
            load(tmp_path)

    def test_text_that_looks_like_numbers_in_validation_stays_text(self, tmp_path: Path) -> None:
        (tmp_path / "train.csv").write_text("x,y\n1,7\n2,A\n")
        (tmp_path / "val.csv").write_text("x,y\n1,7\n")
        assert everything(load(tmp_path).validation)[1].tolist() == [0]  # type: ignore[arg-type]

    def test_no_train_file(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no train\.csv"):
            load(tmp_path)


@pytest.mark.parametrize("change", [("1.5", "1.25"), ("width", "depth"), ("virginica", "other")])
def test_fingerprint_tells_changes(tmp_path: Path, change: tuple[str, str]) -> None:
    one = load(tmp_path / "one.csv", FLOWERS).train
    same = load(tmp_path / "same.csv", FLOWERS).train
    other = load(tmp_path / "other.csv", FLOWERS.replace(*change)).train
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
