"""The CPU side of a validation or inference: sends batches, receives what the model says of them, in the same order.

The GPU side keeps nothing of a task. Batches stay here until their results have come, so that after a fault the client
dials again, sends those once more, and goes on: no sample is answered twice or left out.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distributed_training.feed.compression import Compressor
from distributed_training.feed.joining import Joined, LostError, RefusedError, join_patiently
from distributed_training.feed.outbox import Frame, Outbox
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.settings import LoaderSettings
from distributed_training.feed.tensors import as_raw, as_tensor
from distributed_training.runtime.errors import FeedError
from distributed_training.wire import PackedBatch, PeerError, Result, Role, pack_batch
from distributed_training.wire.limits import MAX_TEXT
from distributed_training.wire.messages import Blocked, Cancel, Credit, SampleFailed, Task, TaskEnd

if TYPE_CHECKING:
    from distributed_training.wire.events import Event
    from distributed_training.wire.fields import Fact

logger = logging.getLogger(__name__)

_TASK = 1
_RESULTS = 16 << 20  # bytes of results that may be on their way or wait here
_LOOK = 1.0


@dataclass
class Loaded:
    """Some samples of a dataset."""

    step: int
    ids: np.ndarray
    data: Any
    bad: dict[int, str] = field(default_factory=dict)
    """Samples that could not be loaded and are left out, with the reason."""


@dataclass(frozen=True)
class Transfer:
    """What travelled, in bytes of all kinds."""

    sent: int = 0
    received: int = 0
    connections: int = 0


@dataclass
class _Sent:
    """A batch without a result."""

    step: int
    ids: np.ndarray
    packed: PackedBatch


class Client:
    """One task at a GPU side. `run` gives results while it sends, and holds a bounded number of batches."""

    def __init__(
        self, link: str | PairingLink, mode: str, facts: Mapping[str, Fact], settings: LoaderSettings | None = None
    ) -> None:
        self._link = PairingLink.parse(link) if isinstance(link, str) else link
        self._mode, self._facts = mode, dict(facts)
        self._settings = replace(settings or LoaderSettings(), shared_memory=False)
        self._model: Any = None
        self._unanswered: deque[_Sent] = deque()
        self._size = 0  # bytes of these
        self._samples = 0
        self._progress = time.monotonic()
        self._past = Transfer()
        self._line: _Line | None = None
        self.seconds = {"loading": 0.0, "network": 0.0, "gpu": 0.0}
        """How long this side loaded, waited for the link to take what was loaded, and for the GPU side to answer."""

    @property
    def transfer(self) -> Transfer:
        """What travelled so far."""
        past, line = self._past, self._line
        if line is None:
            return past
        return Transfer(past.sent + line.sent_bytes, past.received + line.received_bytes, past.connections)

    def run(self, pieces: Iterable[Loaded]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield (ids, result) in the order of the pieces. FeedError where the GPU side refuses or is gone for long."""
        source = iter(pieces)
        following = self._load(source)  # first of all: loader processes are best started while there is no thread here
        while following is not None or self._unanswered:
            try:
                line = self._connect()
                for sent in self._unanswered:
                    line.put_now(self._frame(sent, line))
                while following is not None or self._unanswered:
                    for result in line.take():
                        yield self._answered(result)
                    room = self._size < self._settings.memory
                    if following is not None and room and line.has_room:
                        self._send(following, line)
                        following = self._load(source)
                    elif self._unanswered:
                        self._wait(line, until_room=following is not None and room)
                line.send(TaskEnd(_TASK, self._samples))
            except LostError as error:
                self._check_progress()
                logger.warning("%s; connecting again", error)
                time.sleep(self._settings.first_pause)
            finally:
                self._disconnect()

    # -- the connection

    def _connect(self) -> _Line:
        facts: dict[str, Fact] = {"mode": self._mode}
        joined = join_patiently(self._link, facts, "", self._settings, Role.CLIENT)
        line = self._line = _Line(joined, self._link, self._settings)
        self._past = replace(self._past, connections=self._past.connections + 1)
        model = joined.facts.get("model")
        if self._samples and model != self._model:
            raise FeedError(
                f"{self._link.address} has another model than before the connection was lost, and results of two "
                "models must not be mixed; start again"
            )
        self._model = model
        line.send(Task(_TASK, self._mode, self._facts))
        line.grant()
        line.start()  # not before: the task must be the first to be said
        return line

    def _disconnect(self) -> None:
        line = self._line
        if line is not None:
            line.close()
            self._past = self.transfer
            self._line = None

    def _check_progress(self) -> None:
        waited = time.monotonic() - self._progress
        if waited > self._settings.patience:
            raise FeedError(f"{self._link.address} sent no result for {waited:.0f} s; see what it does")

    def _wait(self, line: _Line, *, until_room: bool) -> None:
        self._check_progress()
        start, what = time.perf_counter(), "network" if line.sending else "gpu"
        line.wait(_LOOK, until_room=until_room)
        self.seconds[what] += time.perf_counter() - start

    # -- batches and results

    def _load(self, source: Iterator[Loaded]) -> Loaded | None:
        start = time.perf_counter()
        try:
            return next(source, None)
        finally:
            self.seconds["loading"] += time.perf_counter() - start

    def _send(self, piece: Loaded, line: _Line) -> None:
        for sample, text in piece.bad.items():
            line.send(SampleFailed(_TASK, 0, piece.step, sample, text[:MAX_TEXT]))
        if not len(piece.ids):
            return
        packed = pack_batch(0, piece.step, piece.ids, piece.data, adapt=as_raw)
        sent = _Sent(piece.step, piece.ids, packed)
        if not self._unanswered:
            self._progress = time.monotonic()
        self._unanswered.append(sent)
        self._size += packed.size
        line.put_now(self._frame(sent, line))

    def _frame(self, sent: _Sent, line: _Line) -> Frame:
        """The batch as it travels on this connection. What is kept stays as it is: the next one may have no codecs."""
        packed = copy.copy(sent.packed)
        packed.buffers, packed.coded = list(packed.buffers), {}
        line.compressor.bandwidth = line.bandwidth
        line.compressor.apply(packed)
        return Frame(_TASK, [packed], packed.size)

    def _answered(self, result: Result) -> tuple[np.ndarray, Any]:
        first = self._unanswered[0] if self._unanswered else None
        if first is None or result.stream != _TASK or result.step != first.step:
            raise FeedError(f"{self._link.address} sent a result that nobody waits for; it needs the same release")
        self._unanswered.popleft()
        self._size -= first.packed.size
        self._samples += len(first.ids)
        self._progress = time.monotonic()
        return first.ids, result.data(as_tensor)


