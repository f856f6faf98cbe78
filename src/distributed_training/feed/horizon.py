"""How many steps ahead of training may be prepared: more when training has to wait, fewer when it never does.

Never so few that steps have to be ordered one by one: each order, and each frame, takes time from training.
"""

from __future__ import annotations

_CALM = 8  # horizons' worth of steps without a wait after which it shrinks
_SPAN = 0.1  # seconds of training that are prepared ahead at least
_LONG_SPAN = 0.4  # and as long as that takes little memory
_MEASURED = 0.05  # seconds over which training's pace is measured


class Horizon:
    """A number of steps that doubles with each wait and shrinks by an eighth after a long calm."""

    def __init__(self, *, least: int = 4, most: int = 4096) -> None:
        self.least, self.most = least, most
        self.steps = least
        self._calm = 0
        self._shallowest = most
        self._span = 0  # steps that are prepared ahead at least, by training's pace
        self._light = 0
        self._since: float | None = None
        self._counted = 0

    def waited(self) -> None:
        """Training found nothing ready."""
        # The steps lent out under the present horizon have to arrive before it can be judged.
        if self._calm >= self.steps // 2:
            self.steps = min(self.most, self.steps * 2)
            self._calm = 0
        self._shallowest = self.most
        self._since = None  # a pace with waits in it is not training's own

    def delivered(self, steps: int, depth: int, now: float) -> None:
        """Training took some steps, and so many are still there."""
        self._measure(steps, now)
        self._calm += steps
        self._shallowest = min(self._shallowest, depth)
        if self._calm >= _CALM * self.steps:
            if self._shallowest > self.steps // 2:
                self.steps -= max(1, self.steps // 8)
            self._calm, self._shallowest = 0, self.most
        self.steps = min(self.most, max(self.steps, self.least, self._span))

    def bound(self, most: int, light: int = 0) -> None:
        """Memory allows no more than `most`. So many as are `light` take hardly any of it."""
        self.most, self._light = max(1, most), light
        self.steps = min(self.steps, self.most)

    def _measure(self, steps: int, now: float) -> None:
        if self._since is None:
            self._since, self._counted = now, 0
            return
        self._counted += steps
        if now - self._since >= _MEASURED:
            pace = self._counted / (now - self._since)
            self._span = max(int(pace * _SPAN), min(int(pace * _LONG_SPAN), self._light))
            self._since, self._counted = now, 0
