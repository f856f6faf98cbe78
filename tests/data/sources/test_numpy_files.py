"""NumPy files: .npz and memory-mapped .npy, what becomes of each type, and damage."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources import load_dataset
from distributed_training.runtime.errors import ConfigError, DataError

X = np.arange(40, dtype=np.float32).reshape(10, 4)
Y = np.arange(10, dtype=np.int64) % 3


def load(root: Path, fraction: float = 0.0, **args: object) -> Splits:
    return load_dataset(DataConfig(dataset="numpy", root=str(root), args=args, validation_fraction=fraction))


def load_npz(folder: Path, args: dict[str, object] | None = None, **arrays: np.ndarray) -> Splits:
    np.savez(folder / "data.npz", **arrays)
    return load(folder / "data.npz", **(args or {}))


def load_npy(folder: Path, **arrays: np.ndarray) -> Splits:
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return load(folder)


class TestArchive(DatasetContract):
    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Dataset:
        return load_npz(tmp_path, x=X, y=Y).train


class TestMappedFiles(DatasetContract):
    @pytest.fixture
    def dataset(self, tmp_path: Path) -> Dataset:
        return load_npy(tmp_path, inputs=X, targets=Y).train

    def test_pickles_as_a_path(self, tmp_path: Path) -> None:
        dataset = load_npy(tmp_path, x=np.zeros((1000, 1000), dtype=np.uint8), y=np.zeros(1000, dtype=np.int64)).train
        assert len(pickle.dumps(dataset)) < 50_000

    def test_files_are_never_written(self, dataset: Dataset, tmp_path: Path) -> None:
        before = (tmp_path / "inputs.npy").read_bytes()
        dataset.fetch(np.array([0]))[0].fill_(7)
        assert (tmp_path / "inputs.npy").read_bytes() == before

    def test_same_fingerprint_as_the_archive(self, dataset: Dataset, tmp_path: Path) -> None:
        assert load_npz(tmp_path, x=X, y=Y).train.fingerprint() == dataset.fingerprint()


class TestNames:
    @pytest.mark.parametrize(
        "names",
        [("inputs", "targets"), ("x", "y"), ("images", "labels"), ("x_train", "y_train"), ("train_x", "labels")],
    )
    def test_known_names(self, tmp_path: Path, names: tuple[str, str]) -> None:
        for dataset in (load_npz(tmp_path, **dict(zip(names, (X, Y)))), load_npy(tmp_path, **dict(zip(names, (X, Y))))):
            inputs, targets = dataset.train.fetch(np.arange(10))
            assert np.array_equal(inputs, X)
            assert np.array_equal(targets, Y)
            assert dataset.train.num_classes == 3

    @pytest.mark.parametrize("names", [("val_x", "val_y"), ("x_test", "y_test"), ("validation_x", "validation_y")])
    def test_own_validation_arrays(self, tmp_path: Path, names: tuple[str, str]) -> None:
        held = {names[0]: X[:2], names[1]: Y[:2]}
        for splits in (load_npz(tmp_path, x=X, y=Y, **held), load_npy(tmp_path, x=X, y=Y, **held)):
            assert splits.validation is not None
            assert (len(splits.train), len(splits.validation)) == (10, 2)
            assert splits.validation.num_classes == 3

    def test_given_names(self, tmp_path: Path) -> None:
        splits = load_npz(
            tmp_path, {"inputs": "a", "targets": "b"}, a=X, b=Y, x=X[:3], y=Y[:3], val_a=X[:4], val_b=Y[:4]
        )
        assert (len(splits.train), len(splits.validation or [])) == (10, 4)

    def test_without_validation_arrays_rows_are_held_out(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "data.npz", x=X, y=Y)
        splits = load(tmp_path / "data.npz", fraction=0.3)
        assert (len(splits.train), len(splits.validation or [])) == (7, 3)

    def test_missing_names_what_is_there(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"data\.npz: no arrays inputs/x/images and .*it holds a, y"):
            load_npz(tmp_path, a=X, y=Y)
        with pytest.raises(DataError, match=r"no arrays foto and .*it holds photo, y; did you mean photo\?"):
            load_npz(tmp_path, {"inputs": "foto"}, photo=X, y=Y)

    def test_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="it holds none"):
            load(tmp_path)


class TestTypes:
    @pytest.mark.parametrize(
        ("stored", "given"),
        [
            ("u1", torch.uint8),
            ("f4", torch.float32),
            ("f8", torch.float32),
            ("f2", torch.float32),
            (">f4", torch.float32),
            ("?", torch.float32),
            ("u2", torch.int64),
            ("i4", torch.int64),
            ("i8", torch.int64),
        ],
    )
    def test_inputs(self, tmp_path: Path, stored: str, given: torch.dtype) -> None:
        for splits in (load_npz(tmp_path, x=X.astype(stored), y=Y), load_npy(tmp_path, x=X.astype(stored), y=Y)):
            copy = pickle.loads(pickle.dumps(splits.train))
            for dataset in (splits.train, copy):
                inputs, _ = dataset.fetch(np.arange(10))
                assert inputs.dtype == given
                assert np.array_equal(inputs, X.astype(stored).astype(inputs.numpy().dtype))

    def test_column_order_and_slices(self, tmp_path: Path) -> None:
        inputs, _ = load_npy(tmp_path, x=np.asfortranarray(X), y=Y).train.fetch(np.array([3, 1]))
        assert np.array_equal(inputs, X[[3, 1]])

    @pytest.mark.parametrize("stored", ["u1", "i4", "u8", "?"])
    def test_class_labels(self, tmp_path: Path, stored: str) -> None:
        dataset = load_npz(tmp_path, x=X, y=(Y % 2).astype(stored)).train
        assert dataset.fetch(np.arange(4))[1].dtype == torch.int64
        assert dataset.num_classes == 2

    def test_values(self, tmp_path: Path) -> None:
        dataset = load_npz(tmp_path, x=X, y=Y / 2).train
        assert dataset.fetch(np.arange(4))[1].dtype == torch.float32
        assert dataset.num_classes is None
        assert load_npz(tmp_path, {"regression": True}, x=X, y=Y).train.fetch(np.arange(4))[1].dtype == torch.float32

    def test_sequences_and_masks_are_left_alone(self, tmp_path: Path) -> None:
        masks = np.full((10, 2), -100, dtype=np.int32)
        dataset = load_npz(tmp_path, {"classes": 4}, x=X, y=masks).train
        assert dataset.fetch(np.arange(1))[1].tolist() == [[-100, -100]]
        assert dataset.num_classes == 4

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            (np.array([[1 + 2j]] * 10), "x holds values of type complex128"),
            (np.array(["a"] * 10), "x holds values of type <U1"),
            (np.array([b"a"] * 10), r"x holds values of type \|S1"),
            (np.zeros(10, dtype=[("a", "f4")]), "x holds values of type"),
            (np.zeros(10, dtype="M8[s]"), "x holds values of type datetime64"),
            (np.float32(3), "x is a single value"),
            (X[:9], "x has 9 rows but y has 10"),
            (np.array([{}] * 10), "Python objects"),
        ],
    )
    def test_refused(self, tmp_path: Path, inputs: np.ndarray, message: str) -> None:
        with pytest.raises(DataError, match=message):
            load_npz(tmp_path, x=inputs, y=Y)
        with pytest.raises(DataError, match=message):
            load_npy(tmp_path, x=inputs, y=Y)

    def test_empty(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"data\.npz: x holds no rows"):
            load_npz(tmp_path, x=X[:0], y=Y[:0])
        with pytest.raises(DataError, match="x holds no rows"):
            load_npy(tmp_path, x=X[:0], y=Y[:0])

    def test_bad_labels(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"y\[0\]: class label -1 is not in"):
            load_npz(tmp_path, x=X, y=Y - 1)
        with pytest.raises(DataError, match=r"y\[2\]: class label 2 is not in 0\.\.1"):
            load_npz(tmp_path, {"classes": 2}, x=X, y=Y)
        with pytest.raises(DataError, match=r"y_val\[0\]: class label 3 is not in 0\.\.2"):
            load_npz(tmp_path, x=X, y=Y, x_val=X[:1], y_val=np.array([3]))
        with pytest.raises(DataError, match=r"y\[4\]: target inf is not a finite"):
            load_npz(tmp_path, x=X, y=np.where(np.arange(10) == 4, np.inf, 0.5))
        with pytest.raises(ConfigError, match=r"data\.args\.classes=0"):
            load_npz(tmp_path, {"classes": 0}, x=X, y=Y)


class TestDamage:
    @pytest.mark.parametrize("keep", [0, 3, 60, 300])
    def test_truncated_archive(self, tmp_path: Path, keep: int) -> None:
        np.savez(tmp_path / "data.npz", x=X, y=Y)
        whole = (tmp_path / "data.npz").read_bytes()
        (tmp_path / "data.npz").write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"data\.npz: not a NumPy file, or a damaged one"):
            load(tmp_path / "data.npz")

    def test_flipped_bits_in_an_archive(self, tmp_path: Path) -> None:
        np.savez_compressed(tmp_path / "data.npz", x=X, y=Y)
        content = bytearray((tmp_path / "data.npz").read_bytes())
        content[90:110] = bytes(b ^ 0xFF for b in content[90:110])
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"data\.npz: not a NumPy file, or a damaged one"):
            load(tmp_path / "data.npz")

    @pytest.mark.parametrize("keep", [0, 3, 60, 150])
    def test_truncated_array(self, tmp_path: Path, keep: int) -> None:
        load_npy(tmp_path, x=X, y=Y)
        whole = (tmp_path / "x.npy").read_bytes()
        (tmp_path / "x.npy").write_bytes(whole[:keep])
        with pytest.raises(DataError, match=r"x\.npy: not a NumPy file, or a damaged one"):
            load(tmp_path)

    def test_a_single_array(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", X)
        with pytest.raises(DataError, match=r"x\.npy: a single array"):
            load(tmp_path / "x.npy")

    def test_not_numpy_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "data.npz").write_text("hello")
        with pytest.raises(DataError, match=r"data\.npz: not a NumPy file"):
            load(tmp_path / "data.npz")


def test_fingerprint_tells_changes(tmp_path: Path) -> None:
    first = load_npz(tmp_path, x=X, y=Y).train.fingerprint()
    assert first != load_npz(tmp_path, x=X + 1, y=Y).train.fingerprint()
    assert first != load_npz(tmp_path, x=X, y=Y[::-1].copy()).train.fingerprint()
    assert first != load_npz(tmp_path, x=X.astype(np.float64), y=Y).train.fingerprint()
