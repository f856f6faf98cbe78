"""A loader worker: takes leases, loads their steps, sends them; dials again after any fault until the run is over."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.data.base import Share
from distributed_training.data.placing import ORDINARY, Memory
from distributed_training.data.steps import Block
from distributed_training.feed.answering import HomeDoor
from distributed_training.feed.compression import Compressor
from distributed_training.feed.course import Course, Piece
from distributed_training.feed.gathering import Helpers
from distributed_training.feed.helper_choice import HelperChoice
from distributed_training.feed.homecoming.home import Home
from distributed_training.feed.homecoming.receiver import Receiver
from distributed_training.feed.joining import Joined, LostError, join_patiently
from distributed_training.feed.outbox import Frame, Outbox
from distributed_training.feed.packing import RUN, pack
from distributed_training.feed.pairing import PairingLink
from distributed_training.feed.rows import Loose, Rows, gathered, settled
from distributed_training.feed.settings import LoaderSettings
from distributed_training.feed.shared import Arena
from distributed_training.runtime.errors import DataError
from distributed_training.wire import PackedBatch, Reason
from distributed_training.wire.fields import Fact
from distributed_training.wire.messages import Lease, Release, SampleFailed

logger = logging.getLogger(__name__)

_ASK = 512  # steps that a worker is ready to take; the GPU side gives it fewer if that suits better
_MOST = 512  # batches in one frame
_DETAILS = 4096  # numbers outside tensors in one frame
_SOON = 0.002  # seconds after which a frame goes as it is, if there is nothing else to send
_INLINE = 32 << 10  # smaller frames are not worth a place in shared memory
# Bytes from which on a row is sent from where it lies: the system has some work with each, and Python more where they
# are encrypted or wrapped into messages.
_ROW, _ROW_APART = 2 << 10, 32 << 10
_QUICK = 5e8  # bytes a second of samples that are loaded quickly: a socket takes ten times as many
_TEXT = 2000


class Board:
    """Figures of one worker that its parent reads: a few numbers in memory that both have."""

    FIELDS = ("begun", "connected", "batches", "bytes", "loading", "epoch", "step", "queue", "waited", "loaders")

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def __getattr__(self, name: str) -> float:
        return float(self._numbers[self.FIELDS.index(name)])

    def set(self, name: str, value: float) -> None:
        """Show a number."""
        self._numbers[self.FIELDS.index(name)] = value


@dataclass(frozen=True)
class Work:
    """What all workers of a loader have in common."""

    course: Course
    fingerprint: str
    """Of the dataset that is trained on."""
    facts: dict[str, Fact]
    """What the GPU side is told of plan and data."""
    settings: LoaderSettings
    home: Home | None = None
    """Where a copy of the run is kept. One worker writes it for all."""


class Worker:
    """Runs in a process of its own. Holds no state that is worth saving: any step can be loaded by any worker."""

    def __init__(self, work: Work, link: PairingLink | HomeDoor, board: Board, *, receives: bool = False) -> None:
        """`receives`: this is the worker that writes the copy of the run, where one is kept."""
        self._course, self._settings = work.course, work.settings
        self._fingerprint, self._facts = work.fingerprint, work.facts
        self._link, self._board = link, board
        self._home, self._receives = work.home, receives
        self._batches = self._bytes = 0
        self._loading = 0.0
        self._loosely = True  # until samples are seen that do not fit together as they are

    def run(self) -> None:
        """Work until the GPU side says that the run is over."""
        while True:
            facts, receiver = self._prepare_home()
            joined = self._join({**self._facts, **facts})
            outbox = Outbox(joined, self._link, self._settings.memory, self._settings.silence, receiver)
            self._board.set("connected", 1.0)
            try:
                outbox.start()
                if receiver is not None:
                    receiver.start(outbox.send, outbox.wake)
                self._work(outbox)
                return
            except LostError as error:
                logger.warning("%s; connecting again", error)
            finally:
                self._board.set("connected", 0.0)
                outbox.close()
                if receiver is not None:
                    receiver.close()
                self._batches += outbox.sent_batches
                self._bytes += outbox.sent_bytes

    def _join(self, facts: dict[str, Fact]) -> Joined:
        """Be welcome at the GPU side: dial it, or await its call."""
        if isinstance(self._link, HomeDoor):
            return self._link.join(facts, self._fingerprint, self._settings)
        return join_patiently(self._link, facts, self._fingerprint, self._settings)

    def _prepare_home(self) -> tuple[dict[str, Fact], Receiver | None]:
        """What the GPU side is told of the copy that is kept here, and what writes it on the next connection."""
        if self._home is None:
            return {}, None
        if not self._receives:
            return self._home.facts(False), None
        kept = self._home.kept()
        return self._home.facts(True, kept), Receiver(self._home, kept)

    def _work(self, outbox: Outbox) -> None:
        """One connection's work."""
        sending = _Sending(outbox, self._settings)
        try:
            outbox.request(_ASK)
            outbox.send_rest()
            while not outbox.finished:
                lease = outbox.next_lease(1.0)
                if lease is not None:
                    outbox.request(lease.last - lease.first)
                    self._load(lease, sending)
                    outbox.send_rest()
                self._board.set("batches", self._batches + outbox.sent_batches)
                self._board.set("bytes", self._bytes + outbox.sent_bytes)
                self._board.set("loading", self._loading + sending.stacking)
                for name in ("epoch", "step", "queue", "waited", "loaders"):
                    self._board.set(name, getattr(outbox.progress, name))
        finally:
            self._loading += sending.stacking
            sending.close()

    def _load(self, lease: Lease, sending: _Sending) -> None:
        """Load and send the steps of a lease."""
        outbox, share = sending.outbox, Share(lease.rank, lease.ranks)
        step, sending.lease = lease.first, lease.lease
        try:
            start = time.perf_counter()
            for block in self._blocks(lease, share, sending):
                seconds = time.perf_counter() - start
                self._loading += seconds
                step = block.first + len(block.steps)
                if outbox.needless(lease.lease):
                    return
                if (lease.epoch, step) > outbox.position:  # else training is past it
                    self._send(lease, block, seconds, sending)
                start = time.perf_counter()
        except (LostError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, _UnlikeError):
                step, self._loosely = error.step, False
            logger.debug("step %d of epoch %d cannot be loaded: %s", step, lease.epoch, error)
            sending.flush()
            self._load_one_by_one(lease, step, sending)
        sending.flush()

    def _send(self, lease: Lease, block: Block, seconds: float, sending: _Sending) -> None:
        """Have a block sent. _UnlikeError where its samples turn out not to be rows of one tensor."""
        try:
            sending.add(pack(lease, block, seconds, self._run(sending.outbox.shared)))
        except DataError as error:
            raise _UnlikeError(str(error), block.first) from error

    def _blocks(self, lease: Lease, share: Share, sending: _Sending) -> Iterator[Block]:
        """The steps of a lease; those that can be gathered on their way are not gathered before."""
        shared = sending.outbox.shared
        run = self._run(shared)
        for piece in self._course.pieces(lease.epoch, lease.first, lease.last):
            part = piece.part
            sending.rows = bool(part.row)
            as_they_lie = part.row >= sending.least and (shared or part.at_hand) if part.row else self._loosely
            yield from piece.blocks(share, gathered=not as_they_lie, run=run, rooms=sending.room)

    def _run(self, shared: bool) -> int:
        """Bytes of samples to load at once, and to send together. In shared memory they are copied but once, right into
        their place, and need not stay in a cache; so that there are slots enough, only where memory is not short."""
        return 2 * RUN if shared and self._settings.memory >= 32 * RUN else RUN

    # -- samples that cannot be loaded

    def _load_one_by_one(self, lease: Lease, first: int, sending: _Sending) -> None:
        """Some step from `first` on cannot be loaded: find out which, and which of its samples are to blame."""
        share, skips = Share(lease.rank, lease.ranks), sending.outbox.facts.get("on_bad_sample") == "skip"
        for step in range(first, lease.last):
            (piece,) = self._course.pieces(lease.epoch, step, step + 1)
            try:
                (block,) = piece.blocks(share, gathered=True)
                packed = pack(lease, block, 0.0)
            except Exception as reason:
                ids = piece.ids()
                ids = ids[share.rows(len(ids))]
                bad = piece.bad_samples(ids) or {int(ids[0]): str(reason)}
                for sample, text in bad.items():
                    sending.outbox.send(SampleFailed(lease.lease, lease.epoch, step, sample, text[:_TEXT]))
                rest = _without(lease, piece, ids, bad) if skips else None
                if rest is None:
                    sending.outbox.send(Release(lease.lease, step, Reason.SAMPLE))
                    return
                packed = [rest]
            sending.add(packed)


