"""Class labels and regression values, checked before a loss function meets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distributed_training.runtime.errors import DataError

Where = Callable[[int], str]
"""Names the place of row i for an error message: 'data/train.csv, line 7, column species'."""


def class_labels(values: np.ndarray, num_classes: int | None, where: Where) -> tuple[np.ndarray, int]:
    """Integer labels as int64, and the number of classes: the one given, or else the largest label + 1."""
    labels = np.array(values, dtype=np.int64)
    if num_classes is None:
        num_classes = int(labels.max(initial=-1)) + 1
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(bad):
        row = int(bad[0])
        raise DataError(
            f"{where(row)}: class label {values[row]} is not in 0..{num_classes - 1}; number the classes from 0, "
            "set data.args.classes to their number, or data.args.regression=true where it is a value to predict"
        )
    return labels, num_classes


def named_labels(codes: np.ndarray, names: Sequence[str], classes: list[str], where: Where) -> np.ndarray:
    """Labels given as text (`names[codes]`) as positions in the sorted list `classes`."""
    position = {name: i for i, name in enumerate(classes)}
    labels = np.array([position.get(name, -1) for name in names], dtype=np.int64)[codes]
    bad = np.flatnonzero(labels < 0)
    if len(bad):
        row = int(bad[0])
        raise DataError(f"{where(row)}: class {names[codes[row]]!r} does not occur in the training data")
    return labels


def regression_values(values: np.ndarray, where: Where) -> np.ndarray:
    """Numbers to predict, as float32; refuses NaN and infinity."""
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, which is refused below with its place
        targets = np.array(values, dtype=np.float32)
    bad = np.argwhere(~np.isfinite(targets))
    if len(bad):
        row = int(bad[0][0])
        raise DataError(f"{where(row)}: target {values[tuple(bad[0])]} is not a finite number")
    return targets
