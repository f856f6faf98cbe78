"""Parquet files: number columns and columns of equally long number lists as features, one column as the label.

`data.root` is a file, or a folder whose *.parquet files are read in the order of their names. Where names begin with
`train`, only those are for training, and those that begin with `validation`, `val` or `test` are for validation.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.table import RawTable, TableArguments, choose_columns, make_splits
from distributed_training.runtime.errors import DataError
from distributed_training.runtime.imports import require


def load(config: DataConfig) -> Splits:
    """Float32 features; labels are classes where they are whole numbers or text, else values to predict."""
    arguments = read_arguments(TableArguments, config)
    require("pyarrow.parquet", "files", "reading Parquet files")
    root = Path(config.root)
    train_paths, validation_paths = _find(root)
    columns, label = choose_columns(_columns(train_paths[0]), arguments, str(train_paths[0]))
    train = _read(train_paths, columns, label)
    validation = _read(validation_paths, columns, label) if validation_paths else None
    if validation is not None and len(validation.labels) and validation.columns != train.columns:
        raise DataError(
            f"{validation.source}: rows of {len(validation.columns)} numbers for validation, "
            f"but of {len(train.columns)} for training"
        )
    return make_splits(train, validation, arguments, config.validation_fraction)


def _find(root: Path) -> tuple[list[Path], list[Path]]:
    if root.is_file():
        return [root], []
    if not root.is_dir():
        raise DataError(f"{root}: no such file or folder; set data.root to a Parquet file or a folder of them")
    paths = sorted(root.glob("*.parquet"))
    if not paths:
        raise DataError(f"{root}: no *.parquet files in this folder")

    def part(word: str) -> list[Path]:
        return [path for path in paths if re.match(rf"{word}([-_.]|$)", path.stem)]

    if not part("train"):
        return paths, []
    return part("train"), part("validation") or part("val") or part("test")


def _columns(path: Path) -> list[str]:
    return list(_reading(path, lambda file: file.schema_arrow.names))


def _reading(path: Path, action: Callable[[Any], Any]) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return action(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file, or a damaged one ({error})") from error


def _read(paths: list[Path], columns: list[str], label: str) -> RawTable:
    """All files, one below the other."""
    same = TableArguments(label=label, features=columns)
    features, labels, starts = list[np.ndarray](), list[np.ndarray](), [0]
    names: dict[str, int] = {}
    wide: list[str] = columns
    for path in paths:
        choose_columns(_columns(path), same, str(path))
        table = _reading(path, lambda file: file.read(columns=[*columns, label], use_threads=False))
        starts.append(starts[-1] + len(table))
        if len(table) == 0:
            continue
        blocks = [_numbers(table.column(name), f"{path}, column {name}") for name in columns]
        found = _wide_names(columns, blocks)
        if features and found != wide:
            raise DataError(f"{path}: rows of {len(found)} numbers, but of {len(wide)} in the files before it")
        wide = found
        features.append(np.concatenate(blocks, axis=1))
        column, place = table.column(label), f"{path}, column {label}"
        text = _is_text(column)
        if labels and text != bool(names):
            raise DataError(f"{place}: labels are text in some files and numbers in others")
        labels.append(_named(column, place, names) if text else _numeric_labels(column, place))

    def where(row: int) -> str:
        at = bisect_right(starts, row) - 1
        return f"{paths[at]}, row {row - starts[at]}"

    return RawTable(
        source=str(paths[0] if len(paths) == 1 else paths[0].parent),
        columns=wide,
        label=label,
        features=np.concatenate(features) if features else np.zeros((0, len(columns)), dtype=np.float32),
        labels=np.concatenate(labels) if labels else np.zeros(0, dtype=np.int64),
        where=where,
        names=list(names) or None,
    )


def _wide_names(columns: list[str], blocks: list[np.ndarray]) -> list[str]:
    """One name a number: that of the column, with a position where the column holds lists."""
    names: list[str] = []
    for name, block in zip(columns, blocks):
        names += [name] if block.shape[1] == 1 else [f"{name}[{i}]" for i in range(block.shape[1])]
    return names


def _plain(column: Any, place: str) -> Any:
    """The column in one piece, without dictionary encoding; refuses missing values."""
    import pyarrow.types

    array = column.combine_chunks()
    if pyarrow.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{place}, row {row}: empty cell; fill in or drop missing values first")
    return array


def _numbers(column: Any, place: str) -> np.ndarray:
    """float32 [rows, 1] of a number column, [rows, length] of a column of lists."""
    import pyarrow.types as types

    array = _plain(column, place)
    kind, length = array.type, 1
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind, lengths = array.type.value_type, array.value_lengths().to_numpy(zero_copy_only=False)
        length = int(lengths[0])
        bad = np.flatnonzero((lengths != length) | (lengths == 0))
        if len(bad):
            row = int(bad[0])
            raise DataError(f"{place}, row {row}: a list of {lengths[row]}, not of {length}; all must be equally long")
        array = array.flatten()
        if array.null_count:
            at = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{place}, row {at // length}: empty cell in its list; fill in missing values first")
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise DataError(f"{place}: holds {column.type}, not numbers; leave it out with data.args.features")
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which the table refuses with its place
        return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(-1, length)


def _is_text(column: Any) -> bool:
    import pyarrow.types as types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _named(column: Any, place: str, names: dict[str, int]) -> np.ndarray:
    """Text labels as positions in `names`, which grows by what is new."""
    encoded = _plain(column, place).dictionary_encode()
    codes = np.array([names.setdefault(name, len(names)) for name in encoded.dictionary.to_pylist()], dtype=np.int64)
    return codes[encoded.indices.to_numpy(zero_copy_only=False)]


def _numeric_labels(column: Any, place: str) -> np.ndarray:
    """Number labels as int64 or float64."""
    import pyarrow.types as types

    array = _plain(column, place)
    whole = types.is_integer(array.type) or types.is_boolean(array.type)
    if not whole and not types.is_floating(array.type):
        raise DataError(f"{place}: holds {column.type}, which is neither numbers nor text; set data.args.label")
    return np.asarray(array.to_numpy(zero_copy_only=False)).astype(np.int64 if whole else np.float64)
