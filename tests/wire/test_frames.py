"""Frames: the bytes are frozen, and what is not a frame of ours is refused by its header alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed_training.wire import PeerError
from distributed_training.wire.frames import (
    HEADER_SIZE,
    KINDS,
    Flag,
    Kind,
    aligned,
    check_sum,
    pack_head,
    unpack_header,
)

FRAME = pack_head(Kind.BATCHES, b"\x90", version=1, flags=1, stream=7, offset=128, payload=64)
SPECIFICATION = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_the_bytes_of_a_frame_never_change() -> None:
    assert FRAME.hex() == (
        "64747701400100000700000000000000800000000000000040000000000000000100000048c601ad90"
    )  # fmt: skip


def test_a_header_reads_as_it_was_written() -> None:
    header = unpack_header(bytearray(FRAME))

    assert (header.version, header.kind, header.flags) == (1, Kind.BATCHES, Flag.SHARED)
    assert (header.stream, header.offset, header.payload, header.metadata) == (7, 128, 64, 1)
    check_sum(header, FRAME[:HEADER_SIZE], b"\x90")


@pytest.mark.parametrize(
    ("at", "byte", "message"),
    [(0, 0x47, "does not speak"), (4, 200, "unknown kind 200"), (5, 0x82, "unknown flags"), (6, 1, "unknown flags")],
)
def test_what_is_unknown_is_refused(at: int, byte: int, message: str) -> None:
    damaged = bytearray(FRAME)
    damaged[at] = byte

    with pytest.raises(PeerError, match=message):
        unpack_header(damaged)


@pytest.mark.parametrize("at", [3, 8, 16, 24, 35, 36, 40])
def test_the_checksum_covers_header_and_metadata(at: int) -> None:
    damaged = bytearray(FRAME)
    damaged[at] ^= 1

    with pytest.raises(PeerError, match="damaged on the way"):
        check_sum(unpack_header(damaged), damaged[:HEADER_SIZE], damaged[HEADER_SIZE:])


def test_alignment() -> None:
    assert [aligned(size) for size in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_the_specification_names_every_kind_with_its_number() -> None:
    text = SPECIFICATION.read_text(encoding="utf-8")
    named = {int(number): name for number, name in re.findall(r"^\| (\d+) \| `(\w+)`", text, re.MULTILINE)}

    assert named == {number: kind.name for number, kind in KINDS.items()}
