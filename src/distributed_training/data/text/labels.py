"""Labels as numbers: names of classes, whole numbers, or values to predict, found out from the training data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.config.check import did_you_mean
from distributed_training.data.text.settings import ProcessSettings
from distributed_training.runtime.errors import ConfigError, DataError

_ROWS = 10_000  # rows looked at in one go


@dataclass(frozen=True)
class Labels:
    """What the labels of a dataset are."""

    column: str
    names: list[str] | None = None
    """Names of the classes by number; None where they have none."""
    count: int | None = None
    """Number of classes; 1 for a value to predict."""
    text: bool = False
    """Whether the data has the names themselves, not their numbers."""
    values: bool = False
    """Whether they are values to predict, not classes."""

    def encode(self, labels: list[Any], first: int, where: str, what: str = "sample") -> list[Any]:
        """Labels of neighbouring samples, or of the words of one, as numbers. `first` is the number of the first."""
        if any(label is None for label in labels):
            at = next(at for at, label in enumerate(labels) if label is None)
            raise DataError(
                f"{where}, {what} {first + at}, column {self.column}: no label; fill it in or leave such samples out"
            )
        if not self.text:
            return [int(label) if isinstance(label, bool) else label for label in labels]
        numbers = {name: number for number, name in enumerate(self.names or ())}
        unknown = next((at for at, label in enumerate(labels) if label not in numbers), None)
        if unknown is not None:
            raise DataError(
                f"{where}, {what} {first + unknown}, column {self.column}: label {labels[unknown]!r} is none of the "
                f"classes {', '.join(self.names or ())}{did_you_mean(str(labels[unknown]), self.names or ())}"
            )
        return [numbers[label] for label in labels]


def find_labels(dataset: Any, column: str, settings: ProcessSettings, where: str) -> Labels:
    """What the labels of the training data are. Refuses those that are empty, no classes, or too many of them."""
    feature = _innermost(dataset.features[column], column, settings, where)
    names: list[str] | None = list(feature.names) if hasattr(feature, "names") else None
    kind = str(getattr(feature, "dtype", ""))
    if names is not None:
        if settings.labels is not None and settings.labels != names:
            raise ConfigError(f"data.args.labels={settings.labels}, but {where} numbers its classes {names}")
        return _counted(Labels(column, names, len(names)), settings, where)
    if kind in ("string", "large_string"):
        names = settings.labels or sorted(_distinct(dataset, column, where))
        return _counted(Labels(column, names, len(names), text=True), settings, where)
    if kind.startswith(("float", "double")):
        if settings.task != "sequence_classification":
            raise DataError(f"{where}, column {column}: holds {kind}, not classes")
        return Labels(column, count=1, values=True)
    if not kind.startswith(("int", "uint", "bool")):
        raise DataError(f"{where}, column {column}: holds {kind or feature}, neither classes nor numbers")
    highest = max((int(value) for value in _distinct(dataset, column, where)), default=-1) + 1
    count = len(settings.labels) if settings.labels is not None else settings.num_labels or highest
    return _counted(Labels(column, settings.labels, max(count, 1)), settings, where)


def check_numbers(numbers: np.ndarray, labels: Labels, rows: np.ndarray | None, where: str) -> None:
    """Refuse a label that is no class; -100 is not judged, where there is a label for each token.

    `rows` says to which sample each number belongs; None: one for each.
    """
    if labels.values or labels.count is None:
        return
    bad = (numbers >= labels.count) | (numbers < 0)
    if rows is not None:
        bad &= numbers != -100
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        row = at if rows is None else int(rows[at])
        raise DataError(
            f"{where}, sample {row}, column {labels.column}: label {numbers[at]} is not in 0..{labels.count - 1}; "
            "correct it, leave such samples out, or raise num_labels (data.args.num_labels, model.num_classes)"
        )


def _counted(labels: Labels, settings: ProcessSettings, where: str) -> Labels:
    wanted = settings.num_labels
    if wanted is not None and labels.count is not None and labels.count > wanted:
        shown = f" ({', '.join(labels.names[:8])})" if labels.names is not None else ""
        raise DataError(
            f"{where}, column {labels.column}: {labels.count} classes{shown}, but num_labels={wanted}; "
            "set num_labels to their number or leave it out"
        )
    if labels.names is not None and len(set(labels.names)) < len(labels.names):
        raise ConfigError(f"data.args.labels={labels.names} names a class twice")
    return labels


def _innermost(feature: Any, column: str, settings: ProcessSettings, where: str) -> Any:
    inner = getattr(feature, "feature", None)
    if isinstance(feature, (list, tuple)) and len(feature) == 1:
        inner = feature[0]
    per_word = settings.task == "token_classification"
    if per_word != (inner is not None):
        raise DataError(
            f"{where}, column {column}: one label for each sample, not for each word (task token_classification)"
            if per_word
            else f"{where}, column {column}: several labels for each sample; set data.args.label, or "
            "data.args.task=token_classification where it is one for each word"
        )
    return inner if per_word else feature


def _distinct(dataset: Any, column: str, where: str) -> set[Any]:
    """The different values in a column of values or of lists; refuses a sample without any."""
    import pyarrow.compute

    found: set[Any] = set()
    first = 0
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=_ROWS):
        values = table.column(0).combine_chunks()
        _refuse_nulls(values, first, column, where)
        first += len(values)
        while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
            values = values.flatten()
        found.update(pyarrow.compute.unique(values).to_pylist())
    if None in found:
        raise DataError(f"{where}, column {column}: a sample has an empty label inside its list")
    return found


def _refuse_nulls(values: Any, first: int, column: str, where: str) -> None:
    if values.null_count:
        row = first + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{where}, sample {row}, column {column}: no label; fill it in or leave such samples out")
