"""The GPU side of a client: its batches wait for their turn on the model, the results go back under its credit."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from distributed_training._version import __version__
from distributed_training.data.base import Batch
from distributed_training.feed.compression import CODECS, decompress
from distributed_training.feed.guests import Guest
from distributed_training.feed.tensors import as_tensor
from distributed_training.feed.turns import Turn, Turns, Waiting
from distributed_training.runtime.errors import DataError, DistributedTrainingError
from distributed_training.wire import Batch as WireBatch
from distributed_training.wire import PeerError, Reason
from distributed_training.wire.limits import MAX_TEXT
from distributed_training.wire.messages import Blocked, Cancel, Join, Refused, SampleFailed, Task, TaskEnd, Welcome

if TYPE_CHECKING:
    from distributed_training.feed.session import Session
    from distributed_training.wire.events import Event

logger = logging.getLogger(__name__)

_TOGETHER = 64  # results in one frame
_BACKLOG = 256  # pieces on their way to the client before it gets more


class ClientGuest(Guest):
    """A client. It has one task at a time, and nothing of it is kept here when it goes: it asks again for what it has
    no result of."""

    def __init__(self, session: Session, turns: Turns) -> None:
        super().__init__(session)
        self.name, self.window, self.wake = session.name, session.window, session.wake
        self._turns = turns
        self._client: Waiting | None = None
        self._task: Task | None = None
        self._options: Any = None
        self._arrived: list[Turn] = []
        self._blocked = 0
        self._ended = self._told = False

    def admit(self, join: Join) -> Welcome | Refused:
        turns, wanted = self._turns, str(join.facts.get("mode"))[:40]
        if wanted != turns.mode:
            text = f"this server is there for {turns.mode}, not for {wanted}; start one with mode={wanted!r}"
            return Refused(Reason.ROLE, text)
        self._client = turns.join(self)
        if self._client is None:
            return Refused(Reason.SHUTTING_DOWN, "this server is closing")
        logger.info("%s joined for %s from %s", self.name, turns.mode, self.session.peer)
        codecs, facts = tuple(sorted(set(join.codecs) & CODECS.keys())), {"mode": turns.mode, **turns.facts}
        return Welcome(self.name, __version__, facts, codecs, False, turns.settings.memory)

    def hear(self, event: Event) -> None:
        assert self._client is not None
        if isinstance(event, WireBatch):
            self._batch(event)
        elif isinstance(event, Task):
            self._begin(event)
        elif isinstance(event, TaskEnd):
            self._ended = True
        elif isinstance(event, Blocked):
            self.heard()  # what came before it is not what it waits with
            self._turns.blocked(self._client, event.size)
        elif isinstance(event, SampleFailed):
            logger.warning("%s: sample %d is left out: %s", self.name, event.sample, event.text)

    def heard(self) -> None:
        assert self._client is not None
        total = self.session.connection.receiving.received
        if self._arrived or total != self.window.received:
            arrived, self._arrived = self._arrived, []
            self._turns.received(self._client, total, arrived)

    def speak(self, now: float) -> None:
        assert self._client is not None
        self._send_results(self._client)
        connection = self.session.connection
        try:
            limit = self._turns.credit(self._client)
            if limit is not None:
                connection.send_credit(limit)
        except DataError as error:
            self._turns.give_up(self._client, Reason.LIMIT, str(error))
        failed = self._client.failed
        if failed is not None and self._task is not None and not self._told:
            self._told = True
            reason, text = failed
            logger.warning("%s: its task cannot go on: %s", self.name, text)
            connection.send(Cancel(self._task.task, reason, text[:MAX_TEXT]))

    def gone(self) -> None:
        if self._client is not None:
            content = self._ended and self.session.leaving and not self._turns.open(self._client)
            self._turns.leave(self, content=content)
            done = "has all its results" if content else "left before its task was done"
            logger.info("%s %s: %d samples were computed for it", self.name, done, self._client.samples)

    def _begin(self, task: Task) -> None:
        assert self._client is not None
        if self._task is not None and not self._ended:
            raise PeerError("a client began a second task before the first one ended")
        if task.mode != self._turns.mode:
            raise PeerError(f"a task of mode {task.mode[:40]!r} at a server for {self._turns.mode}", Reason.ROLE)
        self._task, self._ended = task, False
        try:
            self._options = self._turns.read_task(task.facts)
        except DistributedTrainingError as error:
            self._turns.give_up(self._client, Reason.CONFIG, str(error))

    def _batch(self, batch: WireBatch) -> None:
        """Tensors are views of the memory the batch was received into."""
        if self._task is None or batch.stream != self._task.task or self._ended or batch.steps != 1:
            raise PeerError(f"a batch of task {batch.stream}, which was not begun, or several in one")
        assert self._client is not None
        if self._client.failed is not None or self.session.leaving:
            return
        if batch.compressed:
            decompress(batch)
        whole = Batch(batch.ids, batch.data(as_tensor))
        self._arrived.append(Turn(self._client, self._options, batch.step, whole, batch.raw_size))

    def _send_results(self, client: Waiting) -> None:
        connection = self.session.connection
        while self._task is not None and self.session.backlog < _BACKLOG:
            results, too_large = self._turns.results(client, connection.sending.available, _TOGETHER)
            if results:
                self._blocked = 0
                connection.send_results(self._task.task, results)
                self.session.hand_on()
                continue
            if too_large and too_large != self._blocked:
                self._blocked = too_large
                connection.send(Blocked(too_large))
            return
