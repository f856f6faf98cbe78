"""Batches (and results, which have the same form) as frames: one frame carries one batch or several small ones.

Metadata: `[[record, ...], place]`. A record is `[epoch, step, rank, ranks, samples, seconds, layout, dims, values,
coded]`; `layout` is a number, or `[number, tree]` the first time. The payload holds for each record the sample ids
as int64, then the buffers of its tree, each beginning at a multiple of 64. An eleventh field `steps` makes it a *run*:
the rows of so many neighbouring steps of equal size, one after the other, from `step` on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from distributed_training.runtime.errors import DataError
from distributed_training.wire.errors import MisuseError, PeerError, Reason
from distributed_training.wire.frames import ALIGNMENT, aligned
from distributed_training.wire.layouts import Layout, Make, Types, as_numpy
from distributed_training.wire.limits import MAX_BATCHES, MAX_BUFFERS, MAX_ITEMS, MAX_LAYOUTS, MAX_METADATA, SHORT
from distributed_training.wire.messages import Pack
from distributed_training.wire.tensors import Adapter, Tree, describe

_PADDING = [memoryview(bytes(size)) for size in range(ALIGNMENT)]
_VALUE_TYPES = frozenset({int, float, bool, str, bytes, type(None)})
_U32 = 2**32
_U63 = 2**63

Place = tuple[int, int]
"""Where a shared payload begins: (number of the segment, byte in it)."""


class Scattered(Protocol):
    """A buffer whose bytes lie in several places: sent from there, without being put together first."""

    def __len__(self) -> int:
        """Bytes in all."""

    def pieces(self) -> list[memoryview]:
        """The bytes, in order."""

    def spans(self, skipped: int) -> np.ndarray:
        """(address, bytes) of each piece, a row each, but for so many bytes at the front."""


Sendable = memoryview | Scattered
"""What is sent in one piece: flat bytes, or bytes that a carrier may send from where they lie."""


class PackedBatch:
    """A batch, or a run of them, ready to be sent. Made without a connection, so it can be made by another thread.

    Its buffers are the memory of the batch itself: leave that alone until the carrier has sent it.
    """

    __slots__ = ("buffers", "coded", "dims", "head", "samples", "saved", "size", "steps", "tree", "values")

    def __init__(
        self,
        head: tuple[int, int, int, int, float],
        ids: memoryview,
        parts: tuple[Tree, list[int], list[Any], list[memoryview]],
        steps: int = 1,
    ) -> None:
        """`ids` are the bytes of the sample ids, see `id_bytes`."""
        self.head = head
        self.steps = steps
        self.samples = len(ids) >> 3
        self.tree, self.dims, self.values, buffers = parts
        self.buffers = [ids, *buffers]
        self.coded: dict[int, tuple[int, int]] = {}
        self.saved = 0
        """Bytes that compression took away."""
        self.size = self._measure()
        """Bytes of payload it takes, with padding."""

    def _measure(self) -> int:
        return sum([(len(buffer) + 63) & -64 for buffer in self.buffers])

    def compress(self, index: int, codec: int, memory: memoryview) -> None:
        """Send a buffer as these compressed bytes. The receiver learns codec and size, and undoes it."""
        memory = memory.cast("B")
        self.saved += len(self.buffers[index]) - len(memory)
        self.coded[index] = (codec, len(memory))
        self.buffers[index] = memory
        self.size = self._measure()
        if 3 * len(self.coded) > MAX_ITEMS:
            raise MisuseError(
                f"a batch of more than {MAX_ITEMS // 3} compressed buffers: leave the small ones as they are"
            )

    def record(self, layout: Any) -> list[Any]:
        """What the metadata says of it."""
        epoch, step, rank, ranks, seconds = self.head
        coded = [number for index, (codec, size) in self.coded.items() for number in (index, codec, size)]
        record = [epoch, step, rank, ranks, self.samples, seconds, layout, self.dims, self.values, coded]
        return record if self.steps == 1 else [*record, self.steps]

    def chunks(self, out: list[Sendable]) -> None:
        """Add its buffers and the padding between them to what is to be sent."""
        for buffer in self.buffers:
            if size := len(buffer):
                out.append(buffer)
                if size & 63:
                    out.append(_PADDING[-size & 63])


def id_bytes(ids: np.ndarray) -> memoryview:
    """Sample ids as they travel."""
    return np.ascontiguousarray(ids, "<i8").view(np.uint8).data


def pack_batch(
    epoch: int,
    step: int,
    ids: np.ndarray,
    data: Any,
    *,
    rank: int = 0,
    ranks: int = 1,
    seconds: float = 0.0,
    adapt: Adapter | None = None,
) -> PackedBatch:
    """Make a batch ready to be sent: rank `rank` of `ranks`' rows of one step, and the seconds spent on them."""
    parts = describe(data, adapt)
    if len(parts.dims) > MAX_ITEMS or len(parts.values) > MAX_ITEMS:
        raise DataError(f"a batch with {len(parts.dims)} dimensions in all; stack what is alike into tensors")
    if not (0 <= epoch < _U32 and 0 <= step < _U63 and 0 <= rank < ranks < _U32 and 0 <= seconds < 1e9):
        raise MisuseError(f"a batch of epoch {epoch}, step {step}, rank {rank} of {ranks}, {seconds} seconds")
    return PackedBatch((epoch, step, rank, ranks, float(seconds)), id_bytes(ids), parts)


