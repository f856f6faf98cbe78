"""What a verification found, as a table for people and as JSON for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

PASS, FAIL, LOSSY, ABSENT, YARDSTICK = "pass", "FAIL", "lossy", "not installed", "yardstick"


@dataclass
class Row:
    """One way to run the training."""

    strategy: str
    result: str
    world_size: int | None = None
    loss: float | None = None
    weights: float | None = None
    tensor: str = ""
    first_step: int | None = None
    where: str = ""
    same_batches: bool | None = None
    other_batch: int | None = None
    """The first step that used other samples."""
    notes: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    """The last lines of a run that ended badly."""


@dataclass
class Report:
    """All rows, and what holds for all of them."""

    steps: int
    tolerance: float
    judged_steps: int = 0
    """The last step at which differences mean something; see the notes where it is not the last of all."""
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing failed. What is lossy by design, or not installed, does not fail."""
        return not any(row.result == FAIL for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values; what is not finite as text."""
        rows = [{key: _plain(value) for key, value in vars(row).items()} for row in self.rows]
        head: dict[str, Any] = {"passed": self.passed, "steps": self.steps, "tolerance": self.tolerance}
        head["judged_steps"] = self.judged_steps
        return {**head, "notes": self.notes, "strategies": rows}

    def markdown(self) -> str:
        """A table and its notes, readable as it is."""
        head = ("strategy", "world size", "loss", "weights", "first past tolerance", "batches", "result")
        cells = [head, *[_cells(row) for row in self.rows]]
        widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
        lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in cells]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        notes = [*self.notes, *[f"{row.strategy}: {note}" for row in self.rows for note in row.notes]]
        return "\n".join([*lines, "", *[f"- {note}" for note in notes]]) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    past = f"step {row.first_step}, {row.where}" if row.first_step is not None and row.result != LOSSY else ""
    batches = {None: "", True: "same", False: "OTHER"}[row.same_batches]
    size = str(row.world_size or "")
    return row.strategy, size, _number(row.loss), _number(row.weights), past, batches, row.result


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
