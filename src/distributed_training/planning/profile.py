"""What was measured of a model on this device: time and memory of a step by batch size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distributed_training.planning.communication import interpolate

UPDATE = -1
"""In a timeline, in place of a parameter: the update."""
BACKWARD_OVER = -2
"""The moment when the backward pass is over: what is there then, and not the most since the last gradient."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step on one device."""

    forward: float
    backward: float
    update: float
    rest: float
    """Waiting for data, bringing it to the device, and the loop around the step."""
    captured: float | None = None
    """The whole step as one CUDA graph, where it was."""

    @property
    def whole(self) -> float:
        """Of the step."""
        return self.forward + self.backward + self.update + self.rest


@dataclass
class Profile:
    """A model, measured."""

    model: dict[str, Any]
    """Facts: see `model_facts`."""
    times: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    """What was found, by processes beside each other on the machine, and by batch size of each."""
    settled: dict[str, str] = field(default_factory=dict)
    """Settings left at auto that were chosen by a measurement; all of this and what it is compared with has them."""
    trouble: str = ""
    """Why larger batches could not be measured."""
    spread: float = 0.0
    """Of the noisiest measurement."""
    jitter: dict[int, float] = field(default_factory=dict)
    """By processes beside each other: how much a step differs from the one before, as a share of it (one sigma)."""
    own: dict[str, float] = field(default_factory=dict)
    """Seconds that a library adds to a step by itself, by the label of its way: see `own_time`."""
    had_core: float = 1.0
    """Share of the time in which a process that was measured on a CPU really ran: of the one that ran least."""

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return str(self.model["machine"]["device"]).partition(":")[0]

    @property
    def gradient_bytes(self) -> float:
        """Of all gradients, which are of the size of their parameters."""
        return float(sum(self.model["bytes"]))

    def copies(self, ranks: int) -> int:
        """The measured number of processes on a machine that comes nearest to `ranks`."""
        return min(self.times, key=lambda measured: (abs(measured - ranks), measured))

    def parts(self, batch: float, ranks_here: int) -> StepParts:
        """Seconds of a step of `batch` samples with so many ranks on the machine; between batch sizes on a line."""
        found = self.times[self.copies(ranks_here)]

        def at(*names: str) -> float:
            values = [(float(size), sum(one["parts"].get(name, 0.0) for name in names)) for size, one in found.items()]
            return interpolate(sorted(values), batch)

        captured = sorted((float(s), one["captured_step"]) for s, one in found.items() if "captured_step" in one)
        return StepParts(
            at("forward"),
            at("backward"),
            at("update"),
            at("wait", "place", "between", "loop"),
            interpolate(captured, batch) if captured else None,
        )

    def ready(self, batch: float) -> list[tuple[int, float]]:
        """(parameter, share of the backward pass that is over when its gradient is there), of the nearest batch."""
        found = {size: one for times in self.times.values() for size, one in times.items() if one["ready"]}
        nearest = min(found, key=lambda size: abs(size - batch))
        return [(int(number), float(share)) for number, share in found[nearest]["ready"]]

    def timeline(self, batch: float) -> list[tuple[int, float]]:
        """(parameter, bytes at most until its gradient was there) on one device; then `BACKWARD_OVER` and `UPDATE`."""
        found: dict[int, list[tuple[int, float]]] = {}
        for copies in sorted(self.times, reverse=True):
            for size, one in self.times[copies].items():
                found[size] = [(int(number), float(peak)) for number, peak in one["timeline"]]
        sizes = sorted(found)
        order = [number for number, _ in found[sizes[-1]]]
        usable = [size for size in sizes if [number for number, _ in found[size]] == order]
        if len(usable) == 1:  # gradients come in another order with other batches: the moments are about the same
            usable = [size for size in sizes if len(found[size]) == len(order)]
        return [
            (number, _on_line([(float(size), found[size][i][1]) for size in usable], batch))
            for i, number in enumerate(order)
        ]

    @property
    def measured_batches(self) -> list[int]:
        """All batch sizes that were measured."""
        return sorted({size for times in self.times.values() for size in times})


def _on_line(points: list[tuple[float, float]], batch: float) -> float:
    """Memory at a batch size: unlike time it goes on falling below the smallest that was measured."""
    if batch >= points[0][0] or len(points) == 1:
        return interpolate(points, batch)
    (x0, y0), (x1, y1) = points[:2]
    return y0 - (y1 - y0) / (x1 - x0) * (x0 - batch)
