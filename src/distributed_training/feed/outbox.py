"""A worker's connection: a thread that sends what is loaded, as credit allows, and hears what to load next."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed_training.feed.helper_choice import LARGE, HelperChoice
from distributed_training.feed.joining import Joined, LostError
from distributed_training.feed.link_rate import LinkRate
from distributed_training.feed.pairing import PairingLink
from distributed_training.runtime.errors import DistributedTrainingError
from distributed_training.wire import Chunk, Lost, PackedBatch, PeerError, Reason
from distributed_training.wire.messages import (
    BlobDone,
    BlobOffer,
    BlobPull,
    Blocked,
    Cancel,
    Credit,
    Error,
    Goodbye,
    Lease,
    Message,
    NoWork,
    Ping,
    Pong,
    Progress,
    Request,
    Work,
)

if TYPE_CHECKING:
    from distributed_training.feed.answering import HomeDoor
    from distributed_training.feed.homecoming.receiver import Receiver
    from distributed_training.wire.events import Event

logger = logging.getLogger(__name__)

_LEAVING = 2.0  # seconds that the other side has to say goodbye
_READY = 8 << 20  # bytes that wait to be sent: enough to keep a link busy, little enough to stay in a cache


@dataclass
class Frame:
    """What is sent in one go: batches of one lease."""

    lease: int
    batches: Sequence[PackedBatch]
    size: int
    place: tuple[int, int] | None = None


class Outbox:
    """One connection of a worker. The loading thread calls `next_lease` and `put`; all else happens in this thread.

    Except sending: while this thread waits, the loading thread sends what it puts itself, as far as the system takes it
    at once. To wake another thread for each frame takes the interpreter from loading, again and again. Large frames
    are left to a thread of the C library, which needs none; those of rows in memory where that is quicker.
    """

    def __init__(
        self,
        joined: Joined,
        link: PairingLink | HomeDoor,
        memory: int,
        silence: float,
        home: Receiver | None = None,
    ) -> None:
        """`home` hears what is said about the run's files, and may have some to send itself."""
        self._thread = threading.Thread(target=self._run, name=f"feed to {link.address}", daemon=True)
        self._channel, self._connection = joined.channel, joined.connection
        self._address, self._memory, self._silence = link.address, min(memory, _READY), silence
        self.sent_batches = self.sent_bytes = self.received_bytes = 0
        self.position = (0, 0)
        """(epoch, step) that training is at, as last heard."""
        self.progress = Progress(0, 0, 0, 0, 0, 0)
        self.facts = joined.facts
        self.finished = False
        self._link = LinkRate()
        self._leases: deque[Lease] = deque()
        self._cancelled: set[int] = set()
        self._frames: deque[Frame] = deque()
        self._messages: deque[Message] = deque()
        self._held = 0  # bytes in frames that are not sent
        self._changed = threading.Condition()
        self._driving = threading.Lock()  # whose turn it is to use connection and channel; taken before `_changed`
        self._error: DistributedTrainingError | None = None
        self._closing = False
        self._heard = time.monotonic()
        self._blocked = 0
        self._left = 0.0
        self._home = home
        self._choice = HelperChoice()
        self._may_leave = self._choice.possible and self._channel.allow_aside()
        self.aside = False
        """Whether what is put is sent while the loading thread goes on."""
        for event in joined.early:
            self._event(event)

    # -- the loading thread's side

    def start(self) -> None:
        """Begin to send and to hear."""
        self._thread.start()

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second that the link takes, measured while all else waited for it."""
        return self._link.rate

    @property
    def codecs(self) -> frozenset[int]:
        """Codecs agreed on."""
        return self._connection.codecs

    @property
    def shared(self) -> bool:
        """Whether payloads may travel in shared memory."""
        return self._connection.shared

    @property
    def scatters(self) -> bool:
        """Whether the system takes bytes from many places in one call."""
        return self._channel.scatters

    def next_lease(self, seconds: float) -> Lease | None:
        """The next lease; None if none came in this time."""
        with self._changed:
            self._changed.wait_for(lambda: self._leases or self._over, seconds)
            self._check()
            return self._leases.popleft() if self._leases else None

    def request(self, steps: int) -> None:
        """Ask for so many further steps, along with the next frame."""
        with self._changed:
            self._messages.append(Request(steps))

    def send_rest(self) -> None:
        """Send what no frame has taken along."""
        if self._messages:
            self._send_here()

    def send(self, message: Message) -> None:
        """Have a control message sent."""
        with self._changed:
            self._messages.append(message)
        self._send_here()

    def wake(self) -> None:
        """Have the thread look for something to send."""
        self._channel.wake()

    def put(self, frame: Frame, *, loaded: bool = False) -> None:
        """Have a frame sent; waits while too much is held already. `loaded`: it holds not only rows of memory.

        What was loaded is in one piece, so nothing is lost by leaving it to another thread.
        """
        if frame.place is None and self._may_leave:
            worth_it = frame.size >= LARGE or self._channel.goes_aside
            self.aside = worth_it and (loaded or self._choice.put(time.monotonic(), frame.size))
        while self._must_wait(frame.size):
            if self._channel.wait_aside(1.0):
                self._send_here()
            else:
                with self._changed:  # the other thread checks the link's silence, so the wait ends
                    self._changed.wait_for(lambda: not self._must_wait(frame.size), 1.0)
        self._check()
        with self._changed:
            self._frames.append(frame)
            self._held += frame.size
        self._send_here()

    def _must_wait(self, size: int) -> bool:
        held = self._held + self._channel.bytes_aside
        return held > 0 and held + size > self._memory and not self._over

    def _send_here(self) -> None:
        """Send in the calling thread what can be sent at once; leave the rest, and all trouble, to the other one."""
        if not self._channel.encrypted and self._driving.acquire(blocking=False):
            try:
                self._send_what_may_go()
                if not self._channel.pending or (self._channel.goes_aside and not self._frames):
                    return  # else the other thread looks after the rest
            except (OSError, PeerError):
                pass  # the other thread finds the same, and knows what to do
            finally:
                self._driving.release()
        self._channel.wake()

    def needless(self, lease: int) -> bool:
        """Whether a lease was taken back."""
        return lease in self._cancelled or self._over

    @property
    def idle(self) -> bool:
        """Whether all frames were sent."""
        return not self._frames

    @property
    def _over(self) -> bool:
        return self._error is not None or self.finished

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Say goodbye and end the thread."""
        self._closing = True
        self._channel.wake()
        if self._thread.is_alive():
            self._thread.join(_LEAVING + 3.0)
        else:
            self._channel.close()

    # -- the thread

    def _run(self) -> None:
        """Drive the connection until it ends."""
        try:
            self._drive()
        except (OSError, PeerError) as error:
            self._fail(LostError(f"{self._address}: {error}"))
        except DistributedTrainingError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the connection to %s failed on this side", self._address)
            self._fail(LostError(f"{self._address}: {type(error).__name__}: {error}"))
        finally:
            with self._driving:
                self._channel.close()
            with self._changed:
                self._frames.clear()

    def _fail(self, error: DistributedTrainingError) -> None:
        with self._changed:
            if not self.finished and not self._closing:
                self._error = self._error or error
            self._changed.notify_all()

    def _drive(self) -> None:
        connection, channel = self._connection, self._channel
        while not connection.closed:
            with self._driving:
                self._hear_and_send()
            if not connection.closed:
                self._wait()
        channel.queue(connection.data_to_send())
        channel.flush()

    def _hear_and_send(self) -> None:
        """Until there is nothing more to hear, and nothing that could be sent now."""
        connection, channel = self._connection, self._channel
        while not connection.closed:
            size = channel.receive_into(connection.get_buffer())
            if size is None:
                self._send_what_may_go()
                return
            self._heard = time.monotonic()
            self.received_bytes += size
            if size == 0:
                connection.receive_eof()
            else:
                connection.buffer_updated(size)
            for event in connection.events():
                self._event(event)

    def _wait(self) -> None:
        now, limit = time.monotonic(), self._silence
        if now > self._heard + limit:
            raise LostError(f"nothing was heard of {self._address} for {limit:g} s")
        if self._left and now > self._left + _LEAVING:
            raise LostError(f"{self._address} did not say goodbye")
        self._channel.wait(min(self._heard + limit - now, _LEAVING if self._left else limit))

    def _event(self, event: Event) -> None:
        if isinstance(event, Lease):
            with self._changed:
                self._leases.append(event)
                self._changed.notify_all()
        elif isinstance(event, Cancel):
            with self._changed:
                self._cancelled.add(event.lease)
                self._leases = deque(lease for lease in self._leases if lease.lease != event.lease)
        elif isinstance(event, Progress):
            self.position, self.progress = (event.epoch, event.step), event
        elif isinstance(event, Credit):
            self._blocked = 0
        elif isinstance(event, Ping):
            self._connection.send(Pong(event.number, event.clock, time.time_ns()))
        elif isinstance(event, NoWork):
            if event.state is Work.FINISHED:
                self._finish()
        elif isinstance(event, Goodbye):
            self._said_goodbye(event)
        elif isinstance(event, (BlobOffer, BlobPull, BlobDone, Chunk)):
            if self._home is not None:
                self._home.hear(event)
        elif isinstance(event, Lost):
            raise LostError(f"{self._address} ended the connection")
        elif isinstance(event, Error):
            raise LostError(f"{self._address} reports: {event.text}")

    def _finish(self) -> None:
        with self._changed:
            self.finished = True
            self._changed.notify_all()

    def _said_goodbye(self, goodbye: Goodbye) -> None:
        if goodbye.reason is Reason.DONE and not self._left:
            self._finish()
        if not self._left:
            self._connection.send(Goodbye(Reason.DONE, ""))
            self._channel.queue(self._connection.data_to_send())
            self._channel.flush()
        if not self.finished and not self._closing:
            raise LostError(f"{self._address} said goodbye: {goodbye.text}")

    def _send_what_may_go(self) -> None:
        connection, channel = self._connection, self._channel
        while True:
            while self._messages and connection.is_open:
                connection.send(self._messages.popleft())
            channel.queue(connection.data_to_send())
            self.sent_bytes += channel.flush(aside=self.aside)
            if channel.full or not connection.is_open or not (self._queue_frame() or self._queue_chunk()):
                break
        self._link.note(time.monotonic(), self.sent_bytes, self._link_is_slow)
        if self._closing and not self._left and connection.is_open:
            self._left = time.monotonic()
            connection.send(Goodbye(Reason.DONE, ""))
            channel.queue(connection.data_to_send())
            channel.flush()

    @property
    def _link_is_slow(self) -> bool:
        """Whether something waits for the link; credit comes as fast as the link does, too."""
        return self._channel.behind or bool(self._frames)

    def _queue_chunk(self) -> bool:
        """Hand the next part of a file to the connection, if one was asked for and credit allows."""
        sending = self._home.sending if self._home is not None else None
        room = self._connection.sending.available
        if self._closing or sending is None or sending.over or room <= 0:
            return False
        self._connection.send_chunk(sending.blob, *sending.next(room))
        self._channel.queue(self._connection.data_to_send())
        return True

    def _queue_frame(self) -> bool:
        """Hand the next frame to the connection, if credit allows. Frames of leases taken back are dropped."""
        dropped = False
        with self._changed:
            while self._frames and (self._closing or self._frames[0].lease in self._cancelled):
                if self._frames[0].place is not None and not self._closing:
                    break  # only the other side can free the place
                self._held -= self._frames.popleft().size
                dropped = True
            if dropped and self._connection.is_open:  # what room was kept for it is for others
                self._connection.send(Blocked(0))
                self._blocked = 0
            if not self._frames:
                self._changed.notify_all()
                return dropped
            frame = self._frames[0]
            if frame.size > self._connection.sending.available:
                blocked = 0 if self._blocked >= frame.size else frame.size
            else:
                blocked = 0
                self._frames.popleft()
                self._held -= frame.size
                self.sent_batches += sum([batch.steps for batch in frame.batches])
                self.sent_bytes += frame.size if frame.place is not None else 0  # else they are counted on their way
                self._changed.notify_all()
                self._connection.send_batches(frame.lease, frame.batches, frame.place)
                self._channel.queue(self._connection.data_to_send())
                return True
        if blocked:
            self._blocked = blocked
            self._connection.send(Blocked(blocked))
            self._channel.queue(self._connection.data_to_send())
            self.sent_bytes += self._channel.flush()
        return False
