"""Whether a recorded step should have compiled kernels: torch.compile takes a minute, and saves a fifth of each step.

The choice is made once in a training, right after steps were found fit to be replayed, and is kept in its checkpoints:
compiled kernels round differently, so a resumed training must use them where the uninterrupted one did. What compiling
took and brought is remembered for each model, shape of batch and GPU, so that the next training knows beforehand.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim import Optimizer

from distributed_training.training.engine import Engine
from distributed_training.training.memory import Memory, facts_of

logger = logging.getLogger(__name__)

# Before it is known: what compiling takes, in all and for each layer, and the share of a step that it saves.
_SECONDS, _LAYER_SECONDS, _SAVED = 5.0, 0.3, 0.2
_GAIN = 0.97  # share of the time with plain kernels that a step may take for compiled ones to be used
# How far from fp32 gradients of compiled kernels may be: times as far as those of plain ones, and more of their size.
_TIMES, _MORE = 1.5, 0.02


_UNKNOWN = {"plain_ms": 0.0, "compiled_ms": 0.0, "compile_seconds": 0.0}


class Rounding(NamedTuple):
    """How far gradients are from each other, in shares of their size."""

    compiled: float
    """Those of compiled kernels from those of fp32."""
    plain: float
    """Those of plain kernels from those of fp32."""
    chance: float
    """Those of one seed from those of another: compiled dropout draws other numbers."""

    @property
    def alike(self) -> bool:
        """Whether compiled kernels are as good as plain ones, whose results differ by rounding."""
        return self.compiled <= _TIMES * (self.plain + self.chance) + _MORE


class KernelChoice:
    """The choice of one training.

    Args:
        choice: `training.compile`.
        folder: where what was measured is remembered; None remembers nothing.
    """

    def __init__(self, choice: str, folder: Path | None) -> None:
        self._auto = choice == "auto"
        self._memory = Memory(folder / "kernels.json") if folder is not None else None
        self._facts: dict[str, Any] = {}
        self._used: str | None = None
        self.compiled_before: str | None = None
        """The shape of the batches for which this training has compiled its kernels already; to be done again."""

    def worth_compiling(
        self, engine: Engine, optimizer: Optimizer, shape: str, replay: float, steps_left: int | None
    ) -> bool:
        """Whether to try compiled kernels, where a replay takes so many seconds with plain ones."""
        if not self._auto or steps_left is None:
            return False
        facts = facts_of(engine.plain_model, optimizer, shape, engine.strategy.device)
        self._facts = {**facts, "precision": engine.precision}
        layers = sum(
            1 for module in engine.plain_model.modules() if next(module.parameters(recurse=False), None) is not None
        )
        takes, saves = _SECONDS + _LAYER_SECONDS * layers, _SAVED * replay
        known = self._memory.get(self._facts, tuple(_UNKNOWN)) if self._memory is not None else None
        if known is not None:
            takes, saves = known["compile_seconds"], (known["plain_ms"] - known["compiled_ms"]) / 1000
        if saves * steps_left <= takes:
            logger.debug("compiled kernels would save %.3g s and take %.3g s: not compiled", saves * steps_left, takes)
            return False
        logger.info(
            "compiling the model's kernels, %s %.0f s: %d steps are left at %.3g ms (training.compile=off for none)",
            "about" if known is None else "which took",
            takes,
            steps_left,
            replay * 1000,
        )
        return True

    def judge(self, shape: str, rounding: Rounding, compiled: float, plain: float, seconds: float) -> bool:
        """Whether to use compiled kernels: their steps take `compiled` seconds, and they took `seconds` to make."""
        found = {"plain_ms": plain * 1000, "compiled_ms": compiled * 1000, "compile_seconds": seconds}
        far = f"gradients {rounding.compiled:.2g} from fp32, those of plain ones {rounding.plain:.2g}"
        if not rounding.alike:
            found["compiled_ms"] = found["plain_ms"]
            verdict = f"not used: {far}"
        elif compiled > _GAIN * plain:
            verdict = "not used"
        else:
            verdict = f"used from here on ({far})"
            self._used = shape
        if self._memory is not None:
            self._memory.put(self._facts, found)
        text = "compiled kernels take %.3g ms a step, plain ones %.3g; compiled in %.0f s; %s"
        logger.info(text, compiled * 1000, plain * 1000, seconds, verdict)
        return self._used is not None

    def failed(self, error: Exception) -> None:
        """The model cannot be compiled."""
        line = str(error).strip().split("\n")[0] or type(error).__name__
        logger.info("kernels stay as they are: the model cannot be compiled (%s)", line)
        if self._memory is not None:  # not to be tried by every training
            self._memory.put(self._facts, _UNKNOWN)

    def resumed(self) -> None:
        """The kernels were compiled again, as they were before."""
        self._used, self.compiled_before = self.compiled_before, None
        logger.info("kernels compiled as before, for batches of %s", self._used)

    def record_again(self) -> None:
        """Recordings are made anew: with compiled kernels where they were used."""
        self.compiled_before = self.compiled_before or self._used

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"compiled": self._used or self.compiled_before}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Choose as the training did that `state` is of."""
        if self._auto:
            self.compiled_before = state.get("compiled")
            self._auto = self.compiled_before is not None
