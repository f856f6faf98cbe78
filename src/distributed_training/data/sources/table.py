"""Rows of numbers with a label column, as read from CSV or Parquet, made into datasets."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from distributed_training.config.check import at_least, did_you_mean
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import Splits
from distributed_training.data.sources.labels import Where, class_labels, named_labels, regression_values
from distributed_training.data.sources.split import hold_out
from distributed_training.runtime.errors import ConfigError, DataError


@dataclass(kw_only=True)
class TableArguments:
    """`data.args` of every kind of table."""

    label: str | None = None
    """Column to predict. Left out: the last one."""
    features: list[str] | None = None
    """Columns to predict from. Left out: all but the label."""
    regression: bool = False
    """Take whole-number labels as values to predict, not as classes."""
    classes: int | None = None
    """Number of classes. Left out: the largest label + 1, or the number of class names."""

    def __post_init__(self) -> None:
        at_least("data.args.classes", self.classes, 1)


@dataclass
class RawTable:
    """The rows of a file before its labels are numbered."""

    source: str
    """The file or folder, for messages."""
    columns: list[str]
    """Names of the columns of `features`."""
    label: str
    """Name of the label column."""
    features: np.ndarray
    """float32 [rows, features]."""
    labels: np.ndarray
    """Numbers; or, where `names` is given, positions in it."""
    where: Where
    """Names the place of a row, without the column."""
    names: list[str] | None = field(default=None)
    """The different labels where they are text."""

    def where_label(self, row: int) -> str:
        """The place of the label in this row."""
        return f"{self.where(row)}, column {self.label}"


class Table(ArrayDataset):
    """Rows of a table: float32 features, and a class or a value to predict."""

    def __init__(self, raw: RawTable, targets: np.ndarray, num_classes: int | None, classes: list[str] | None) -> None:
        super().__init__((raw.features, targets), num_classes=num_classes, name="table")
        self.columns = [*raw.columns, raw.label]
        self.classes = classes

    def fingerprint(self) -> str:
        digest = hashlib.sha256(super().fingerprint().encode())
        digest.update(repr((self.columns, self.classes)).encode())
        return digest.hexdigest()[:16]


def choose_columns(header: list[str], arguments: TableArguments, source: str) -> tuple[list[str], str]:
    """Feature columns and label column by name; refuses columns that are not there."""
    if not header:
        raise DataError(f"{source}: has no columns")
    label = header[-1] if arguments.label is None else arguments.label
    features = [c for c in header if c != label] if arguments.features is None else arguments.features
    for name in [label, *features]:
        if name not in header:
            raise DataError(f"{source}: no column {name!r} among {', '.join(header)}{did_you_mean(name, header)}")
        if header.count(name) > 1:
            raise DataError(f"{source}: column name {name!r} occurs {header.count(name)} times; make the names differ")
    if label in features:
        raise ConfigError(f"data.args.features names {label!r}, which is the label")
    if not features:
        raise DataError(f"{source}: no feature columns beside the label {label!r}")
    return list(features), label


def make_splits(train: RawTable, validation: RawTable | None, arguments: TableArguments, fraction: float) -> Splits:
    """Datasets of the tables; without one for validation, `fraction` of the training rows is held out."""
    for raw in (train, validation):
        if raw is not None:
            _check(raw)
    classes, num_classes = None, arguments.classes
    if train.names is not None:
        if arguments.regression:
            raise DataError(
                f"{train.where_label(0)}: label {train.names[0]!r} is text, but data.args.regression is set"
            )
        classes = sorted(set(train.names))
        if num_classes is None:
            num_classes = len(classes)
        if num_classes < len(classes):
            raise DataError(f"{train.source}: column {train.label} has {len(classes)} classes, not {num_classes}")
    elif arguments.regression or train.labels.dtype.kind == "f":
        if num_classes is not None:
            raise ConfigError(
                f"data.args.classes={num_classes}, but column {train.label} of {train.source} has no classes"
            )
    else:
        num_classes = class_labels(train.labels, num_classes, train.where_label)[1]
    dataset = _dataset(train, num_classes, classes)
    if validation is None:
        return hold_out(dataset, fraction)
    return Splits(dataset, _dataset(validation, num_classes, classes))


def _dataset(raw: RawTable, num_classes: int | None, classes: list[str] | None) -> Table:
    if (raw.names is None) != (classes is None):
        raise DataError(f"{raw.source}: column {raw.label} is text in one of the training and validation data only")
    if raw.names is not None and classes is not None:
        targets = named_labels(raw.labels, raw.names, classes, raw.where_label)
    elif num_classes is None:
        targets = regression_values(raw.labels, raw.where_label)
    elif raw.labels.dtype.kind == "f":
        raise DataError(f"{raw.source}: column {raw.label} holds fractions, but classes in the training data")
    else:
        targets = class_labels(raw.labels, num_classes, raw.where_label)[0]
    return Table(raw, targets, num_classes, classes)


def _check(raw: RawTable) -> None:
    if len(raw.labels) == 0:
        raise DataError(f"{raw.source}: holds no rows")
    finite = np.isfinite(raw.features)
    if not finite.all():
        row, column = (int(v) for v in np.argwhere(~finite)[0])
        raise DataError(
            f"{raw.where(row)}, column {raw.columns[column]}: not a finite number; fill in or drop missing values first"
        )
