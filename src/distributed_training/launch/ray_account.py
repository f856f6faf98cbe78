"""What a launcher knows of its ranks on a Ray cluster: what they write goes to the screen, who failed comes last."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed_training.launch.ray_desk import ERR, Began, End, Output
from distributed_training.launch.report import Outcome, of_failures
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.watch import FAILED_ELSEWHERE, HUNG

Show = Callable[[str, str], None]
"""Gets the stream (`out` or `err`) and what to write there."""
_LAST = 30.0  # seconds for the last words of all ranks


def on_screen(stream: str, text: str) -> None:
    """Ranks' output where this process writes its own."""
    to = sys.stderr if stream == ERR else sys.stdout
    to.write(text)
    to.flush()


class Account:
    """All starts of a job's ranks."""

    def __init__(self, desk: Any, show: Show = on_screen, again: Callable[[int], None] = lambda start: None) -> None:
        self._desk, self._show, self._again = desk, show, again
        self._call: Any = None
        self._heard = 0
        self._began: dict[int, dict[int, Began]] = {}
        self._ends: dict[int, dict[int, End]] = {}
        self.newest = -1
        """Number of the newest start of which a rank is known."""

    def read(self, within: float = 5.0) -> bool:
        """Take what the ranks said since the last time. Whether an answer came in time; the next call gets it else."""
        import ray
        from ray.exceptions import RayActorError

        self._call = self._call or self._desk.read.remote()
        if not ray.wait([self._call], timeout=within)[0]:
            return False
        call, self._call = self._call, None
        try:
            events, self._heard = ray.get(call)
        except RayActorError as error:
            raise RanksError(
                f"what the ranks say can no longer be heard: the Ray actor for it has died ({error})"
            ) from None
        self._take(events)
        return True

    def read_to_the_end(self) -> None:
        """Take all that was said before this call."""
        for _ in range(2):  # the first answer may be to a question from before
            self.read(within=_LAST)

    def _take(self, events: list[Began | End | Output]) -> None:
        for event in events:
            if isinstance(event, Output):
                self._show(event.stream, event.text.decode(errors="replace"))
            elif isinstance(event, End):
                self._ends.setdefault(event.start, {})[event.rank] = event
            else:
                self._began.setdefault(event.start, {})[event.rank] = event
                if event.start > self.newest:
                    before, self.newest = self.newest, event.start
                    if before >= 0:
                        self._again(before)

    @property
    def running(self) -> bool:
        """Whether ranks of the newest start are heard of and have not ended."""
        return self._heard > 0 and len(self._ends.get(self.newest, {})) < len(self._began.get(self.newest, {}))

    @property
    def size(self) -> int:
        """Ranks of the newest start."""
        return self.size_of(self.newest)

    def size_of(self, start: int) -> int:
        """Ranks of a start."""
        return next((began.size for began in self._began.get(start, {}).values()), 0)

    def was_told(self, start: int) -> bool:
        """Whether a start's ranks ended because they were asked to."""
        ends = self._ends.get(start, {})
        everybody = len(ends) == len(self._began.get(start, {})) > 0
        return everybody and all(end.told or not end.code for end in ends.values())

    @property
    def finished(self) -> bool:
        """Whether every rank of the newest start ended well."""
        ends = self._ends.get(self.newest, {})
        return bool(self.size) and len(ends) == self.size and all(end.code == 0 for end in ends.values())

    def outcome(self, start: int | None = None) -> Outcome:
        """How a start of the ranks ended: by the failure that came first, or by a worker that is gone."""
        start = self.newest if start is None else start
        ends = self._ends.get(start, {})
        failed = {rank: end for rank, end in ends.items() if end.code}
        lost = [began for rank, began in sorted(self._began.get(start, {}).items()) if rank not in ends]
        own = [end for end in failed.values() if end.code not in (HUNG, FAILED_ELSEWHERE) and not end.told]
        if lost and not own:  # the others ended because of it
            who = lost[0]
            return Outcome(
                128 + signal.SIGKILL,
                f"rank {who.rank} of {who.size} ({who.where}) is gone: its node or the Ray worker that ran it died",
            )
        return _of_ends(failed) if failed else Outcome(0)


def _of_ends(failed: dict[int, End]) -> Outcome:
    """In the words of every launcher: see `launch/report.py`."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    with tempfile.TemporaryDirectory(prefix="dtrain-ray-") as folder:
        failures = {}
        for rank, end in failed.items():
            file = Path(folder) / str(rank)
            if end.error is not None:
                file.write_text(json.dumps({"message": end.error}), encoding="utf-8")
            failures[rank] = ProcessFailure(rank, end.pid, end.code, str(file))
        size = next(iter(failed.values())).size
        return of_failures(failures, size, {rank: end.where for rank, end in failed.items()})
