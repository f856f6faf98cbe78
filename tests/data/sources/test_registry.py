"""Datasets by name: dispatch, users' own datasets, and what is said about a wrong name or argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distributed_training.config.schema import DataConfig
from distributed_training.data.sources import DATASETS, load_dataset
from distributed_training.runtime.errors import ConfigError, DataError, MissingDependencyError

MODULE = """
import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset, IterableDataset, TensorDataset
from distributed_training.data import ArrayDataset, Splits
from distributed_training.runtime.errors import DataError

def ours(count=10):
    return ArrayDataset((np.arange(count), np.arange(count)), name="ours")

class MapStyle(TorchDataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, i):
        return torch.tensor([i, i]), i

def pair(count=10, held=4):
    return MapStyle(count), ours(held)

def train_only():
    return ours(), None

def triple():
    return ours(), ours(), ours()

def splits():
    return Splits(ours(3), ours(2))

def free(**anything):
    return ours(anything["count"])

class Stream(IterableDataset):
    def __iter__(self):
        yield 1

def broken():
    return 1 / 0

def refuses():
    raise DataError("my file, line 3: bad")

VALUE = 3
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_data_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_data_module", raising=False)


def config(name: str, fraction: float = 0.2, **args: object) -> DataConfig:
    return DataConfig(dataset=f"user_data_module:{name}", args=args, validation_fraction=fraction)


@pytest.mark.usefixtures("user_code")
class TestImportedDataset:
    def test_our_dataset_is_split(self) -> None:
        splits = load_dataset(config("ours", count=20))
        assert (len(splits.train), len(splits.validation or [])) == (16, 4)

    def test_torch_dataset_is_wrapped_and_split(self) -> None:
        splits = load_dataset(config("MapStyle", fraction=0.0, count=5))
        inputs, targets = splits.train.fetch(np.array([3, 1]))
        assert inputs.tolist() == [[3, 3], [1, 1]]
        assert targets.tolist() == [3, 1]
        assert splits.validation is None

    def test_pair_is_taken_as_it_is(self) -> None:
        splits = load_dataset(config("pair"))
        assert (len(splits.train), len(splits.validation or [])) == (10, 4)

    def test_pair_without_validation(self) -> None:
        assert load_dataset(config("train_only")).validation is None

    def test_splits_are_taken_as_they_are(self) -> None:
        splits = load_dataset(config("splits"))
        assert (len(splits.train), len(splits.validation or [])) == (3, 2)

    def test_any_keyword_is_passed_on_where_it_is_taken(self) -> None:
        assert len(load_dataset(config("free", fraction=0.0, count=7)).train) == 7

    def test_unknown_argument_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.cuont is not known.*did you mean count\?"):
            load_dataset(config("MapStyle", cuont=5))

    def test_missing_argument(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.args do not fit .*count"):
            load_dataset(config("MapStyle"))

    def test_empty(self) -> None:
        with pytest.raises(DataError, match=r"user_data_module:ours.*no samples"):
            load_dataset(config("ours", count=0))

    @pytest.mark.parametrize(("args", "part"), [({"count": 0}, "training"), ({"held": 0}, "validation")])
    def test_empty_part_of_a_pair(self, args: dict[str, object], part: str) -> None:
        with pytest.raises(DataError, match=f"user_data_module:pair: the {part} set holds no samples"):
            load_dataset(config("pair", **args))

    def test_three_parts(self) -> None:
        with pytest.raises(DataError, match="returned 3 parts"):
            load_dataset(config("triple"))

    def test_stream(self) -> None:
        with pytest.raises(DataError, match="Stream, which has no samples by number"):
            load_dataset(config("Stream"))

    def test_its_own_failure_is_named_and_kept(self) -> None:
        with pytest.raises(DataError, match="user_data_module:broken raised ZeroDivisionError") as caught:
            load_dataset(config("broken"))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_our_errors_pass_through(self) -> None:
        with pytest.raises(DataError, match=r"^my file, line 3: bad$"):
            load_dataset(config("refuses"))

    @pytest.mark.parametrize("name", ["nothing_here", "VALUE"])
    def test_not_there_or_not_callable(self, name: str) -> None:
        with pytest.raises(ConfigError, match=name):
            load_dataset(config(name))


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"data\.dataset='cifar' is none of .*did you mean cifar10\?"):
        load_dataset(DataConfig(dataset="cifar"))


@pytest.mark.parametrize("name", DATASETS)
def test_every_kind_refuses_an_unknown_argument(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.args\.nonsense is not known: the dataset " + name):
        load_dataset(DataConfig(dataset=name, root=str(tmp_path), args={"nonsense": 1}))


def test_unknown_argument_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.args\.lable is not known.*did you mean label\?"):
        load_dataset(DataConfig(dataset="csv", root=str(tmp_path), args={"lable": "y"}))


def test_argument_of_the_wrong_type() -> None:
    with pytest.raises(ConfigError, match=r"data\.args\.samples='many' must be a whole number"):
        load_dataset(DataConfig(dataset="synthetic", args={"samples": "many"}))


@pytest.mark.parametrize("name", ["csv", "numpy", "parquet", "images"])
def test_a_root_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: no such"):
        load_dataset(DataConfig(dataset=name, root=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(("name", "module"), [("parquet", "pyarrow"), ("images", "PIL")])
def test_missing_library_names_the_extra(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.import_module", _without(module, __import__("importlib").import_module))
    with pytest.raises(MissingDependencyError, match=rf"{module}.*distributed-training\[files\]"):
        load_dataset(DataConfig(dataset=name, root=str(tmp_path)))


def _without(missing: str, original):  # type: ignore[no-untyped-def]
    def import_module(name: str, *rest: object) -> object:
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return original(name, *rest)

    return import_module


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n")

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # permissions do not bind root, as whom containers run tests
    with pytest.raises(DataError, match=r"data\.csv: Permission denied"):
        load_dataset(DataConfig(dataset="csv", root=str(path)))


def test_importing_the_registry_imports_no_kind() -> None:
    code = (
        "import sys, distributed_training.data.sources as s; "
        "sys.exit(any(m in sys.modules for m in [*s.DATASETS.values(), 'pyarrow', 'PIL']))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
