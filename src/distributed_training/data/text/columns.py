"""Which column holds what: named by the user, or found by the names that datasets usually have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from distributed_training.config.check import did_you_mean
from distributed_training.data.text.settings import ProcessSettings
from distributed_training.runtime.errors import DataError

_TEXTS = ("text", "sentence", "content", "document", "review")
_WORDS = ("tokens", "words")
_IMAGES = ("image", "img")
_LABELS = ("label", "labels", "target", "class")
_TAGS = ("ner_tags", "tags", "pos_tags", "labels", "label")


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset that are used."""

    inputs: str
    """Text, words or image."""
    pair: str | None
    """A second text."""
    label: str | None
    """What is to be predicted; None where the text itself is."""

    @property
    def used(self) -> list[str]:
        """Their names."""
        return [name for name in (self.inputs, self.pair, self.label) if name is not None]


def choose_columns(names: Collection[str], settings: ProcessSettings, where: str) -> Columns:
    """The columns for a task. One that is not there is an error that names those that are, and the nearest."""
    if settings.task == "image_classification":
        inputs = _choose(names, settings.image, _IMAGES, "image", where)
    else:
        usual: tuple[str, ...] = _WORDS if settings.task == "token_classification" else _TEXTS
        inputs = _choose(names, settings.text, usual, "text", where)
    pair = _choose(names, settings.text_pair, (), "text_pair", where) if settings.text_pair is not None else None
    if settings.task == "causal_lm":
        return Columns(inputs, None, None)
    usual = _TAGS if settings.task == "token_classification" else _LABELS
    return Columns(inputs, pair, _choose(names, settings.label, usual, "label", where))


def _choose(names: Collection[str], wanted: str | None, usual: tuple[str, ...], key: str, where: str) -> str:
    there = ", ".join(names)
    if wanted is not None:
        if wanted in names:
            return wanted
        raise DataError(f"{where}: no column {wanted!r} (data.args.{key}) among {there}{did_you_mean(wanted, names)}")
    found = next((name for name in usual if name in names), None)
    if found is None:
        raise DataError(
            f"{where}: which column is the {key}? None of {', '.join(usual)} is among {there}; set data.args.{key}"
        )
    return found
