"""Compression of buffers, used only while it makes batches arrive sooner.

Whether it does is measured, not assumed. A worker loads and compresses in one thread and sends in another one: a byte
takes `max(loading, 1 / bandwidth)` as it is, and `max(loading + compressing, ratio / bandwidth)` compressed. Where
loading is what all wait for, compressing would make it worse; on a slow link the codec that makes batches smallest is
best, on a quicker one the quickest.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distributed_training.feed.rows import beginning, gathered
from distributed_training.wire import Batch, PackedBatch, PeerError, Reason

_WORTH = 4 << 10  # smaller buffers stay as they are
_GAIN = 1.15  # times faster, or it is not worth the heat
_TRY_EVERY = 64  # batches between two attempts
_SAMPLE = 256 << 10  # bytes that an attempt compresses


@dataclass(frozen=True)
class Codec:
    """One way to compress. `number` is its name on the wire and never changes meaning."""

    number: int
    name: str
    compress: Callable[[Any], bytes]
    decompress: Callable[[Any, int], bytes]


def _lz4() -> Codec:
    block = importlib.import_module("lz4.block")
    return Codec(
        1,
        "lz4",
        lambda data: block.compress(data, store_size=False),
        lambda data, size: block.decompress(data, uncompressed_size=size),
    )


def _zstd() -> Codec:
    zstandard = importlib.import_module("zstandard")

    def compress(data: Any) -> bytes:
        return bytes(zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data))

    def decompress(data: Any, size: int) -> bytes:
        if zstandard.frame_content_size(data) != size:  # it would be believed, whatever size that is
            raise ValueError("it says another size than its header")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=size))

    return Codec(2, "zstd", compress, decompress)


def _installed() -> dict[int, Codec]:
    found = {}
    for make in (_lz4, _zstd):
        try:
            codec = make()
        except ImportError:
            continue
        found[codec.number] = codec
    return found


CODECS: dict[int, Codec] = _installed()
"""Those that this installation has."""


def decompress(batch: Batch) -> None:
    """Undo the compression of a batch that arrived. Sizes were checked against the limits when its header came."""
    for index, (number, size) in list(batch.compressed.items()):
        try:
            data = CODECS[number].decompress(batch.buffers[index], size)
        except Exception as error:  # each library has errors of its own
            raise PeerError(f"a compressed buffer cannot be read: {error}", Reason.DAMAGED) from None
        memory = np.frombuffer(bytearray(data), np.uint8)  # writable, as all other batches are
        batch.decompressed(index, memory.data)


class _Tried(NamedTuple):
    """What a codec did to a sample of the batches."""

    codec: Codec
    seconds: float
    """For each byte."""
    ratio: float


class Compressor:
    """Decides, batch by batch, whether to compress and how, from what was measured."""

    def __init__(self, codecs: frozenset[int], *, always: bool = False) -> None:
        self._always = always
        self._codecs = [CODECS[number] for number in sorted(codecs) if number in CODECS]
        self.bandwidth: float | None = None
        """Bytes a second that the link takes, measured while all waited for it; None while nothing does."""
        self._loading: float | None = None  # seconds for each byte
        self._tried: list[_Tried] = []
        self._batches = 0

    def apply(self, packed: PackedBatch) -> bool:
        """Compress the buffers of a batch if that helps now."""
        self._note_loading(packed)
        codec = self._choose(packed)
        if codec is None:
            return False
        for index, buffer in enumerate(packed.buffers):
            if len(buffer) >= _WORTH:
                data = codec.compress(gathered(buffer))
                if len(data) < 0.9 * len(buffer):
                    packed.compress(index, codec.number, memoryview(data))
        return packed.saved > 0

    def _note_loading(self, packed: PackedBatch) -> None:
        each = packed.head[4] / max(packed.size, 1)
        self._loading = each if self._loading is None else 0.9 * self._loading + 0.1 * each

    def _choose(self, packed: PackedBatch) -> Codec | None:
        """The codec that makes batches arrive soonest, as far as is known; None where none does.

        One thread loads and compresses while another one sends, so the slower of the two sets the pace.
        """
        if not self._codecs or (self.bandwidth is None and not self._always):
            return None
        if self._batches % _TRY_EVERY == 0:
            self._try(packed)
        self._batches += 1
        if not self._tried:
            return self._codecs[0] if self._always else None
        if self.bandwidth is None:
            return min(self._tried, key=lambda tried: tried.seconds).codec
        loading, link = self._loading or 0.0, 1 / self.bandwidth
        best = min(self._tried, key=lambda tried: max(loading + tried.seconds, link * tried.ratio))
        pace = max(loading + best.seconds, link * best.ratio)
        return best.codec if self._always or max(loading, link) > _GAIN * pace else None

    def _try(self, packed: PackedBatch) -> None:
        """See what each codec does to a piece of the largest buffer."""
        largest = max(packed.buffers, key=len)
        if len(largest) < _WORTH:
            self._tried = []
            return
        sample = beginning(largest, _SAMPLE)
        self._tried = []
        for codec in self._codecs:
            start = time.perf_counter()
            size = len(codec.compress(sample))
            seconds = max(time.perf_counter() - start, 1e-9)
            self._tried.append(_Tried(codec, seconds / len(sample), size / len(sample)))