class _UnlikeError(Exception):
    """What was loaded from this step on cannot be put together as it is."""

    def __init__(self, text: str, step: int) -> None:
        super().__init__(text)
        self.step = step


def _without(lease: Lease, piece: Piece, ids: np.ndarray, bad: dict[int, str]) -> PackedBatch | None:
    """A step without its bad samples; None where nothing is left, or what is left does not fit together."""
    rest, step = ids[~np.isin(ids, list(bad))], piece.first + piece.offset
    if not len(rest):
        return None
    try:
        return pack(lease, Block(step, [rest], [rest], piece.fetch(rest)), 0.0)[0]
    except Exception:
        logger.exception("step %d of epoch %d cannot be made without its bad samples", step, lease.epoch)
        return None


def _any_loose(batches: list[PackedBatch]) -> bool:
    return any(isinstance(buffer, Loose) for packed in batches for buffer in packed.buffers)


class _Sending:
    """Small batches are collected into frames; frames go through shared memory or compressed where that helps."""

    def __init__(self, outbox: Outbox, settings: LoaderSettings) -> None:
        self.outbox, self.lease = outbox, 0
        self.rows = False
        """Whether what is sent now is gathered from rows in memory, and not loaded."""
        self._quick = False  # whether it was loaded so quickly that to send it takes a good part of the time
        self._arena = Arena(settings.memory, self._gather) if outbox.shared else None
        self._choice = HelperChoice()
        self._helpers = Helpers(self._choice.cores)
        self.least = 1 if outbox.shared else _ROW if outbox.scatters else _ROW_APART
        """Bytes of a row from which on it is left where it lies until it is sent, or copied into shared memory."""
        self._compressor = Compressor(outbox.codecs, always=settings.compression == "always")
        self._batches: list[PackedBatch] = []
        self._size = self._steps = self._details = 0
        self._since = 0.0
        self.stacking = 0.0
        """Seconds spent on putting samples together, which is a part of loading them."""

    def room(self, rows: int, sample_bytes: int) -> Memory:
        """Memory for a block that is about to be loaded: see `read_blocks`."""
        room = None
        if self._arena is not None and rows * sample_bytes >= _INLINE:
            room = self._arena.room(rows, sample_bytes)
        return (room or ORDINARY)._replace(plain=True)  # it is sent in order

    def _took(self, batches: list[PackedBatch], seconds: float) -> None:
        """So long it took to put the samples of these together."""
        self.stacking += seconds
        for packed in batches:
            packed.head = (*packed.head[:4], packed.head[4] + seconds / len(batches))

    def add(self, batches: list[PackedBatch]) -> None:
        """Have batches sent soon."""
        loading = sum([packed.head[4] for packed in batches])
        self._quick = not self.rows and sum([packed.size for packed in batches]) > _QUICK * loading
        self._compressor.bandwidth = self.outbox.bandwidth if self._arena is None else None
        here = self._arena is not None
        if self._arena is not None and (place := self._arena.finish(batches)) is not None:
            self.flush()
            self._put(batches, sum([packed.size for packed in batches]), place)
            return
        loose = _any_loose(batches)
        if here and loose:
            self.flush()  # what is collected is not to be lost with samples that do not fit together
        if not self._batches:
            self._since = time.perf_counter()
        for packed in batches:
            if not here:
                self._compressor.apply(packed)
                self._settle(packed)
            self._batches.append(packed)
            self._size += packed.size
            self._steps += packed.steps
            self._details += len(packed.dims) + len(packed.values)
            full = self._size + packed.size > RUN  # if the next one is like this one
            if full or self._steps >= _MOST or self._details >= _DETAILS:
                self.flush()
        due = bool(self._batches) and self.outbox.idle and time.perf_counter() - self._since > _SOON
        if due or (here and loose):  # put together before the dataset is asked again: it may use its memory again
            self.flush()

    def _settle(self, packed: PackedBatch) -> None:
        """Put together what is not sent from where it lies. Where frames are sent aside, gathering is left to this
        thread: two copies, one beside the other, take less time than one of rows that no cache has."""
        least = max(self.least, _ROW_APART) if self.outbox.aside else self.least
        start = time.perf_counter()
        packed.buffers = [settled(buffer, least) for buffer in packed.buffers]  # type: ignore[misc]
        self._took([packed], time.perf_counter() - start)

    def _gather(self, buffer: Rows | Loose, memory: np.ndarray) -> None:
        """Put rows together in shared memory."""
        if self._choice.helped:
            self._helpers.gather(buffer, memory)
        else:
            buffer.gather(memory)

    def flush(self) -> None:
        """Send what was collected."""
        if self._batches:
            batches, size, place = self._batches, self._size, None
            self._batches, self._size, self._steps, self._details = [], 0, 0, 0
            if self._arena is not None:
                start, loose = time.perf_counter(), _any_loose(batches)
                self._choice.put(start, size, quick=self._quick)
                place = self._arena.write(batches) if size >= _INLINE else None
                if place is None:
                    for packed in batches:
                        packed.buffers = [gathered(buffer) for buffer in packed.buffers]
                if loose:
                    self._took(batches, time.perf_counter() - start)
            self._put(batches, size, place)

    def _put(self, batches: list[PackedBatch], size: int, place: tuple[int, int] | None) -> None:
        self.outbox.put(Frame(self.lease, batches, size, place), loaded=not self.rows)

    def close(self) -> None:
        """Let go of shared memory and of who writes there."""
        if self._arena is not None:
            self._arena.close()
        self._helpers.close()
