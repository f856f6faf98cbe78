"""Where predictions go: into memory, or straight into a file that grows while they come.

Rows arrive in the order of the dataset; row i is sample i. Samples that were left out have the class -1 and a
confidence that is not a number. A file is written aside and gets its name when it is complete.

    .npy      one structured array: numpy.load(path, mmap_mode="r")["prediction"]
    .parquet  one column each, lists where a sample has several values (extra `files`)
    .csv      sample, prediction (by name where the classes have names), confidence
"""

from __future__ import annotations

import csv
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.runtime.imports import require

Rows = dict[str, np.ndarray]
"""Columns by name, each with one row a sample: prediction, confidence, passed, top_classes, top_probabilities,
probabilities; of a model that is no classifier only output."""

_ROW_GROUP = 1 << 16
_GROUP_BYTES = 64 << 20


class Results(ABC):
    """Takes rows in order. `begin` is called once, with the first rows, before anything else."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._next = 0

    def begin(self, rows: Rows) -> None:
        """The kinds of columns are those of these rows."""
        self._blank = {name: _blank(column) for name, column in rows.items()}

    def add(self, ids: np.ndarray, rows: Rows) -> None:
        """Rows of these samples, which come after all others so far. What lies between is left blank."""
        if len(ids) and int(ids[-1]) - int(ids[0]) + 1 == len(ids):
            self._fill(int(ids[0]))
            self._put(rows, len(ids))
            return
        for at, sample in enumerate(ids.tolist()):
            self._fill(sample)
            self._put({name: column[at : at + 1] for name, column in rows.items()}, 1)

    def finish(self) -> None:
        """All rows came."""
        self._fill(self.samples)

    def abort(self) -> None:  # noqa: B027 (optional)
        """Not all rows came: leave nothing half-finished behind. Safe to call after `finish`."""

    @abstractmethod
    def write(self, first: int, rows: Rows, count: int) -> None:
        """Keep the rows of samples `first` to `first + count`."""

    def _put(self, rows: Rows, count: int) -> None:
        self.write(self._next, rows, count)
        self._next += count

    def _fill(self, until: int) -> None:
        while (count := min(until - self._next, _ROW_GROUP)) > 0:
            self._put({name: np.repeat(blank, count, axis=0) for name, blank in self._blank.items()}, count)


class InMemory(Results):
    """Arrays with a row for each sample."""

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        self.columns: Rows = {
            name: np.empty((self.samples, *column.shape[1:]), column.dtype) for name, column in rows.items()
        }

    def write(self, first: int, rows: Rows, count: int) -> None:
        for name, column in rows.items():
            self.columns[name][first : first + count] = column


class _File(Results):
    """A file that is written aside."""

    def __init__(self, samples: int, path: Path) -> None:
        super().__init__(samples)
        self._path, self._part = path, path.with_name(f"{path.name}.part")
        if not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}; make it first")
        self._file: IO[Any] | None = None

    def finish(self) -> None:
        super().finish()
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
        self._part.replace(self._path)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._part.unlink(missing_ok=True)


class NpyFile(_File):
    """A NumPy file of one structured array."""

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        self._type = np.dtype([(name, column.dtype, column.shape[1:]) for name, column in rows.items()])
        header = {"descr": np.lib.format.dtype_to_descr(self._type), "fortran_order": False, "shape": (self.samples,)}
        self._file = self._part.open("wb")
        np.lib.format.write_array_header_2_0(self._file, header)

    def write(self, first: int, rows: Rows, count: int) -> None:
        table = np.empty(count, self._type)
        for name, column in rows.items():
            table[name] = column
        assert self._file is not None
        self._file.write(table.tobytes())


class CsvLines:
    """Results as lines of text, for a file or the screen. The first line names the columns."""

    def __init__(self, file: IO[str], classes: list[str] | None) -> None:
        self._csv, self._classes = csv.writer(file), classes
        self._began = False

    def write(self, first: int, rows: Rows) -> None:
        """A line for each sample from `first` on."""
        plain = rows.get("output")
        numbers = itertools.count(first)
        if not self._began:
            self._began = True
            width = int(np.prod(plain.shape[1:], dtype=np.int64)) if plain is not None else 0
            outputs = [f"output_{number}" for number in range(width)]
            self._csv.writerow(["sample", *(outputs or ("prediction", "confidence"))])
        if plain is not None:
            self._csv.writerows([n, *row] for n, row in zip(numbers, plain.reshape(len(plain), -1).tolist()))
            return
        for number, best, confidence in zip(numbers, rows["prediction"].tolist(), rows["confidence"].tolist()):
            name = self._classes[best] if self._classes is not None and 0 <= best < len(self._classes) else best
            self._csv.writerow([number, name, f"{confidence:.6f}"])


class CsvFile(_File):
    """A text file with a line for each sample."""

    def __init__(self, samples: int, path: Path, classes: list[str] | None) -> None:
        super().__init__(samples, path)
        self._classes = classes

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        self._file = self._part.open("w", newline="", encoding="utf-8")
        self._lines = CsvLines(self._file, self._classes)

    def write(self, first: int, rows: Rows, count: int) -> None:
        self._lines.write(first, rows)


class ParquetFile(_File):
    """A Parquet file; a row group is kept in memory until it is full."""

    def __init__(self, samples: int, path: Path) -> None:
        super().__init__(samples, path)
        self._arrow = require("pyarrow", "files", "writing Parquet files")
        self._parquet = require("pyarrow.parquet", "files", "writing Parquet files")
        self._writer: Any = None
        self._waiting: list[Any] = []
        self._rows = 0

    def begin(self, rows: Rows) -> None:
        super().begin(rows)
        row_bytes = sum(column[:1].nbytes for column in rows.values())
        self._group = max(1, min(_ROW_GROUP, _GROUP_BYTES // max(1, row_bytes)))

    def write(self, first: int, rows: Rows, count: int) -> None:
        columns = {"sample": np.arange(first, first + count), **rows}
        batch = self._arrow.table({name: self._column(column) for name, column in columns.items()})
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(str(self._part), batch.schema)
        self._waiting.append(batch)
        self._rows += count
        if self._rows >= self._group:
            self._flush()

    def finish(self) -> None:
        Results.finish(self)
        self._flush()
        self._writer.close()
        self._writer = None
        super().finish()

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        super().abort()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(self._arrow.concat_tables(self._waiting), row_group_size=self._group)
            self._waiting, self._rows = [], 0

    def _column(self, column: np.ndarray) -> Any:
        arrow = self._arrow
        flat = arrow.array(np.ascontiguousarray(column).reshape(-1))
        if column.ndim == 1:
            return flat
        width = int(np.prod(column.shape[1:], dtype=np.int64))
        return arrow.FixedSizeListArray.from_arrays(flat, width)


FILES: dict[str, Callable[[int, Path, list[str] | None], Results]] = {
    ".npy": lambda samples, path, classes: NpyFile(samples, path),
    ".parquet": lambda samples, path, classes: ParquetFile(samples, path),
    ".csv": CsvFile,
}


def results_for(samples: int, output: str | Path | None, classes: list[str] | None = None) -> Results:
    """Where the results of so many samples go: a file by the end of its name, or memory."""
    if output is None:
        return InMemory(samples)
    path = Path(output)
    if path.suffix not in FILES:
        raise ConfigError(f"output={str(path)!r}: the name must end in {', '.join(FILES)}")
    return FILES[path.suffix](samples, path, classes)


def _blank(column: np.ndarray) -> np.ndarray:
    """A row that says that there is none."""
    if not len(column):
        raise DataError("the first batch of results is empty; both sides need the same release")
    row = np.zeros_like(column[:1])
    if column.dtype.kind == "f":
        row[...] = np.nan
    elif column.dtype.kind == "i":
        row[...] = -1
    return row