class Batch:
    """A batch, or a run of them, that arrived. Its memory is what the caller's allocator gave for its frame."""

    __slots__ = (
        "_dims", "_layout", "_values", "buffers", "compressed", "epoch", "memory", "rank", "ranks", "raw_size",
        "seconds", "sizes", "step", "steps", "stream",
    )  # fmt: skip

    def __init__(self, stream: int, record: list[Any], layout: Layout, sizes: list[int]) -> None:
        self.stream = stream
        """Id of the lease or task it belongs to."""
        self.epoch, self.step, self.rank, self.ranks, _, self.seconds, _, self._dims, self._values, _ = record[:10]
        self.steps: int = record[10] if len(record) > 10 else 1
        """More than 1 for a run: then its tensors hold the rows of all steps, equally many of each."""
        self._layout = layout
        self.raw_size = sum(sizes)
        """Bytes of all buffers once nothing is compressed."""
        self.sizes = sizes
        """Bytes of each buffer as it travels."""
        self.compressed: dict[int, tuple[int, int]] = {}
        """Buffers still compressed: index -> (codec, size when it is not)."""
        self.buffers: list[memoryview] = []
        """The sample ids, then the buffers of the batch."""
        self.memory: Any = None
        """What the allocator returned for the frame; the other batches of the frame have the same."""

    @property
    def ids(self) -> np.ndarray:
        """Ids of its samples, a view."""
        if 0 in self.compressed:
            raise MisuseError("the sample ids are still compressed: decompress them first")
        return np.frombuffer(self.buffers[0], "<i8")

    def decompressed(self, index: int, memory: memoryview) -> None:
        """Hand in what a compressed buffer decompresses to."""
        _, size = self.compressed.pop(index)
        if len(memory) != size:
            raise PeerError(f"a buffer said to hold {size} bytes decompresses to {len(memory)}", Reason.DAMAGED)
        self.buffers[index] = memory

    def data(self, make: Make = as_numpy, types: Types | None = None) -> Any:
        """The batch as it was sent. Its tensors are views of `memory`."""
        if self.compressed:
            raise MisuseError(f"buffers {sorted(self.compressed)} are still compressed: decompress them first")
        return self._layout.restore(self._dims, self._values, self.buffers[1:], make, types or {})

    def attach(self, view: memoryview, at: int) -> int:
        """Cut its buffers out of the payload; where the next batch begins."""
        for size in self.sizes:
            self.buffers.append(view[at : at + size])
            at += (size + 63) & -64
        return at


class Result(Batch):
    """Predictions or metrics that came back for a task."""

    __slots__ = ()


