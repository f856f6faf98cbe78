"""Streams in any pieces, cut anywhere, damaged anywhere: events, or one kind of error, and bounded memory."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc
from collections import deque
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from benchmarks.fuzz_wire import MEMORY_BOUND, Corpus, attempt, fuzz, make_corpora, prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.wire.pair import equal, opened, sent

from distributed_training.wire import Batch, Chunk, Connection, MisuseError, PeerError, Probe, Reason, Role, pack_batch
from distributed_training.wire import messages as m
from distributed_training.wire.frames import HEADER_SIZE, Kind, pack_head
from distributed_training.wire.limits import MAX_CONTROL, MAX_METADATA

CORPORA = make_corpora()
NAMES = [f"{corpus.peer.name} to {corpus.role.name}" for corpus in CORPORA]


def side(corpus: Corpus) -> Connection:
    """A connection that is about to receive the recorded stream."""
    connection = Connection(
        corpus.role,
        token=b"the token that the fuzzer knows..",
        nonce=(b"s" if corpus.role is Role.SERVER else b"p") * 32,
        max_payload=1 << 20,
        locate=lambda segment, begin, size: bytearray(size),
    )
    prepare(connection, corpus, authenticated=True)
    return connection


def stream_of(corpus: Corpus) -> bytes:
    return b"".join(corpus.frames[1:])


def plain(event: Any) -> Any:
    """An event as something that can be compared."""
    if isinstance(event, Batch):
        return (
            type(event),
            event.stream,
            event.epoch,
            event.step,
            event.rank,
            event.seconds,
            list(map(bytes, event.buffers)),
        )
    if isinstance(event, Chunk):
        return (event.blob, event.position, bytes(event.data))
    if isinstance(event, Probe):
        return (event.number, event.size)
    return event


def whole(corpus: Corpus) -> list[Any]:
    connection = side(corpus)
    connection.receive_data(stream_of(corpus))
    return [plain(event) for event in connection.events()]


@pytest.mark.parametrize("corpus", CORPORA, ids=NAMES)
def test_a_recorded_conversation_is_understood(corpus: Corpus) -> None:
    assert len(whole(corpus)) >= len(corpus.frames) - 1


@settings(max_examples=100, deadline=None)
@given(which=st.integers(0, len(CORPORA) - 1), cuts=st.lists(st.integers(0, 10_000)), into_buffers=st.booleans())
def test_any_pieces_give_the_same_events(which: int, cuts: list[int], into_buffers: bool) -> None:
    corpus = CORPORA[which]
    stream, connection, found = stream_of(corpus), side(corpus), []
    bounds = sorted({0, len(stream), *[cut % len(stream) for cut in cuts]})
    for start, end in pairwise(bounds):
        piece = stream[start:end]
        while piece:
            if into_buffers:
                buffer = connection.get_buffer()
                size = min(len(buffer), len(piece))
                buffer[:size] = piece[:size]
                connection.buffer_updated(size)
            else:
                size = len(piece)
                connection.receive_data(piece)
            piece = piece[size:]
        found += [plain(event) for event in connection.events()]
    assert found == whole(corpus)


@pytest.mark.parametrize("corpus", CORPORA, ids=NAMES)
def test_byte_by_byte(corpus: Corpus) -> None:
    connection = side(corpus)
    for byte in stream_of(corpus):
        connection.receive_data(bytes([byte]))
    assert [plain(event) for event in connection.events()] == whole(corpus)


@pytest.mark.parametrize("corpus", CORPORA, ids=NAMES)
def test_every_truncation_gives_the_events_before_it(corpus: Corpus) -> None:
    stream, every = stream_of(corpus), whole(corpus)
    ends = [0]
    for frame in corpus.frames[1:]:
        ends.append(ends[-1] + len(frame))
    for cut in range(0, len(stream), 1 if len(stream) < 2000 else 7):
        connection = side(corpus)
        connection.receive_data(stream[:cut])
        connection.receive_eof()
        *events, last = [plain(event) for event in connection.events()]
        assert events == every[: len(events)]
        assert last.inside_frame == (cut not in ends)


@pytest.mark.parametrize("corpus", CORPORA, ids=NAMES)
def test_a_flipped_bit_anywhere_is_an_event_or_a_protocol_error(corpus: Corpus) -> None:
    """One bit of every byte of headers and metadata, and of some bytes of payloads; the fuzzer flips every bit."""
    rng = random.Random(0)
    for frame in corpus.frames[1:]:
        head = HEADER_SIZE + int.from_bytes(frame[32:36], "little")
        for at in [*range(head), *range(head, len(frame), 101)]:
            damaged = bytearray(frame)
            damaged[at] ^= 1 << rng.randrange(8)
            outcome = attempt(corpus, bytes(damaged), True, rng)
            assert at >= head or outcome.startswith(("refused", "nothing"))


def test_a_thousand_inputs_of_the_fuzzer() -> None:
    """The full run, a million inputs, is described in docs/protocol.md."""
    outcomes, peak = fuzz(1500, seed=1, memory_every=100)
    assert outcomes["nothing to refuse"] > 50
    assert sum(count for outcome, count in outcomes.items() if outcome.startswith("refused")) > 500
    assert peak < MEMORY_BOUND


class TestMemory:
    """What a few bytes can make the other side take."""

    @staticmethod
    def taken(stream: bytes) -> int:
        server, _ = opened(credit=1 << 40)
        tracemalloc.start()
        try:
            with pytest.raises(PeerError):
                server.receive_data(stream)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("payload", [2**30 + 1, 2**40 - 1, 2**63, 2**64 - 1])
    def test_a_payload_that_is_too_long(self, payload: int) -> None:
        assert self.taken(pack_head(Kind.BATCHES, b"", payload=payload)) < 1 << 20

    def test_metadata_that_is_too_long(self) -> None:
        for kind, limit in ((Kind.BATCHES, MAX_METADATA), (Kind.PING, MAX_CONTROL)):
            head = bytearray(pack_head(kind, b""))
            head[32:36] = (limit + 1).to_bytes(4, "little")
            assert self.taken(bytes(head)) < 1 << 20

    def test_a_payload_that_its_metadata_does_not_explain(self) -> None:
        """A gibibyte is announced, within limit and credit, but the batches do not add up: no memory is taken."""
        record = [0, 0, 0, 1, 1, 0.0, [0, [0, 18, 1, 1]], [1 << 28], [], []]
        head = pack_head(Kind.BATCHES, msgpack.packb([[record], None]), payload=1 << 30)
        assert self.taken(head) < 1 << 20

    def test_nested_arrays_that_claim_to_be_long(self) -> None:
        for metadata in (b"\xdc\x08\x00" * 20_000, b"\xdd\x00\x00\x08\x00" * 12_000, b"\x90" * 65_000):
            assert self.taken(pack_head(Kind.PING, metadata)) < MEMORY_BOUND
        assert (
            self.taken(pack_head(Kind.BATCHES, b"\xdc\x08\x00" + (b"\xdc\x07\xff" + b"\x90" * 2047) * 120))
            < MEMORY_BOUND
        )


def test_two_machines_talk_at_random() -> None:
    """Batches, leases, credit and goodbyes cross on the way at random; both sides agree at the end."""
    for seed in range(25):
        rng = random.Random(seed)
        server, worker = opened(credit=0)
        wires: dict[bool, deque[bytes]] = {True: deque(), False: deque()}
        sent_steps, seen_steps, lease, step = [], [], 0, 0
        for _ in range(300):
            choice = rng.random()
            if choice < 0.15:
                lease += 1
                server.send(m.Lease(lease, 0, lease, lease + 1, 0, 1, 10.0))
            elif choice < 0.35:
                server.send_credit(max(server.receiving.granted, server.receiving.received + rng.randrange(4000)))
            elif choice < 0.6:
                size = rng.randrange(200)
                batches = [
                    pack_batch(0, step + k, np.arange(k), {"x": np.full(size, step + k), "n": size})
                    for k in range(rng.randrange(1, 4))
                ]
                try:
                    worker.send_batches(lease, batches)
                except MisuseError:
                    assert sum(batch.size for batch in batches) > worker.sending.available
                else:
                    sent_steps += range(step, step + len(batches))
                    step += len(batches)
            elif choice < 0.7:
                rng.choice([server, worker]).send(m.Ping(1, 2))
            for one, to_server in ((worker, True), (server, False)):
                if data := sent(one):
                    wires[to_server].append(data)
            _deliver(rng, wires, server, worker, seen_steps)
        worker.send(m.Goodbye(Reason.DONE, ""))
        server.send(m.Goodbye(Reason.DONE, ""))
        wires[True].append(sent(worker))
        wires[False].append(sent(server))
        while wires[True] or wires[False]:
            _deliver(rng, wires, server, worker, seen_steps)
        assert seen_steps == sent_steps
        assert seen_steps
        assert server.closed
        assert worker.closed
        assert server.receiving.received == worker.sending.sent <= server.receiving.granted


def _deliver(
    rng: random.Random, wires: dict[bool, deque[bytes]], server: Connection, worker: Connection, seen: list[int]
) -> None:
    """Some bytes arrive."""
    for to_server, connection in ((True, server), (False, worker)):
        if wires[to_server] and rng.random() < 0.7:
            data = wires[to_server].popleft()
            cut = rng.randrange(len(data) + 1)
            connection.receive_data(data[:cut])
            if cut < len(data):
                wires[to_server].appendleft(data[cut:])
        for event in connection.events():
            if isinstance(event, Batch):
                data = event.data()
                assert equal(data["x"], np.full(data["n"], event.step))
                seen.append(event.step)


def test_an_allocator_that_has_no_memory() -> None:
    def allocate(size: int, kind: Kind, stream: int) -> Any:
        raise MemoryError

    server, worker = opened(allocate=allocate)
    worker.send_batches(1, [pack_batch(0, 0, np.arange(3), None)])
    with pytest.raises(MemoryError):
        server.receive_data(sent(worker))
    assert server.closed
    worker.receive_data(sent(server))
    (error,) = worker.events()
    assert isinstance(error, m.Error)
    assert error.reason is Reason.INTERNAL


def test_an_allocator_that_gives_too_little() -> None:
    server, worker = opened(allocate=lambda size, kind, stream: bytearray(size - 1))
    worker.send_batches(1, [pack_batch(0, 0, np.arange(3), None)])
    with pytest.raises(MisuseError, match="returned 63 bytes where 64 are needed"):
        server.receive_data(sent(worker))


def test_a_connection_that_failed_sends_nothing_more() -> None:
    server, _ = opened()
    with pytest.raises(PeerError):
        server.receive_data(b"x" * 100)
    with pytest.raises(MisuseError, match="the connection failed"):
        server.send(m.Ping(1, 2))
    server.get_buffer()[:1] = b"x"
    with pytest.raises(PeerError):
        server.buffer_updated(1)
    assert not server.authenticated
    assert not server.is_open


def test_it_needs_no_torch_sockets_or_threads() -> None:
    names = ("torch", "socket", "ssl", "asyncio")
    code = f"""
import sys
before = set(sys.modules)  # coverage brings some along
import distributed_training.wire
print([name for name in {names} if name in set(sys.modules) - before])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
