"""NumPy arrays: an .npz file, or a folder of .npy files that are read from disk as they are needed.

`data.root` holds `inputs` (or x, images) and `targets` (or y, labels), and optionally the same for validation:
`val_inputs`, `x_test` and the like.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distributed_training.config.check import at_least, did_you_mean
from distributed_training.config.schema import DataConfig
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.labels import class_labels, regression_values
from distributed_training.data.sources.split import hold_out
from distributed_training.runtime.errors import DataError

INPUTS = ("inputs", "x", "images")
TARGETS = ("targets", "y", "labels")
HELD_OUT = ("validation", "val", "test")


@dataclass(kw_only=True)
class NumpyArguments:
    """`data.args` of numpy."""

    inputs: str | None = None
    """Name of the array of inputs. Left out: inputs, x or images."""
    targets: str | None = None
    """Name of the array of targets. Left out: targets, y or labels."""
    regression: bool = False
    """Take whole-number targets as values to predict, not as classes."""
    classes: int | None = None
    """Number of classes. Left out: the largest label + 1."""

    def __post_init__(self) -> None:
        at_least("data.args.classes", self.classes, 1)


class NumpyDataset(ArrayDataset):
    """Inputs and targets of equal length. Inputs keep their type on disk and are widened when fetched.

    Where the inputs are a memory-mapped file, a pickled dataset carries its path instead of its contents.
    """

    def __init__(self, inputs: np.ndarray, targets: np.ndarray, num_classes: int | None) -> None:
        super().__init__((inputs, targets), num_classes=num_classes, name="numpy")
        path = getattr(inputs, "filename", None)  # None for a copy of a memory map, which is a memmap in name only
        self._mapped = None if path is None else str(path)
        self.alone = True

    def fetch(self, ids: np.ndarray) -> Any:
        inputs, targets = super().fetch(ids)
        return _widen(inputs), targets

    def __reduce__(self) -> Any:
        inputs, targets = (tensor.numpy() for tensor in self._tensors.values())
        return _rebuild, (self._mapped or inputs, targets, self.num_classes)


def _rebuild(inputs: np.ndarray | str, targets: np.ndarray, num_classes: int | None) -> NumpyDataset:
    if isinstance(inputs, str):
        inputs = _read_npy(Path(inputs))
    return NumpyDataset(inputs, targets, num_classes)


def _widen(inputs: torch.Tensor) -> torch.Tensor:
    """float32 for other floats and bools, int64 for other integers; bytes stay, for they are images."""
    if inputs.dtype == torch.uint8:
        return inputs
    return inputs.to(torch.float32 if inputs.dtype.is_floating_point or inputs.dtype == torch.bool else torch.int64)


def load(config: DataConfig) -> Splits:
    """Inputs as they are stored; whole-number targets of one dimension are classes, others are values."""
    arguments = read_arguments(NumpyArguments, config)
    root = Path(config.root)
    arrays = _open(root)
    train_names = _pair(arrays, arguments, _train_names)
    if train_names is None:
        wanted = f"{arguments.inputs or '/'.join(INPUTS)} and {arguments.targets or '/'.join(TARGETS)}"
        hint = did_you_mean(arguments.inputs or arguments.targets or "", arrays)
        raise DataError(f"{root}: no arrays {wanted}; it holds {', '.join(sorted(arrays)) or 'none'}{hint}")
    train = _dataset(root, train_names, arrays, arguments, arguments.classes)
    held_names = _pair(arrays, arguments, _held_out_names)
    if held_names is not None:
        return Splits(train, _dataset(root, held_names, arrays, arguments, train.num_classes))
    return hold_out(train, config.validation_fraction)


def _open(root: Path) -> Mapping[str, Any]:
    """Names of the arrays, each with the path of its .npy file or, for an .npz, the array itself."""
    if root.is_dir():
        return {path.stem: path for path in sorted(root.glob("*.npy"))}
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; set data.root to an .npz file or a folder of .npy files")
    try:
        with root.open("rb") as file:  # ours to close: np.load leaves it open where the archive is damaged
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise DataError(f"{root}: a single array; put inputs.npy and targets.npy in a folder, or use .npz")
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise _unreadable(root, error) from error


def _read_npy(path: Path) -> np.ndarray:
    try:
        # Copy on write, not read-only: torch warns of memory it must not write to. Nothing is ever written.
        array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _unreadable(path, error) from error
    return array


def _unreadable(path: Path, error: Exception) -> DataError:
    if "Object arrays" in str(error):
        return DataError(
            f"{path}: holds an array of Python objects, which is not read; store it as numbers of one type"
        )
    return DataError(f"{path}: not a NumPy file, or a damaged one ({error})")


def _train_names(name: str) -> Iterable[str]:
    return (name, f"train_{name}", f"{name}_train")


def _held_out_names(name: str) -> Iterable[str]:
    return (form for part in HELD_OUT for form in (f"{part}_{name}", f"{name}_{part}"))


def _pair(arrays: Mapping[str, Any], arguments: NumpyArguments, forms: Any) -> tuple[str, str] | None:
    """Names of the inputs and the targets, or None where either is not there."""

    def find(names: Iterable[str]) -> str | None:
        return next((form for name in names for form in forms(name) if form in arrays), None)

    inputs = find([arguments.inputs] if arguments.inputs else INPUTS)
    targets = find([arguments.targets] if arguments.targets else TARGETS)
    return (inputs, targets) if inputs and targets else None


def _dataset(
    root: Path, names: tuple[str, str], arrays: Mapping[str, Any], arguments: NumpyArguments, classes: int | None
) -> NumpyDataset:
    inputs, targets = (_array(root, name, arrays[name]) for name in names)
    if len(inputs) != len(targets):
        raise DataError(f"{root}: {names[0]} has {len(inputs)} rows but {names[1]} has {len(targets)}; they must match")
    if len(inputs) == 0:
        raise DataError(f"{root}: {names[0]} holds no rows")

    def where(row: int) -> str:
        return f"{root}: {names[1]}[{row}]"

    if arguments.regression or targets.dtype.kind == "f":
        return NumpyDataset(inputs, regression_values(targets, where), None)
    if targets.ndim > 1:  # sequences and masks: their values may mean more than classes, such as -100 for "ignore"
        return NumpyDataset(inputs, np.array(targets, dtype=np.int64), arguments.classes)
    return NumpyDataset(inputs, *class_labels(targets, classes, where))


def _array(root: Path, name: str, stored: Any) -> np.ndarray:
    array: np.ndarray = _read_npy(stored) if isinstance(stored, Path) else stored
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise DataError(f"{root}: {name} holds values of type {array.dtype}; only numbers can become tensors")
    if array.ndim == 0:
        raise DataError(f"{root}: {name} is a single value, not an array with one row a sample")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
