"""Which strategy to take, why, and what would make fit what does not."""

from __future__ import annotations

from collections.abc import Callable

from distributed_training.planning.predictions import Advice, Prediction
from distributed_training.planning.units import size_text, time_text
from distributed_training.planning.ways import Way

_SAME = 0.05
"""Differences below this are less than the predictions are worth: the simpler strategy is taken then."""
# The simpler, the earlier: what has fewer parts that can go wrong, and needs no further library.
_SIMPLE = ("single", "ddp", "zero1", "zero2", "zero3", "mpi", "accelerate", "deepspeed", "horovod", "dp", "ddp+")
_PARTS = (2, 4, 8, 16, 32, 64)

Again = Callable[[Way, int], tuple[float, bool]]
"""(way, micro-batches) to (bytes needed, whether that fits), for the same number of ranks."""


def advise(rows: list[Prediction], chosen: Way | None, accumulation: int, again: Again) -> Advice:
    """For the predictions of one number of ranks. A strategy that rounds counts only where the config names it."""
    ranks = rows[0].ranks
    allowed = [row for row in rows if row.way.installed and (row.way.exact or row.way == chosen)]
    fitting = [row for row in allowed if row.fits]
    advice = Advice(ranks, None)
    if fitting:
        fastest = min(fitting, key=lambda row: row.time.whole)
        near = [row for row in fitting if row.time.whole <= fastest.time.whole * (1 + _SAME)]
        best = min(near, key=lambda row: (_simplicity(row.way), row.time.whole))
        advice.label, advice.settings = best.way.label, best.way.words
        advice.reasons = _reasons(best, fastest, rows, fitting)
    advice.remedies = _remedies(rows, allowed, accumulation, again)
    if not fitting:
        advice.reasons = [f"nothing that is installed fits on {ranks} devices as it is configured"]
    return advice


def _simplicity(way: Way) -> int:
    for place, name in enumerate(_SIMPLE):
        if way.label == name or ((name.endswith("+") or name == "deepspeed") and way.label.startswith(name)):
            return place
    return len(_SIMPLE)


def _reasons(best: Prediction, fastest: Prediction, rows: list[Prediction], fitting: list[Prediction]) -> list[str]:
    step = best.time
    if best.ranks == 1:
        return [f"one device: {time_text(step.whole)} a step, {size_text(best.memory.total)}"]
    reasons = []
    if best is fastest:
        reasons.append(f"the fastest that fits and trains the same: {time_text(step.whole)} a step")
    else:
        reasons.append(
            f"{time_text(step.whole)} a step, as good as {fastest.way.label} ({time_text(fastest.time.whole)}) within "
            f"{_SAME:.0%}, and simpler"
        )
    share = step.waited / step.whole
    reasons.append(
        f"{share:.0%} of a step is waiting for other ranks ({time_text(step.talked)} of talking, "
        f"{time_text(max(0.0, step.talked - step.waited))} of it hidden)"
    )
    reasons.append(f"needs {size_text(best.needed)} of each device")
    slower = [row for row in fitting if row.memory.total < best.memory.total * 0.8]
    if slower:
        small = min(slower, key=lambda row: row.memory.total)
        reasons.append(
            f"{small.way.label} would need {size_text(small.memory.total)} in place of {size_text(best.memory.total)} "
            f"and take {small.time.whole / step.whole:.2f} times as long"
        )
    lossy = [row for row in rows if not row.way.exact and row.fits]
    if lossy:
        quick = min(lossy, key=lambda row: row.time.whole)
        if quick.time.whole < step.whole * (1 - _SAME):
            reasons.append(
                f"{quick.way.label} would be {step.whole / quick.time.whole:.2f} times as fast, but rounds gradients: "
                f"{quick.way.words}"
            )
    if best.batch * best.ranks > best.global_batch and best.batch == 1:
        reasons.append(
            f"a batch of {best.global_batch} leaves {best.ranks - best.global_batch} of {best.ranks} ranks without a "
            f"sample: raise training.batch_size to {best.ranks} or more"
        )
    elif share > 0.3:
        reasons.append("a larger training.batch_size gives each rank more to do between two exchanges")
    return reasons


def _remedies(rows: list[Prediction], allowed: list[Prediction], accumulation: int, again: Again) -> list[str]:
    """For each strategy that does not fit: the smallest number of micro-batches with which it does."""
    remedies = []
    fits = next((row for row in allowed if row.fits), None)
    for row in [row for row in rows if not row.fits and row.way.exact]:
        text = f"{row.way.label} on {row.ranks} needs {size_text(row.needed)}: "
        parts = next(
            (n * accumulation for n in _PARTS if n * accumulation <= row.batch and again(row.way, n * accumulation)[1]),
            None,
        )
        if parts is not None:
            text += f"fits with training.gradient_accumulation={parts}"
        elif fits is not None:
            text += f"take {fits.way.words}"
        else:
            text += (
                "not even one sample at a time; try training.gradient_checkpointing=true, more GPUs with "
                "strategy=zero3, or strategy=zero3 strategy.cpu_offload=true"
            )
        remedies.append(text)
    return remedies
