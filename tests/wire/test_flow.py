"""Credit: nobody sends more than was granted, and nobody takes memory for more."""

from __future__ import annotations

import numpy as np
import pytest
from tests.wire.pair import carry, opened, sent

from distributed_training.wire import Batch, Chunk, MisuseError, PeerError, Probe, Reason, Role, pack_batch
from distributed_training.wire.frames import HEADER_SIZE, Kind, pack_head
from distributed_training.wire.messages import Blocked, Credit

BATCH = pack_batch(0, 0, np.arange(8), np.arange(56))  # 64 + 448 bytes


def test_a_batch_waits_for_credit() -> None:
    server, worker = opened(credit=0)
    for limit in (0, 511):
        if limit:
            server.send_credit(limit)
            assert carry(server, worker)[1] == [Credit(511)]
        with pytest.raises(MisuseError, match=f"a payload of 512 bytes needs more than the {limit} bytes of credit"):
            worker.send_batches(1, [BATCH])
    worker.send(Blocked(BATCH.size))
    assert carry(server, worker)[0] == [Blocked(512)]
    server.send_credit(512)
    carry(server, worker)
    worker.send_batches(1, [BATCH])
    assert worker.sending.available == 0
    assert isinstance(carry(server, worker)[0][0], Batch)
    assert server.receiving.received == 512


def test_credit_counts_everything_ever_sent() -> None:
    server, worker = opened(credit=0)
    for round_ in range(1, 4):
        server.send_credit(512 * round_)
        carry(server, worker)
        worker.send_batches(1, [BATCH])
        with pytest.raises(MisuseError):
            worker.send_batches(1, [BATCH])
        carry(server, worker)
    assert server.receiving.received == worker.sending.sent == 1536


def test_more_than_was_granted_is_refused_by_its_header() -> None:
    server, worker = opened(credit=600)
    worker.sending.limit = 10_000
    worker.send_batches(1, [BATCH])
    worker.send_batches(1, [BATCH])
    stream = sent(worker)
    first = len(stream) // 2
    with pytest.raises(PeerError, match="sends 512 bytes with a credit of 88") as caught:
        server.receive_data(stream[: first + HEADER_SIZE + 40])
    assert caught.value.reason is Reason.CREDIT


def test_a_count_that_does_not_agree_is_refused() -> None:
    server, _ = opened()
    with pytest.raises(PeerError, match="counts 5 payload bytes sent, 0 arrived"):
        server.receive_data(pack_head(Kind.PING, b"\x92\0\0", offset=5))


def test_credit_only_grows() -> None:
    server, worker = opened(credit=1000)
    with pytest.raises(MisuseError, match="cannot be taken back"):
        server.send_credit(999)
    server.send_credit(1000)
    server.receiving.granted = 0
    server.send_credit(500)
    with pytest.raises(PeerError, match="took back credit"):
        worker.receive_data(sent(server))


def test_a_payload_larger_than_the_peer_accepts() -> None:
    server, worker = opened(max_payload=256)
    with pytest.raises(MisuseError, match="the peer accepts 256 in one frame"):
        worker.send_batches(1, [BATCH])
    worker._peer_max_payload = 1000
    worker.send_batches(1, [BATCH])
    with pytest.raises(PeerError, match="more than is allowed"):
        server.receive_data(sent(worker)[:HEADER_SIZE])


def test_chunks_and_probes_need_credit_too() -> None:
    server, client = opened(Role.CLIENT, credit=100)
    server.send_chunk(5, 4096, b"x" * 60)
    server.send_probe(1, b"y" * 40)
    with pytest.raises(MisuseError):
        server.send_probe(2, b"z")
    server.send_probe(2, b"")
    chunk, probe, empty = carry(server, client)[1]
    assert isinstance(chunk, Chunk)
    assert (chunk.blob, chunk.position, bytes(chunk.data)) == (5, 4096, b"x" * 60)
    assert isinstance(probe, Probe)
    assert (probe.number, probe.size) == (1, 40)
    assert isinstance(empty, Probe)
    for wrong in (-1, 2**63):
        with pytest.raises(MisuseError):
            server.send_chunk(5, wrong, b"")
        with pytest.raises(MisuseError):
            server.send_results(wrong, [BATCH])