class _Line(Outbox):
    """One connection of a client."""

    def __init__(self, joined: Joined, link: PairingLink, settings: LoaderSettings) -> None:
        self._results: deque[Result] = deque()
        self._window, self._most = _RESULTS, settings.memory
        self._taken = self._granted = 0
        self._wanted = False  # whether the GPU side waits for credit
        super().__init__(joined, link, settings.memory, settings.silence)
        self.compressor = Compressor(self.codecs, always=settings.compression == "always")

    @property
    def sending(self) -> bool:
        """Whether the link is what all waits for: there is something to send, and the GPU side would take it."""
        return (bool(self._frames) and not self._blocked) or self._channel.pending

    @property
    def _link_is_slow(self) -> bool:
        return self.sending  # what waits for credit may wait for the model

    @property
    def has_room(self) -> bool:
        """Whether another batch may be put."""
        return self._held < self._memory

    def put_now(self, frame: Frame) -> None:
        """Have a frame sent. Never waits, for results must be taken meanwhile: look at `has_room` first.

        Nor does it say that the connection is lost: `take` does, when the results that are here were taken.
        """
        with self._changed:
            self._frames.append(frame)
            self._held += frame.size
        self._channel.wake()

    def wait(self, seconds: float, *, until_room: bool) -> None:
        """Until a result is there, or room if that is wanted; at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._over or (until_room and self.has_room), seconds)

    def take(self) -> Iterator[Result]:
        """The results that are here; each lets the GPU side send as much again."""
        while True:
            with self._changed:
                if not self._results:
                    self._check()
                    if self.finished:
                        raise FeedError(f"{self._address} ended its service before all results had come")
                    return
                result = self._results.popleft()
                self._taken += sum([(size + 63) & -64 for size in result.sizes])
            self.grant()
            yield result

    def grant(self) -> None:
        """Let the GPU side send results, if it is worth a message or waited for."""
        with self._changed:
            limit = self._taken + self._window
            if limit - self._granted >= (1 if self._wanted else self._window // 2):
                self._granted = limit
                self.send(Credit(limit))

    def _event(self, event: Event) -> None:
        if isinstance(event, Result):
            if event.compressed:
                raise PeerError("a compressed result, which was not agreed on")
            with self._changed:
                self._wanted = False
                self._results.append(event)
                self._changed.notify_all()
        elif isinstance(event, Cancel):
            raise RefusedError(f"{self._address}: {event.text}")
        elif isinstance(event, Blocked):
            self._enlarge(event.size)
        else:
            super()._event(event)

    def _enlarge(self, size: int) -> None:
        """A result waits for credit."""
        if size > self._most:
            raise RefusedError(
                f"one result of {self._address} takes {size / 2**20:.1f} MiB, and this side may hold "
                f"{self._most / 2**20:.0f} MiB; take a smaller batch size, or raise its memory"
            )
        with self._changed:
            self._window, self._wanted = max(self._window, size), True
        self.grant()
