"""The home side of a connection: a thread of a loader worker that writes what comes, and offers what is kept here.

Batches have the outbox's own thread; hashing and writing gigabytes must not hold that up. How much may be on its way is
for `pace` to say.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed_training.feed.homecoming.arriving import Arriving, DamagedError
from distributed_training.feed.homecoming.home import Home, Kept
from distributed_training.feed.homecoming.names import FileName, TransferError, read_name
from distributed_training.feed.homecoming.pace import Pace
from distributed_training.feed.homecoming.parcels import Parcel, Sending
from distributed_training.runtime.errors import CheckpointError
from distributed_training.wire import Chunk
from distributed_training.wire.messages import BlobDone, BlobOffer, BlobPull, Credit, Message

logger = logging.getLogger(__name__)

FileEvent = BlobOffer | BlobPull | BlobDone | Chunk
_ENDING = 10.0


@dataclass
class _Coming:
    offer: BlobOffer
    name: FileName
    arriving: Arriving


class Receiver:
    """Files of one connection, both ways. `hear` is called by the outbox; all else happens in a thread of its own."""

    def __init__(self, home: Home, kept: Kept | None) -> None:
        """`kept` is what the GPU side was told that this side can bring."""
        self.sending: Sending | None = None
        """What the GPU side asked for; the outbox sends it on."""
        self._home, self._kept = home, kept
        self._offered: dict[int, Parcel] = {}
        self._events: queue.SimpleQueue[tuple[FileEvent, float] | None] = queue.SimpleQueue()
        self._coming: _Coming | None = None
        self._pace = Pace()
        self._send: Callable[[Message], None]
        self._wake: Callable[[], None]
        self._thread = threading.Thread(target=self._run, name="checkpoints home", daemon=True)

    def start(self, send: Callable[[Message], None], wake: Callable[[], None]) -> None:
        """Begin; `send` has a message sent, `wake` makes the outbox look for what else is to be sent."""
        self._send, self._wake = send, wake
        self._thread.start()

    def hear(self, event: FileEvent) -> None:
        """Something came that is about files."""
        self._events.put((event, time.monotonic()))

    def close(self) -> None:
        """End the thread; what came of a file stays, to be gone on with."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(_ENDING)

    def _run(self) -> None:
        try:
            self._offer()
            while (came := self._events.get()) is not None:
                self._handle(*came)
        except Exception:  # batches go on without it
            logger.exception("checkpoints no longer come home on this connection")
        finally:
            self._stop_coming()
            for parcel in self._offered.values():
                parcel.close()
            self._offered.clear()

    def _handle(self, event: FileEvent, when: float) -> None:
        if isinstance(event, BlobOffer):
            self._offered_to_us(event)
        elif isinstance(event, Chunk):
            self._chunk(event, when)
        elif isinstance(event, BlobPull):
            parcel = self._offered.get(event.blob)
            if parcel is not None and event.position <= parcel.size:
                self.sending = Sending(event.blob, parcel, event.position)
                self._wake()
        elif (done := self._offered.pop(event.blob, None)) is not None:
            if self.sending is not None and self.sending.blob == event.blob:
                self.sending = None
            done.close()
            if event.text:
                logger.warning("the GPU side does not take %s: %s", done.name.path, event.text)

    # -- out

    def _offer(self) -> None:
        """Say what is kept here."""
        if self._kept is None:
            return
        try:
            parcels = self._kept.parcels()
        except (OSError, CheckpointError) as error:
            logger.warning("%s cannot be offered to the GPU side: %s", self._kept.checkpoint.path, error)
            return
        for blob, parcel in enumerate(parcels, 1):
            self._offered[blob] = parcel
            self._send(BlobOffer(blob, str(parcel.name), parcel.size, parcel.digest))

    # -- in

    def _offered_to_us(self, offer: BlobOffer, *, guess: bool = True) -> None:
        self._stop_coming()
        try:
            name = read_name(offer.name)
            arriving = self._home.begin(name, offer.size, offer.digest, guess=guess)
            if arriving is None:
                self._send(BlobDone(offer.blob, True, ""))
                return
            self._coming = _Coming(offer, name, arriving)
            if arriving.complete:
                self._complete()
                return
        except (OSError, TransferError) as error:
            self._refuse(offer, error)
            return
        self._send(BlobPull(offer.blob, arriving.position))
        self._pace.begin()
        self._allow()

    def _chunk(self, chunk: Chunk, when: float) -> None:
        size, coming = len(chunk.data), self._coming
        self._pace.arrived(size, when)
        if coming is not None and chunk.blob == coming.offer.blob:
            try:
                coming.arriving.write(chunk.position, chunk.data)
                if coming.arriving.complete:
                    self._complete()
            except (OSError, TransferError) as error:
                self._refuse(coming.offer, error)
        self._allow()

    def _complete(self) -> None:
        coming = self._coming
        assert coming is not None
        try:
            arrived = coming.arriving.finish()
        except DamagedError:
            if not coming.arriving.guessed:
                raise
            self._offered_to_us(coming.offer, guess=False)  # what was here is not how it begins
            return
        self._home.commit(coming.name, arrived)
        self._coming = None
        self._send(BlobDone(coming.offer.blob, True, ""))

    def _refuse(self, offer: BlobOffer, error: Exception) -> None:
        self._stop_coming()
        why = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
        logger.warning("%r does not come home: %s", offer.name.partition("/")[2][:80], why)
        self._send(BlobDone(offer.blob, False, why[:1000]))

    def _stop_coming(self) -> None:
        if self._coming is not None:
            self._coming.arriving.close()
            self._coming = None

    def _allow(self) -> None:
        """Let more come, as far as there is room."""
        limit = self._pace.grant(time.monotonic())
        if limit is not None:
            self._send(Credit(limit))
