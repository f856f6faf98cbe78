"""How many steps ahead of training may be prepared: more when training has to wait, fewer when it never does."""

from __future__ import annotations

_CALM = 8  # horizons' worth of steps without a wait after which it shrinks


class Horizon:
    """A number of steps that doubles with each wait and shrinks by an eighth after a long calm."""

    def __init__(self, *, least: int = 4, most: int = 4096) -> None:
        self.least, self.most = least, most
        self.steps = least
        self._calm = 0
        self._shallowest = most

    def waited(self) -> None:
        """Training found nothing ready."""
        # The steps lent out under the present horizon have to arrive before it can be judged.
        if self._calm >= self.steps // 2:
            self.steps = min(self.most, self.steps * 2)
            self._calm = 0
        self._shallowest = self.most

    def delivered(self, steps: int, depth: int) -> None:
        """Training took some steps, and so many are still there."""
        self._calm += steps
        self._shallowest = min(self._shallowest, depth)
        if self._calm >= _CALM * self.steps:
            if self._shallowest > self.steps // 2:
                self.steps = max(min(self.least, self.most), self.steps - max(1, self.steps // 8))
            self._calm, self._shallowest = 0, self.most

    def bound(self, most: int) -> None:
        """Memory allows no more than this."""
        self.most = max(1, most)
        self.steps = min(self.steps, self.most)
