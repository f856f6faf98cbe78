"""How long an epoch will take, from what was measured so far: said once it can be known, and when it changes much."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST, _STEPS = 3.0, 4  # seconds and steps before the first word
_AGAIN = 20.0  # seconds between two looks after that
_MUCH = 1.5  # times longer or shorter
_SHORT = 10.0  # seconds: nobody needs to be told of a shorter epoch


@dataclass
class Forecast:
    """Asked again and again how things are; answers now and then. Has no clock of its own."""

    steps: int
    """Steps of an epoch."""
    samples: int
    """Samples of an epoch."""
    _before: tuple[float, int, int, float] | None = field(default=None, init=False)
    _said: float | None = field(default=None, init=False)

    def look(self, now: float, steps: int, size: int, waited: float | None = None) -> str | None:
        """What to say, if anything: so many steps were done by now, and so many bytes had come.

        `waited` are the seconds so far that training waited for batches.
        """
        if self._before is None:
            if steps:  # before the first step something else is waited for
                self._before = (now, steps, size, waited or 0.0)
            return None
        since, done, had, had_waited = self._before
        seconds, taken = now - since, steps - done
        if taken < 1 or seconds < (_FIRST if self._said is None else _AGAIN):
            return None
        if taken < _STEPS and seconds < _AGAIN:
            return None
        self._before = (now, steps, size, waited or 0.0)
        epoch = seconds / taken * self.steps
        if self._said is not None and 1 / _MUCH < epoch / self._said < _MUCH:
            return None
        if self._said is None and epoch < _SHORT:
            self._said = epoch
            return None
        changed, self._said = self._said is not None, epoch
        waits = None if waited is None else min(1.0, (waited - had_waited) / seconds)
        return self._sentence(seconds, taken, size - had, epoch, waits, changed)

    def pause(self) -> None:
        """Something else comes in between: what is measured begins anew after it."""
        self._before = None

    def _sentence(self, seconds: float, steps: int, size: int, epoch: float, waits: float | None, changed: bool) -> str:
        each = self.samples / self.steps
        rates = (
            f"{steps * each / seconds:,.0f} samples/s"
            if steps * each >= seconds
            else f"{seconds / steps:,.1f} s a step"
        )
        link = f", {size / 1e6 / seconds:,.2g} MB/s over the link" if size else ", nothing over the link"
        waiting = f", training waits {waits:.0%} of the time" if waits is not None else ""
        begin = "an epoch now takes" if changed else "an epoch will take"
        return f"{begin} about {duration(epoch)}: {self.samples:,} samples at {rates}{link}{waiting}"


def duration(seconds: float) -> str:
    """`45 s`, `4 min 10 s`, `3 h 20 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
