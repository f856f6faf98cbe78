"""Whether other threads help a worker's loading thread: to gather in shared memory, or to send rows over a socket.

Rows in memory go right into a socket; to be sent aside, while the next ones are gathered, they are gathered first. To
gather in several threads needs cores that may be training's. Whether that pays depends on the frames, the dataset and
the cores there are: both ways are tried by turns, and the quicker one is kept for a while. Has no clock of its own.
"""

from __future__ import annotations

import os

_CORES, _CORES_IF_QUICK = 3, 2
"""Cores from which on both ways are tried: the loading thread and the receiver have two, if it is on this machine.
Samples that are loaded one by one, each quickly, keep their thread so busy that help pays on the receiver's core, too;
where each takes long there is little to gain, and the interpreter changes hands too often."""
LARGE = 256 << 10
"""Bytes of a frame that may be worth it."""
_FRAMES, _SECONDS = 8, 0.04  # of one turn, at least
_TURNS = (False, True, True, False, False, True)
"""With help or without. The best turn of each counts: a connection begins slowly, and whatever else the machine does
makes turns slower, never faster."""
_KEPT = 90  # turns until both are tried again
_GAIN = 1.05  # times as much must be sent, or the loading thread is left alone: training may be what sets the pace


class HelperChoice:
    """One connection's choice. The loading thread calls it; what it found may be read by any."""

    def __init__(self, cores: int | None = None) -> None:
        self.cores = len(os.sched_getaffinity(0)) if cores is None else cores
        self.possible = self.cores >= _CORES_IF_QUICK
        """Whether there is ever anything to choose."""
        self.helped = False
        """Whether other threads help now."""
        self._turn = self._frames = self._bytes = 0
        self._since: float | None = None
        self._rates = {False: 0.0, True: 0.0}

    def put(self, now: float, size: int, *, quick: bool = False) -> bool:
        """A frame of so many bytes is ready; whether it, or the next one, is to have help.

        `quick`: what is in it was loaded quickly, but not only gathered from rows in memory.
        """
        if not self.possible or size < LARGE or (self.cores < _CORES and not quick):
            return False
        if self._since is None:
            self._since = now
        elif self._frames >= _FRAMES and now - self._since >= _SECONDS:
            self._turn_over(now, now - self._since)
        self._frames += 1
        self._bytes += size
        return self.helped

    def _turn_over(self, now: float, seconds: float) -> None:
        if self._turn < len(_TURNS):
            self._rates[self.helped] = max(self._rates[self.helped], self._bytes / seconds)
        self._turn += 1
        if self._turn < len(_TURNS):
            self.helped = _TURNS[self._turn]
        elif self._turn == len(_TURNS):
            self.helped = self._rates[True] > _GAIN * self._rates[False]
        elif self._turn >= _KEPT:
            self._turn, self.helped, self._rates = 0, _TURNS[0], {False: 0.0, True: 0.0}
        self._since, self._frames, self._bytes = now, 0, 0
