"""What a benchmark found: figures, the parts they belong to, and the report of a whole run. All of it is plain JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from distributed_training.bench.measure import Comparison, Measured, compare

FORMAT = 1
"""Version of the JSON. It rises when a file of an older one can no longer be read as it is."""

Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True, kw_only=True)
class Figure(Measured):
    """One quantity of one variant, once for each round, in the order of the rounds."""

    part: str
    """Name of the part: `scaling`."""
    case: str
    """What was the same for all variants that are compared: `ResNet-18, batch 64`."""
    quantity: str
    """What was measured, in words: `throughput`, `peak memory per rank`."""
    variant: str
    """What differs: `2 processes`, `zero3`, `bf16`."""
    unit: str
    """`samples/s`, `ms`, `MiB`, ..."""
    better: Better = "higher"
    """Which way is good; `neither` for facts such as the bytes of a formula."""
    reference: str | None = None
    """Variant of the same case and quantity that this one is compared with."""
    x: float | None = None
    """Place on the horizontal axis, where the part draws lines."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes it the same figure in another report."""
        return self.part, self.case, self.quantity, self.variant


@dataclass(frozen=True, kw_only=True)
class Plot:
    """How a part wants its figures of one quantity drawn: one panel for each case."""

    title: str
    quantity: str
    kind: Literal["bars", "lines"] = "bars"
    """`lines` need the figures' `x`; figures of one case are one line."""
    show: Literal["values", "ratios"] = "ratios"
    """Ratios to the reference, or the values in their unit."""
    xlabel: str = ""
    ideal: Literal["none", "linear", "flat"] = "none"
    """A dashed line for comparison: `linear` y = x, as a perfect speed-up; `flat` y = 1, as a perfect efficiency."""


@dataclass(kw_only=True)
class PartResult:
    """All that one part of the suite found."""

    name: str
    title: str
    """A few words for the heading."""
    about: str
    """What is measured and how to read it, in one or a few sentences."""
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know to judge the figures."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Variants that could not be measured here, each with the reason."""
    plots: list[Plot] = field(default_factory=list)
    command: str = ""
    """The command that makes these figures again."""
    seconds: float = 0.0
    """How long it took. Set by the frame."""
    problem: str = ""
    """Why it did not run, or how it ended before its time. Set by the frame."""

    def reference_of(self, figure: Figure) -> Figure | None:
        """The figure that this one is compared with."""
        if figure.reference is None or figure.reference == figure.variant:
            return None
        wanted = (figure.part, figure.case, figure.quantity, figure.reference)
        return next((other for other in self.figures if other.key == wanted), None)

    def comparison(self, figure: Figure) -> Comparison | None:
        """The figure beside its reference, round by round; None where there is none."""
        reference = self.reference_of(figure)
        if reference is None:
            return None
        found = compare(figure.values, reference.values)
        return found if found.ratios else None

    def groups(self) -> dict[tuple[str, str], list[Figure]]:
        """Figures by (case, quantity), in the order in which they came."""
        groups: dict[tuple[str, str], list[Figure]] = {}
        for figure in self.figures:
            groups.setdefault((figure.case, figure.quantity), []).append(figure)
        return groups


@dataclass(kw_only=True)
class BenchReport:
    """A whole run: the machine, the versions and the parts."""

    machine: dict[str, Any]
    versions: dict[str, str]
    created: str
    """Time of the start in UTC, ISO 8601."""
    command: str = ""
    parts: list[PartResult] = field(default_factory=list)
    interrupted: bool = False
    """Whether it was stopped before all parts were done."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, medians and ratios included, for programs that do not compute them."""
        body = dataclasses.asdict(self)
        for part, plain in zip(self.parts, body["parts"]):
            for figure, line in zip(part.figures, plain["figures"]):
                found = part.comparison(figure)
                line |= {"median": figure.median, "spread": figure.spread}
                if found is not None:
                    line |= {"ratio": found.median, "ratio_spread": found.spread, "conclusion": found.words}
        return {"format": FORMAT, "kind": "dtrain bench", **body}