class SentLayouts:
    """The trees the peer knows already. When the table is full the oldest is forgotten and its number used again."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._numbers: dict[Tree, int] = {}
        self._last: tuple[Tree | None, int] = (None, 0)

    def reference(self, tree: Tree) -> Any:
        """How to refer to a tree: by number, and with itself the first time."""
        if tree is self._last[0]:  # of the same block as the batch before: a tree takes long to hash
            return self._last[1]
        number = self._numbers.get(tree)
        if number is not None:
            self._last = (tree, number)
            return number
        if len(self._numbers) == MAX_LAYOUTS:
            number = self._numbers.pop(next(iter(self._numbers)))
        else:
            number = len(self._numbers)
        self._numbers[tree] = number
        self._last = (tree, number)
        return [number, tree]

    def forget(self) -> None:
        """Begin anew: to define a number again is always allowed."""
        self._numbers.clear()
        self._last = (None, 0)


def encode_batches(batches: Iterable[PackedBatch], layouts: SentLayouts, place: Place | None) -> bytes:
    """The metadata of a frame."""
    try:
        records = [batch.record(layouts.reference(batch.tree)) for batch in batches]
        metadata = layouts.pack([records, place])
    except (TypeError, ValueError, OverflowError) as error:
        layouts.forget()
        raise MisuseError(f"a batch cannot be described: {error}") from error
    if len(metadata) > MAX_METADATA:
        layouts.forget()
        raise MisuseError(
            f"the description of {len(records)} batches takes {len(metadata)} bytes, more than {MAX_METADATA}; send "
            "fewer in one frame, or batches with fewer values outside tensors"
        )
    return metadata


class ReceivedLayouts:
    """The layouts that the peer may refer to by number, and the reading of records."""

    def __init__(self, max_payload: int) -> None:
        self._max_payload = max_payload
        self._layouts: dict[int, Layout] = {}

    def read(self, metadata: Any, kind: type[Batch], stream: int, payload: int, codecs: frozenset[int]) -> list[Batch]:
        """The batches a frame announces, still without memory. All sizes are checked against the payload's."""
        if type(metadata) is not list or len(metadata) != 2 or type(metadata[0]) is not list:
            raise PeerError("a frame of batches that lists none")
        records = metadata[0]
        if not 0 < len(records) <= MAX_BATCHES:
            raise PeerError(f"a frame of {len(records)} batches; between 1 and {MAX_BATCHES} are allowed", Reason.LIMIT)
        batches, total, raw, buffers, steps = [], 0, 0, 0, 0
        for record in records:
            batch = self._batch(record, kind, stream, codecs)
            total += sum([(size + 63) & -64 for size in batch.sizes])
            raw += batch.raw_size
            buffers += len(batch.sizes)
            steps += batch.steps
            if buffers > MAX_BUFFERS or steps > MAX_BATCHES:
                raise PeerError(f"a frame of more than {MAX_BUFFERS} buffers or {MAX_BATCHES} batches", Reason.LIMIT)
            if total > payload or raw > self._max_payload:
                break
            batches.append(batch)
        if total != payload or raw > self._max_payload:
            raise PeerError(
                f"batches that take {total} bytes ({raw} decompressed) in a payload of {payload}", Reason.LIMIT
            )
        return batches

    def _batch(self, record: Any, kind: type[Batch], stream: int, codecs: frozenset[int]) -> Batch:
        if type(record) is not list or not 10 <= len(record) <= 11:
            raise PeerError("a batch whose record has not ten fields, or eleven")
        epoch, step, rank, ranks, samples, seconds, layout, dims, values, coded = record[:10]
        if not (
            type(epoch) is int and type(step) is int and type(rank) is int and type(ranks) is int
            and type(samples) is int and 0 <= epoch < _U32
            and 0 <= step < _U63 and 0 <= rank < ranks < _U32 and 0 <= samples < _U32
            and type(seconds) is float and 0.0 <= seconds < 1e9
        ):  # fmt: skip
            raise PeerError(f"a batch of impossible place {record[:6]!r}")
        known = self._layout(layout)
        if type(dims) is not list or type(values) is not list or len(values) != known.value_count:
            raise PeerError("a batch that does not fit its layout")
        if values:
            _check_values(values)
        sizes = [8 * samples]
        sizes += known.sizes(dims)
        if len(record) == 11:
            _check_run(record[10], samples, known, dims)
        batch = kind(stream, record, known, sizes)
        if coded:
            _apply_codecs(batch, coded, codecs)
        elif type(coded) is not list:
            raise PeerError("a batch whose list of codecs is none")
        return batch

    def _layout(self, layout: Any) -> Layout:
        if type(layout) is int:
            known = self._layouts.get(layout)
            if known is None:
                raise PeerError(f"a batch of layout {layout}, which was never described")
            return known
        if type(layout) is not list or len(layout) != 2 or type(layout[0]) is not int:
            raise PeerError("a batch without a layout")
        number, tree = layout
        if not 0 <= number < MAX_LAYOUTS:
            raise PeerError(f"a layout with number {number}; {MAX_LAYOUTS} are kept", Reason.LIMIT)
        known = self._layouts[number] = Layout(tree)
        return known


def _check_run(steps: Any, samples: int, layout: Layout, dims: list[int]) -> None:
    """A run can be cut into steps: all its tensors have the same number of rows, and there is nothing else in it."""
    if type(steps) is not int or not 1 < steps <= MAX_BATCHES or samples % steps or not layout.has_rows(dims, samples):
        raise PeerError(f"a run of {steps!r} steps that cannot be cut into them")


def _check_values(values: list[Any]) -> None:
    for value in values:
        if type(value) not in _VALUE_TYPES or (type(value) in (str, bytes) and len(value) > SHORT):
            raise PeerError(f"a batch with a value of type {type(value).__name__} that cannot be one")


def _apply_codecs(batch: Batch, coded: Any, codecs: frozenset[int]) -> None:
    """Note which buffers travel compressed, and their sizes on the way."""
    if type(coded) is not list or len(coded) % 3 or not all(type(number) is int for number in coded):
        raise PeerError("a batch whose list of codecs makes no sense")
    for index, codec, size in zip(coded[::3], coded[1::3], coded[2::3]):
        if not 0 <= index < len(batch.sizes) or index in batch.compressed or codec not in codecs:
            raise PeerError(f"buffer {index} compressed by codec {codec}; agreed were {sorted(codecs)}")
        if not 0 <= size < _U63:
            raise PeerError(f"a compressed buffer of {size} bytes")
        batch.compressed[index] = (codec, batch.sizes[index])
        batch.sizes[index] = size


def read_place(metadata: Any, shared: bool) -> Place | None:
    """Where the payload lies if it is shared. Call after `read`."""
    place = metadata[1]
    if not shared:
        if place is not None:
            raise PeerError("a payload with a place, but not shared")
        return None
    if type(place) is not list or len(place) != 2 or not all(type(n) is int and 0 <= n < _U63 for n in place):
        raise PeerError("a shared payload without a place")
    if place[1] != aligned(place[1]):
        raise PeerError(f"a shared payload at byte {place[1]}, not a multiple of {ALIGNMENT}")
    return place[0], place[1]
