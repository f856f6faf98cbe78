"""What a doctor found: one line for each thing it looked at, and for each fault what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "failed"]
Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str
    fix: str = ""
    """What to do, where something is wrong."""
    values: dict[str, Value] = field(default_factory=dict)
    """The figures in the text, for programs."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "status": self.status, "text": self.text, "fix": self.fix, **self.values}


@dataclass
class Diagnosis:
    """All checks of one visit, in the order in which they were made. After a failed one nothing more can be checked."""

    address: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether batches can take this way."""
        return bool(self.checks) and not any(check.status == "failed" for check in self.checks)

    def value(self, name: str) -> Value | None:
        """A figure of one of the checks."""
        return next((check.values[name] for check in self.checks if name in check.values), None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON. The link's secret is not part of it."""
        return {"address": self.address, "ok": self.ok, "checks": [check.to_dict() for check in self.checks]}


class FaultError(Exception):
    """A check that failed: it ends the visit."""

    def __init__(self, check: str, text: str, fix: str, **values: Value) -> None:
        super().__init__(text)
        self.check = Check(check, "failed", text, fix, values)
