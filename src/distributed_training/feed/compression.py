"""Compression of buffers, used only while it makes the link faster.

Whether it does is measured, not assumed: sending takes `size / bandwidth`; compressing first takes
`size / speed + size * ratio / bandwidth`, of which the larger part counts, for the two overlap.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.feed.rows import gathered
from distributed_training.wire import Batch, PackedBatch, PeerError, Reason

_WORTH = 4 << 10  # smaller buffers stay as they are
_GAIN = 1.15  # times faster, or it is not worth the heat
_TRY_EVERY = 64  # batches between two attempts while it does not help
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


class Compressor:
    """Decides, batch by batch, whether to compress, from what was measured."""

    def __init__(self, codecs: frozenset[int], *, always: bool = False) -> None:
        self._always = always
        known = [CODECS[number] for number in sorted(codecs) if number in CODECS]
        self.codec: Codec | None = known[0] if known else None
        self.bandwidth: float | None = None
        """Bytes a second that the link takes, measured while all waited for it; None while nothing does."""
        self._speed = self._ratio = 0.0
        self._batches = 0

    def apply(self, packed: PackedBatch) -> bool:
        """Compress the buffers of a batch if that helps now."""
        if self.codec is None or not (self._always or self._helps(packed)):
            return False
        for index, buffer in enumerate(packed.buffers):
            if len(buffer) >= _WORTH:
                data = self.codec.compress(gathered(buffer))
                if len(data) < 0.9 * len(buffer):
                    packed.compress(index, self.codec.number, memoryview(data))
        return packed.saved > 0

    def _helps(self, packed: PackedBatch) -> bool:
        """Whether the link would be faster with compression, as far as is known."""
        if self.bandwidth is None:
            return False
        self._batches += 1
        if self._batches % _TRY_EVERY == 1:
            self._measure(packed)
        if not self._speed:
            return False
        return min(self._speed, self.bandwidth / max(self._ratio, 1e-3)) > _GAIN * self.bandwidth

    def _measure(self, packed: PackedBatch) -> None:
        assert self.codec is not None
        largest = max(packed.buffers, key=len)
        if len(largest) < _WORTH:
            return
        sample = gathered(largest)[:_SAMPLE]
        start = time.perf_counter()
        size = len(self.codec.compress(sample))
        self._speed = len(sample) / max(time.perf_counter() - start, 1e-9)
        self._ratio = size / len(sample)
