"""CSV files with a header line: one row a sample, numbers in the feature columns, a label in another.

`data.root` is a file, or a folder with train.csv and optionally validation.csv (or val.csv, test.csv).
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.table import RawTable, TableArguments, choose_columns, make_splits
from distributed_training.runtime.errors import ConfigError, DataError

Kind = Literal["whole number", "number", "text"]


@dataclass(kw_only=True)
class CsvArguments(TableArguments):
    """`data.args` of csv."""

    delimiter: str = ","
    """The character between two cells."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n':
            raise ConfigError(f"data.args.delimiter={self.delimiter!r} must be a single character")


def load(config: DataConfig) -> Splits:
    """Float32 features; labels are classes where they are whole numbers or text, else values to predict."""
    arguments = read_arguments(CsvArguments, config)
    train_path, validation_path = _find(Path(config.root))
    train = _read(train_path, arguments)
    kind: Kind = "number" if arguments.regression else _kind_of(train.names or [])
    validation = None
    if validation_path is not None:
        same = CsvArguments(label=train.label, features=train.columns, delimiter=arguments.delimiter)
        validation = _convert(_read(validation_path, same), kind)
    return make_splits(_convert(train, kind), validation, arguments, config.validation_fraction)


def _find(root: Path) -> tuple[Path, Path | None]:
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; set data.root to a CSV file or a folder with train.csv")
    if root.is_file():
        return root, None
    train = root / "train.csv"
    if not train.is_file():
        raise DataError(f"{root}: no train.csv in this folder; set data.root to the file, or name it so")
    names = ("validation.csv", "val.csv", "test.csv")
    return train, next((root / name for name in names if (root / name).is_file()), None)


def _rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each line that is not blank."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                if row:
                    yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, after line {reader.line_num}: not UTF-8 text ({error.reason})") from error


def _read(path: Path, arguments: CsvArguments) -> RawTable:
    """One pass over the file; labels are kept as text, for their kind shows only when all are read."""
    rows = _rows(path, arguments.delimiter)
    header = _header(path, next(rows, None))
    columns, label = choose_columns(header, arguments, str(path))
    picks, label_at = [header.index(name) for name in columns], header.index(label)
    cells, lines, codes, names = array("f"), array("q"), array("q"), dict[str, int]()
    for line, row in rows:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line}: {len(row)} cells, but the header has {len(header)}")
        try:
            cells.extend([float(row[i]) for i in picks])
        except ValueError:
            _refuse_cell(path, line, row, picks, header)
        text = row[label_at].strip()
        if not text:
            raise DataError(f"{path}, line {line}, column {label}: empty cell; every row needs a label")
        codes.append(names.setdefault(text, len(names)))
        lines.append(line)
    return RawTable(
        source=str(path),
        columns=columns,
        label=label,
        features=np.array(cells, dtype=np.float32).reshape(-1, len(columns)),
        labels=np.array(codes, dtype=np.int64),
        where=lambda row: f"{path}, line {lines[row]}",
        names=list(names),
    )


def _header(path: Path, first: tuple[int, list[str]] | None) -> list[str]:
    if first is None:
        raise DataError(f"{path}: the file is empty; the first line must name the columns")
    header = [name.strip() for name in first[1]]
    # Whole numbers alone may be names ("0", "1", ...); a fraction among numbers only is a row of data.
    if _kind_of(header) == "number":
        raise DataError(f"{path}, line {first[0]}: the first line holds numbers, but it must name the columns")
    return header


def _refuse_cell(path: Path, line: int, row: list[str], picks: list[int], header: list[str]) -> NoReturn:
    bad = next(i for i in picks if not _is(float, row[i]))
    what = f"{row[bad]!r} is not a number" if row[bad].strip() else "empty cell"
    raise DataError(
        f"{path}, line {line}, column {header[bad]}: {what}; fix it, or leave the column out with data.args.features"
    ) from None


def _is(number: Any, text: str) -> bool:
    try:
        number(text)
    except ValueError:
        return False
    return True


def _kind_of(texts: list[str]) -> Kind:
    if all(_is(_int64, text) for text in texts):
        return "whole number"
    return "number" if all(_is(float, text) for text in texts) else "text"


def _int64(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


def _convert(raw: RawTable, kind: Kind) -> RawTable:
    """Turn text labels into numbers where the training file's labels are numbers."""
    if kind == "text" or raw.names is None:
        return raw
    number: Any = _int64 if kind == "whole number" else float
    for code, text in enumerate(raw.names):
        if not _is(number, text):
            row = int(np.flatnonzero(raw.labels == code)[0])
            reason = "the training file's labels are, or data.args.regression is set"
            raise DataError(f"{raw.where_label(row)}: label {text!r} is not a {kind}, but {reason}")
    values = np.array([number(text) for text in raw.names], dtype=np.int64 if number is _int64 else np.float64)
    raw.labels, raw.names = values[raw.labels], None
    return raw
