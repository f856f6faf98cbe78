"""Searchers that know all their trials before the first one: at random, and over a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.tune.search import Searcher


class Planned(Searcher):
    """Gives out a list of parameters, one trial after the other. What trials report changes nothing."""

    def __init__(self, parameters: list[dict[str, Any]]) -> None:
        super().__init__(metric=None, mode=None)
        self._parameters = parameters
        self._given = 0

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next parameters, for Ray."""
        if self._given >= len(self._parameters):
            return Searcher.FINISHED  # type: ignore[no-any-return,return-value,unused-ignore]
        self._given += 1
        return self._parameters[self._given - 1]

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing to learn."""

    def save(self, checkpoint_path: str) -> None:
        """How far it is, for a search that is resumed."""
        Path(checkpoint_path).write_text(json.dumps({"given": self._given}), encoding="utf-8")

    def restore(self, checkpoint_path: str) -> None:
        """Go on from there. The list itself is made anew from the seed."""
        self._given = int(json.loads(Path(checkpoint_path).read_text(encoding="utf-8"))["given"])
