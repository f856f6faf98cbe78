"""The service: knows which samples are there, has workers load those that are missing, and tells trials where they lie.

One thread and one loop. What trials wait for comes first; then what they will read next, for the one that has least
ahead of it. A worker gets as many samples at a time as take a few hundredths of a second.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from distributed_training.runtime.errors import FeedError
from distributed_training.tuning.shared_feed.guests import Guest, Reader, Request
from distributed_training.tuning.shared_feed.messages import MOST_BYTES, MOST_IDS, Message, decode, encode, is_own
from distributed_training.tuning.shared_feed.shelves import ABSENT, ALONE, WORKING, Shelf
from distributed_training.tuning.shared_feed.workers import Hand, Task, Workers

logger = logging.getLogger(__name__)

_LOOK = 0.5  # seconds
_TASK = 0.03  # seconds that a task is meant to take
_MOST_ROWS = 256
_FULL_FOR = 0.05  # seconds after which it is worth looking for room again


class Service:
    """Serves trials until it is told to stop."""

    def __init__(
        self,
        listener: socket.socket,
        shelves: Mapping[str, Shelf],
        welcome: Callable[[Message], tuple[Message, list[int]]],
        workers: Workers,
    ) -> None:
        """`welcome` gives the answer to a trial's first message, and the file descriptors that go with it."""
        self._listener, self._shelves, self._welcome, self._workers = listener, shelves, welcome, workers
        self._guests: dict[socket.socket, Guest] = {}
        self._readers: dict[tuple[str, str], Reader] = {}
        self._seconds = dict.fromkeys(shelves, 0.0)  # a sample takes about so long
        self._full = dict.fromkeys(shelves, 0.0)  # until then there is no use in looking for room
        self._selector = selectors.DefaultSelector()
        self.loaded = 0
        """Samples that workers have loaded."""

    def run(self, lifeline: int) -> None:
        """Serve until this file descriptor is closed at its other end."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._admit)
        self._selector.register(lifeline, selectors.EVENT_READ, None)
        os.set_blocking(lifeline, False)
        try:
            while True:
                self._keep_workers()
                self._dispatch()
                for ready, _ in self._selector.select(_LOOK):
                    if ready.data is None:
                        if not os.read(lifeline, 4096):
                            return
                    else:
                        ready.data()
        finally:
            self._workers.close()
            for guest in list(self._guests.values()):
                self._dismiss(guest)
            self._selector.close()

    # -- trials

    def _admit(self) -> None:
        with suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            if not is_own(peer):
                logger.warning("the shared feed is not for other users of this machine")
                peer.close()
                return
            peer.setblocking(False)
            guest = self._guests[peer] = Guest(peer)
            self._selector.register(peer, selectors.EVENT_READ, lambda: self._hear(guest))

    def _hear(self, guest: Guest) -> None:
        try:
            packet = guest.peer.recv(MOST_BYTES)
            if not packet:
                self._dismiss(guest)
                return
            self._answer(guest, decode(packet))
        except BlockingIOError:
            pass
        except (OSError, FeedError, KeyError, TypeError, ValueError, IndexError) as error:
            logger.warning("a trial's connection to the shared feed is given up: %s: %s", type(error).__name__, error)
            self._dismiss(guest)

    def _answer(self, guest: Guest, message: Message) -> None:
        guest.holding = _NONE
        kind = message["kind"]
        if kind == "hello":
            guest.trial = str(message["trial"])
            answer, fds = self._welcome(message)
            socket.send_fds(guest.peer, [encode(answer)], fds)
        elif kind == "fetch":
            shelf = self._shelves[message["part"]]
            guest.request = Request.read(message, shelf.samples)
            self._settle(guest)
        elif kind == "expect":
            self._expect(guest, message)
        else:
            raise FeedError(f"a message of an unknown kind: {kind!r}")

    def _expect(self, guest: Guest, message: Message) -> None:
        """A trial begins to read an epoch of a part."""
        part = message["part"]
        reader = Reader.read(guest, message, self._shelves[part].samples)
        self._forget(self._readers.get((guest.trial, part)))
        self._readers[guest.trial, part] = reader
        self._shelves[part].read(guest.trial, reader.key)

    def _forget(self, reader: Reader | None) -> None:
        if reader is not None:
            self._readers.pop((reader.guest.trial, reader.part), None)
            self._shelves[reader.part].unread(reader.guest.trial, reader.key)

    def _settle(self, guest: Guest) -> None:
        """Answer a request if nothing of it is still to come."""
        request = guest.request
        if request is None:
            return
        shelf = self._shelves[request.part]
        found = shelf.find(request.ids, request.key)
        if (found == WORKING).any() or ((found == ABSENT).any() and not request.given_up):
            return
        found[found == ABSENT] = ALONE
        guest.request, guest.holding = None, found[found >= 0]
        shelf.note(request.ids, request.key)
        reader = self._readers.get((guest.trial, request.part))
        if reader is not None and reader.key == request.key:
            reader.had += len(request.ids)
            if reader.had >= reader.total:
                self._forget(reader)
        try:
            guest.peer.send(encode({"slots": found.tobytes()}))
        except OSError:
            self._dismiss(guest)

    def _dismiss(self, guest: Guest) -> None:
        if self._guests.pop(guest.peer, None) is None:
            return
        self._selector.unregister(guest.peer)
        guest.peer.close()
        for reader in [reader for reader in self._readers.values() if reader.guest is guest]:
            self._forget(reader)

    # -- workers

    def _keep_workers(self) -> None:
        """Have as many workers as there are to be; what those that died had to do is to be done again."""
        lost, made = self._workers.keep([self._listener, *self._guests])
        for hand in lost:
            self._selector.unregister(hand.tasks)
            hand.tasks.close()
            if hand.task is not None:
                self._undo(hand.task)
        for hand in made:
            self._selector.register(hand.tasks, selectors.EVENT_READ, lambda hand=hand: self._done(hand))

    def _undo(self, task: Task) -> None:
        shelf, suspect = self._shelves[task.part], len(task.ids) == 1
        shelf.give_back(task.slots)
        shelf.fail(task.ids, forever=suspect)  # a trial that loads it for itself will see what it does
        self._workers.careful(task)
        self._settle_all(task.part)

    def _done(self, hand: Hand) -> None:
        try:
            packet = hand.tasks.recv(MOST_BYTES)
        except OSError:
            packet = b""
        if not packet:
            hand.gone = True
            return
        answer, task = decode(packet), hand.task
        if task is None:
            hand.begun = True
            return
        hand.task = None
        bad = np.frombuffer(answer["bad"], np.int32)
        good = np.ones(len(task.ids), bool)
        good[bad] = False
        shelf = self._shelves[task.part]
        shelf.finish(task.ids[good], task.slots[good], task.key, drew=bool(answer["drew"]))
        shelf.fail(task.ids[bad], forever=True)
        shelf.give_back(task.slots[bad])
        self.loaded += len(task.ids)
        before, now = self._seconds[task.part], float(answer["seconds"]) / len(task.ids)
        self._seconds[task.part] = 0.8 * before + 0.2 * now if before else now
        self._settle_all(task.part)

    def _settle_all(self, part: str) -> None:
        for guest in list(self._guests.values()):
            if guest.request is not None and guest.request.part == part:
                self._settle(guest)

    def _dispatch(self) -> None:
        """Give idle workers something to do."""
        for hand in self._workers.idle():
            task = self._next_task()
            if task is None:
                return
            self._shelves[task.part].begin(task.ids)
            self._workers.give(hand, task)

    def _next_task(self) -> Task | None:
        for guest in self._guests.values():
            request = guest.request
            if request is not None and not request.given_up:
                found = self._shelves[request.part].find(request.ids, request.key)
                wanted = request.ids[found == ABSENT]
                if len(wanted):
                    task = self._task(request.part, request.key, np.unique(wanted), now=True)
                    if task is not None:
                        return task
                    request.given_up = True
                    self._settle(guest)
                    return self._next_task()
        for reader in sorted(self._readers.values(), key=lambda reader: reader.taken - reader.had):
            if time.monotonic() < self._full[reader.part]:
                continue
            wanted = reader.next_absent(self._shelves[reader.part], self._rows_at_once(reader.part))
            if len(wanted):
                task = self._task(reader.part, reader.key, wanted, now=False)
                if task is not None:
                    return task
        return None

    def _rows_at_once(self, part: str) -> int:
        careful = self._workers.rows_at_once()
        return min(careful, max(1, min(_MOST_ROWS, int(_TASK / max(self._seconds[part], 1e-6)))))

    def _task(self, part: str, key: int, ids: np.ndarray, *, now: bool) -> Task | None:
        """As many of these samples as one worker is to load; None where there is no room. `now`: a trial waits."""
        most = self._rows_at_once(part)
        if now:
            most = max(1, min(most, -(-len(ids) // self._workers.count)))
        held = [guest.holding for guest in self._guests.values() if len(guest.holding)]
        slots = self._shelves[part].allocate(min(most, len(ids)), np.concatenate(held) if held else _NONE)
        if not len(slots):
            self._full[part] = time.monotonic() + _FULL_FOR
            return None
        return Task(part, key, ids[: len(slots)], slots)


_NONE = np.empty(0, np.int32)


def end_quietly(*_: Any) -> None:
    """What SIGTERM does to the service: it ends as if its lifeline were cut."""
    raise SystemExit(128 + signal.SIGTERM)


assert MOST_IDS * 8 < MOST_BYTES
