"""The GPU side of one connection: a thread that takes a guest from its first byte to its last.

Before the peer has proved that it belongs to this run it gets a few seconds and a few hundred bytes, no more (a few
thousand where it asks for a WebSocket by HTTP, as tunnels do: the first byte tells). What is said after that depends on
who it is: `guests` says how the three kinds plug in here.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from distributed_training.feed.channel import Channel
from distributed_training.feed.credit import Window
from distributed_training.feed.guests import Guest, MakeGuest
from distributed_training.feed.http_upgrade import GUEST_CALLS, answer_upgrade
from distributed_training.feed.settings import FeedSettings
from distributed_training.feed.shared import Segments
from distributed_training.runtime.errors import DistributedTrainingError, FeedError
from distributed_training.wire import Authenticated, Connection, Lost, PeerError, Reason, Role
from distributed_training.wire.messages import Error, Goodbye, Join, Ping, Pong, Refused

if TYPE_CHECKING:
    from distributed_training.feed.buffers import BufferPool
    from distributed_training.feed.calling import Caller
    from distributed_training.feed.door import Door
    from distributed_training.wire.events import Event

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # pieces that wait to be sent to a peer that does not read
_LEAVING = 2.0  # seconds that a peer has to say goodbye
_MOMENT = 1.0  # seconds without a byte after which nothing is coming just now
_GET = ord("G")  # an HTTP request; our own frames begin otherwise
_LONGEST = 1000  # characters of what a peer said that are logged
_OWN = frozenset({Ping, Pong, Goodbye, Lost, Error, Authenticated, Join})
"""Events that are the same for every guest."""


class Session:
    """One connection. `wake`, `end` and `abort` may be called by any thread, all else by its own."""

    def __init__(
        self,
        channel: Channel,
        settings: FeedSettings,
        guests: Mapping[Role, MakeGuest],
        *,
        token: bytes | None,
        fingerprint: bytes,
        pool: BufferPool,
        door: Door | Caller,
        on_end: Callable[[Session], None],
    ) -> None:
        self.name = self.peer = channel.peer
        """`peer` is its address; `name` becomes what it calls itself, once it is known."""
        self.thread = threading.Thread(target=self._run, name=f"feed {channel.peer}", daemon=True)
        self.settings = settings
        self.window = Window()
        self.admitted = self.proved = self.aborted = False
        self.failure: Exception | None = None
        """Why it ended, unless by a goodbye."""
        self._channel, self._guests, self._door, self._on_end = channel, guests, door, on_end
        self._guest: Guest | None = None
        self._segments = Segments() if settings.shared_memory else None
        self.connection = Connection(
            Role.SERVER,
            token=token,
            binding=fingerprint,
            max_payload=settings.memory,
            allocate=pool.allocate,
            locate=self._segments.locate if self._segments is not None else None,
        )
        self._started = self._heard = time.monotonic()
        self._next_ping = 0.0
        self._pings = 0
        self._ending: Goodbye | None = None
        self._opening = True
        self._left = 0.0
        self._burst, self._burst_since = 0, 0.0

    def wake(self) -> None:
        """Have the thread look for something to send."""
        self._channel.wake()

    def end(self, goodbye: Goodbye) -> None:
        """Say goodbye, from another thread."""
        self._ending = goodbye
        if self._opening:  # there is nobody yet to say it to
            self._channel.abort()
        self._channel.wake()

    def abort(self) -> None:
        """Cut the connection, from another thread."""
        self.aborted = True
        self._channel.abort()

    @property
    def backlog(self) -> int:
        """Pieces that wait to be sent. Who sends much looks at it first."""
        return self._channel.backlog

    def hand_on(self) -> None:
        """Give what the connection has to send to the socket now, as far as it takes it."""
        self._channel.queue(self.connection.data_to_send())
        self._channel.flush()

    @property
    def shares_memory(self) -> bool:
        """Whether this side can take payloads in shared memory."""
        return self._segments is not None

    @property
    def arriving(self) -> bool:
        """Whether a part of a payload is here, and more of it was heard of a moment ago. Any thread may ask."""
        return self.connection.missing > 0 and time.monotonic() - self._heard < _MOMENT

    @property
    def leaving(self) -> bool:
        """Whether one of the two sides has said goodbye."""
        return bool(self._left)

    def _run(self) -> None:
        """Drive the connection until it ends, whatever happens."""
        try:
            self._channel.shake_hands(self._started + self.settings.authentication)
            self._opening = False
            self._drive()
        except PeerError as error:
            self.failure = error
            self._refused(f"{error}")
            self._say_last()
        except (OSError, DistributedTrainingError) as error:
            self.failure = error
            self._refused(f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception("%s: the connection failed on this side", self.peer)
        finally:
            if self._guest is not None:
                self._guest.gone()
            self._channel.close()
            if self._segments is not None:
                self._segments.close()
            self._on_end(self)

    def _refused(self, why: str) -> None:
        if not self.admitted:
            self._door.refuse(self.peer, _plain(why))
        elif not self._left:
            logger.warning("%s (%s) is gone: %s", self.name, self.peer, _plain(why))

    def _say_last(self) -> None:
        """What the protocol still has to say to a peer that broke the rules; it need not be heard."""
        self._channel.queue(self.connection.data_to_send())
        try:
            self._channel.flush()
        except OSError as error:
            logger.debug("%s: %s", self.peer, error)

    # -- the loop

    def _drive(self) -> None:
        connection, channel, answered = self.connection, self._channel, False
        first = not channel.wrapped
        while not connection.closed:
            size = None if channel.drained else channel.receive_into(connection.get_buffer())
            if size is None:
                self._burst_over()
                if not answered or channel.pending:
                    self._answer()
                answered = connection.closed or not channel.wait(self._patience(), connection.missing)
                continue
            if size == 0:
                connection.receive_eof()
            else:
                self._heard = time.monotonic()
                self._burst += size
                if first:
                    first = False
                    if connection.get_buffer()[0] == _GET:
                        self._upgrade(bytes(connection.get_buffer()[:size]))
                        continue
                connection.buffer_updated(size)
            if self._take_events() or not self.admitted:  # a handshake answers without an event
                self._answer()
                answered = True
        self._say_last()

    def _upgrade(self, ahead: bytes) -> None:
        """The first bytes are those of an HTTP request: the frames come in the messages of a WebSocket."""
        self._opening = True
        answer_upgrade(self._channel, self._started + self.settings.authentication, ahead, GUEST_CALLS)
        self._opening = False

    def _take_events(self) -> bool:
        """Deal with what arrived; whether there was anything."""
        any_event = False
        for event in self.connection.events():
            any_event = True
            if type(event) in _OWN:
                self._event(event)
            else:
                assert self._guest is not None
                self._guest.hear(event)
        if any_event and self.admitted:
            assert self._guest is not None
            self._guest.heard()
        return any_event

    def _event(self, event: Event) -> None:
        if isinstance(event, Ping):
            if not self._left:
                self.connection.send(Pong(event.number, event.clock, time.time_ns()))
        elif isinstance(event, Pong):
            self.window.answered(max(0.0, (time.monotonic_ns() - event.clock) / 1e9))
        elif isinstance(event, Join):
            self._admit(event)
        elif isinstance(event, Authenticated):
            self.proved = True
            self._door.proved()
        elif isinstance(event, Goodbye):
            self._said_goodbye(event)
        elif isinstance(event, Lost):
            raise FeedError("the connection broke" if self.admitted else "it left before it had proved anything")
        elif isinstance(event, Error):
            raise FeedError(f"it reports: {event.text}")

    def _admit(self, join: Join) -> None:
        """Let a guest take part, or say why not."""
        role = self.connection.peer
        if self._left or role is None:
            return
        self.name = f"{_plain(join.name[:80])}#{secrets.token_hex(2)}"
        self._guest = self._guests[role](self)
        answer = self._guest.admit(join)
        self.connection.send(answer)
        if isinstance(answer, Refused):
            self._refused(answer.text)
        else:
            self.admitted = True

    def _said_goodbye(self, goodbye: Goodbye) -> None:
        if not self._left:
            self._left = time.monotonic()
            self.connection.send(Goodbye(Reason.DONE, ""))
            logger.info("%s left%s", self.name, f": {_plain(goodbye.text)}" if goodbye.text else "")

    # -- what to send, and when

    def _answer(self) -> None:
        """Send what is due: what the guest is to be told, pings, goodbye."""
        connection, now = self.connection, time.monotonic()
        if self._ending is not None and not self._left and not connection.closed:
            self._leave(now)
        elif connection.is_open:
            assert self._guest is not None
            self._guest.speak(now)
            if now >= self._next_ping:
                self._next_ping = now + self.settings.silence / 3
                self._pings += 1
                connection.send(Ping(self._pings, time.monotonic_ns()))
        self.hand_on()
        self._check_patience(now)

    def _leave(self, now: float) -> None:
        connection, goodbye = self.connection, self._ending
        assert goodbye is not None
        self._left = now
        if connection.is_open and goodbye.reason is Reason.DONE and self._guest is not None:
            self._guest.farewell()
        if connection.authenticated:
            connection.send(goodbye)
        else:
            raise FeedError("this side is closing")

    def _patience(self) -> float:
        """Seconds until something has to be done even if nothing happens."""
        now, settings = time.monotonic(), self.settings
        if self._left:
            return self._left + _LEAVING - now
        if not self.admitted or self._guest is None:
            return self._started + settings.authentication - now
        return min(self._next_ping - now, self._heard + settings.silence - now, self._guest.patience())

    def _check_patience(self, now: float) -> None:
        settings = self.settings
        if self._left:
            if now > self._left + _LEAVING:
                raise FeedError("it did not say goodbye")
        elif not self.admitted:
            if now > self._started + settings.authentication:
                raise FeedError(f"it did not prove that it belongs to this run within {settings.authentication:g} s")
        elif now > self._heard + settings.silence:
            raise FeedError(f"nothing was heard of it for {settings.silence:g} s")
        if self._channel.backlog > _BACKLOG:
            raise FeedError("it does not read what is sent to it")

    def _burst_over(self) -> None:
        """Nothing more is there to read now: so many bytes came without a pause, but for those of a slow link."""
        if self.connection.missing:
            return  # in the midst of a payload it is the link that takes its time
        now = time.monotonic()
        if self._burst > 1 << 18:
            self.window.measured(self._burst, now - self._burst_since)
        self._burst, self._burst_since = 0, now


def _plain(text: str) -> str:
    """What a peer said as one line of a log: control characters could forge other lines, or drive a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_LONGEST])
