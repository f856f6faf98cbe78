"""Fuzz the wire protocol: `python benchmarks/fuzz_wire.py --inputs 1000000`.

Each input is a recorded, valid stream for one side of a connection, changed at random: bits and bytes flipped,
pieces cut, doubled, moved or taken from another stream, lengths set to interesting numbers, metadata changed at the
level of msgpack. Most changed frames get a checksum that fits, so that damage reaches the code behind it. The stream
then arrives in pieces of random size, by `receive_data` or by `get_buffer`.

With `--guided` (and `pip install atheris`) inputs are found by coverage instead: bytes that reach new code are kept
and changed further. Checksums and offsets are put right before each try.

An input fails if anything but PeerError comes out, if a payload buffer is taken that is larger than the frame's
limits, or (looked at every so often, because it is slow) if memory beyond the bound is taken.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgpack
import numpy as np

from distributed_training.wire import Batch, Connection, PeerError, Reason, Role, pack_batch
from distributed_training.wire import messages as m
from distributed_training.wire.frames import HEADER_SIZE, Kind, pack_head, unpack_header

TOKEN = b"the token that the fuzzer knows.."
NONCES = {True: b"s" * 32, False: b"p" * 32}
MAX_PAYLOAD = 1 << 20
GRANTED = 1 << 22
MEMORY_BOUND = 64 << 20
"""What one input may make the decoder take, at most: see docs/protocol.md."""
INTERESTING = [
    0,
    1,
    2,
    63,
    64,
    65,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


class Corpus(NamedTuple):
    """A valid stream for one side."""

    role: Role
    peer: Role
    greeting: bytes
    """What authenticates the peer."""
    frames: list[bytes]
    """The rest, frame by frame."""


def main() -> None:
    """Parse, fuzz, report."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    options.add_argument("--inputs", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--every-bit", action="store_true", help="first flip every single bit of the valid streams")
    options.add_argument("--guided", action="store_true", help="let atheris look for inputs that reach new code")
    options.add_argument("--memory-every", type=int, default=500, help="measure memory for one in so many inputs")
    given = options.parse_args()
    if given.guided:
        guided(given.inputs, given.seed)
    if given.every_bit:
        print(f"{flip_every_bit()} streams with one bit flipped, none failed")
    start = time.perf_counter()
    outcomes, peak = fuzz(given.inputs, given.seed, given.memory_every)
    seconds = time.perf_counter() - start
    print(f"{given.inputs} inputs with seed {given.seed} in {seconds:.0f} s, none failed")
    print(f"largest memory taken by an input that was measured: {peak / 2**20:.1f} MiB")
    for outcome, count in outcomes.most_common():
        print(f"{count:9d}  {outcome}")


def fuzz(inputs: int, seed: int, memory_every: int = 0) -> tuple[Counter[str], int]:
    """Try so many inputs; how they ended, and the most memory one took. An input that fails is shown, and ends it."""
    corpora, outcomes, peak = make_corpora(), Counter[str](), 0
    for number in range(inputs):
        rng = random.Random(f"{seed}/{number}")
        corpus = rng.choice(corpora)
        data, authenticated = mutate(corpus, corpora, rng)
        measured = bool(memory_every) and number % memory_every == 0
        if measured:
            tracemalloc.start()
        try:
            outcomes[attempt(corpus, data, authenticated, rng)] += 1
            if measured:
                peak = max(peak, tracemalloc.get_traced_memory()[1])
                assert peak <= MEMORY_BOUND, f"{peak} bytes of memory"
        except Exception:
            traceback.print_exc()
            sys.exit(f"input {number} of seed {seed} failed: {corpus.role.name} {data[:200].hex()} ({len(data)} bytes)")
        finally:
            if measured:
                tracemalloc.stop()
    return outcomes, peak


def flip_every_bit() -> int:
    """Every frame of every stream with each of its bits flipped; how many that were."""
    rng, count = random.Random(0), 0
    for corpus in make_corpora():
        for frame in corpus.frames[1:]:
            for bit in range(8 * len(frame)):
                damaged = bytearray(frame)
                damaged[bit // 8] ^= 1 << bit % 8
                attempt(corpus, bytes(damaged), True, rng)
                count += 1
    return count


def guided(inputs: int, seed: int) -> NoReturn:
    """Let atheris choose the inputs. It ends the process."""
    import atheris

    corpora = make_corpora()

    def one(data: bytes) -> None:
        if len(data) > 1:
            corpus = corpora[data[0] % len(corpora)]
            attempt(corpus, repaired(data[1:]), True, random.Random(len(data)))

    atheris.instrument_all()
    with tempfile.TemporaryDirectory() as folder:
        for number, corpus in enumerate(corpora):
            for at in range(1, len(corpus.frames)):
                stream = bytes([number]) + b"".join(corpus.frames[at : at + 3])
                (Path(folder) / f"{number}-{at}").write_bytes(stream)
        atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", "-max_len=4096", folder], one)
        atheris.Fuzz()
    raise SystemExit


def repaired(stream: bytes) -> bytes:
    """The same stream with checksums and offsets that fit, so that the rest of it is looked at."""
    out, at, offset = bytearray(), 0, 0
    while len(stream) - at >= HEADER_SIZE:
        kind, flags = stream[at + 4], stream[at + 5]
        number, _, payload, length = struct.unpack_from("<QQQI", stream, at + 8)
        metadata = stream[at + HEADER_SIZE : at + HEADER_SIZE + length]
        out += pack_head(kind, metadata, flags=flags, stream=number, offset=offset, payload=payload)  # type: ignore[arg-type]
        at += HEADER_SIZE + len(metadata)
        out += stream[at : at + payload]
        at, offset = at + payload, (offset + payload) % 2**64
    return bytes(out) + stream[at:]


def attempt(corpus: Corpus, data: bytes, authenticated: bool, rng: random.Random) -> str:
    """Let one side receive a stream; how that ended."""

    def allocate(size: int, kind: Kind, stream: int) -> bytearray:
        assert 0 < size <= MAX_PAYLOAD, f"{size} bytes taken"
        return bytearray(size)

    connection = Connection(
        corpus.role,
        token=TOKEN,
        max_payload=MAX_PAYLOAD,
        allocate=allocate,
        locate=lambda segment, begin, size: bytearray(size) if segment == 1 else None,
        nonce=NONCES[corpus.role is Role.SERVER],
    )
    prepare(connection, corpus, authenticated)
    try:
        _receive(connection, data, rng)
    except PeerError as error:
        ended = f"refused: {error.reason.name}"
    else:
        connection.receive_eof()
        ended = "nothing to refuse"
    for event in connection.events():
        if isinstance(event, Batch):
            ended = _restore(event, ended)
    b"".join(connection.data_to_send())
    return ended


def _restore(batch: Batch, ended: str) -> str:
    """What a server does with a batch."""
    try:
        for index, (_, size) in list(batch.compressed.items()):
            batch.decompressed(index, memoryview(bytes(size)))
        batch.data()
        np.sum(batch.ids)
    except PeerError:
        return "refused: payload"
    return ended


def _receive(connection: Connection, data: bytes, rng: random.Random) -> None:
    """Hand over a stream in one of the two ways, in pieces."""
    at, pieces = 0, rng.random() < 0.5
    longest = rng.choice([1 << 30, 4096, 100, 7])
    while at < len(data):
        if pieces:
            size = min(longest, len(data) - at)
            connection.receive_data(data[at : at + size])
        else:
            buffer = connection.get_buffer()
            assert len(buffer), "an empty buffer to receive into"
            size = min(longest, len(buffer), len(data) - at)
            buffer[:size] = data[at : at + size]
            connection.buffer_updated(size)
        at += size


def prepare(connection: Connection, corpus: Corpus, authenticated: bool) -> None:
    """Bring a connection to where the changed part of the stream begins."""
    connection.data_to_send()
    if not authenticated:
        return
    connection.receive_data(corpus.greeting)
    if corpus.role is Role.SERVER:
        connection.receive_data(corpus.frames[0])
        connection.send(_welcome())
    else:
        connection.send(_join())
        connection.receive_data(corpus.frames[0])
    connection.send_credit(GRANTED)
    list(connection.events())
    connection.data_to_send()


# -- valid streams


def _join() -> m.Join:
    return m.Join(
        "host:1", "0.1", "fingerprint", 1, {"seed": 0, "rate": 0.5, "name": None}, (1, 2), "host", MAX_PAYLOAD
    )


def _welcome() -> m.Welcome:
    return m.Welcome("session", "0.1", {"steps": 100}, (1,), True, MAX_PAYLOAD)


def make_corpora() -> list[Corpus]:
    """For every pair of roles, what each side receives in a conversation that uses every kind of frame."""
    found = []
    for role in (Role.WORKER, Role.CLIENT, Role.DOCTOR):
        settings: dict[str, Any] = {"token": TOKEN, "max_payload": MAX_PAYLOAD, "locate": lambda *_: None}
        server, peer = Connection(Role.SERVER, nonce=NONCES[True], **settings), None
        peer = Connection(role, nonce=NONCES[False], **settings)
        to_server, to_peer = b"", b""
        for _ in range(4):
            there, back = b"".join(peer.data_to_send()), b"".join(server.data_to_send())
            to_server, to_peer = to_server + there, to_peer + back
            server.receive_data(there)
            peer.receive_data(back)
        peer.send(_join())
        joined = b"".join(peer.data_to_send())
        server.receive_data(joined)
        server.send(_welcome())
        welcomed = b"".join(server.data_to_send())
        peer.receive_data(welcomed)
        for side in (server, peer):
            side.sending.limit = GRANTED
        found.append(Corpus(Role.SERVER, role, to_server, [joined, *_talk(peer, role)]))
        found.append(Corpus(role, Role.SERVER, to_peer, [welcomed, *_talk(server, role)]))
    return found


def _talk(side: Connection, role: Role) -> list[bytes]:
    """One of each kind of frame that this side may send."""
    frames: list[bytes] = []

    def take() -> None:
        frames.append(b"".join(side.data_to_send()))

    for message in _messages():
        try:
            side.send(message)
        except m.MisuseError:
            continue
        take()
    if role is not Role.DOCTOR:
        send = side.send_results if side.role is Role.SERVER and role is Role.CLIENT else side.send_batches
        if side.role is not Role.SERVER or role is Role.CLIENT:
            for batches in _batches():
                send(1, batches)
                take()
            send(1, [pack_batch(0, 9, np.arange(8), np.arange(8))], place=(1, 64))
            take()
        side.send_chunk(2, 100, b"c" * 200)
        take()
        side.send_chunk(3, 2**62, b"")
        take()
    side.send_probe(1, b"p" * 100)
    take()
    side.send(m.Goodbye(Reason.DONE, "done"))
    take()
    return frames


def _messages() -> list[m.Message]:
    return [
        m.Request(8),
        m.Lease(5, 1, 10, 20, 0, 2, 30.5),
        m.Cancel(5, Reason.TIMEOUT, "too slow"),
        m.Release(5, 12, Reason.SHUTTING_DOWN),
        m.Progress(1, 9, 64, 5, 120, 2),
        m.NoWork(m.Work.LATER, 2.0),
        m.SampleFailed(5, 1, 11, 4321, "cannot read"),
        m.Task(3, "inference", {"top_k": 3, "threshold": 0.5}),
        m.TaskEnd(3, 1000),
        m.Credit(GRANTED),
        m.Blocked(2**20),
        m.BlobOffer(2, "state.safetensors", 2**33, bytes(range(32))),
        m.BlobPull(2, 2**32),
        m.BlobDone(2, True, ""),
        m.BlobOffer(3, "0a" * 16 + "/checkpoints/step-0000000010/manifest.json", 0, bytes(32)),
        m.BlobDone(3, False, "it is of another training"),
        m.Ping(1, 2),
        m.Pong(1, 2, 3),
        m.ProbeReport(1, 10, 0.1),
    ]


def _batches() -> list[list[Any]]:
    small = (np.arange(40, dtype=np.float32).reshape(8, 5), np.arange(8))
    rich = {
        "image": np.zeros((2, 3, 4), np.uint8),
        "mask": np.array([True, False]),
        "names": ["a.png", "b.png", "ü"],
        "raw": [b"abc", b""],
        "more": ([1, 2, 3], (0.5, 1.5), {"n": None, 7: "text", "long": "y" * 100, "bytes": b"z" * 100}),
        "scalar": np.float16(2),
        "nothing": [],
        "mixed": [1, "a", None, 2.5, True],
    }
    packed = pack_batch(0, 5, np.arange(4), [np.zeros(100)])
    packed.compress(1, 1, memoryview(b"compressed"))
    ids = np.arange(8)
    return [
        [pack_batch(0, 0, ids, small)],
        [pack_batch(0, step, ids, small, rank=1, ranks=2, seconds=0.01) for step in range(4)],
        [pack_batch(1, 3, ids, rich)],
        [packed],
    ]


# -- changes


def mutate(corpus: Corpus, corpora: list[Corpus], rng: random.Random) -> tuple[bytes, bool]:
    """A changed stream, and whether it begins after authentication."""
    if rng.random() < 0.1:
        return _damage(corpus.greeting, rng), False
    frames = list(corpus.frames[1:])
    if rng.random() < 0.3:
        rng.shuffle(frames)
    frames = frames[: rng.randint(1, len(frames))]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(frames))
        choice = rng.random()
        if choice < 0.1:
            frames.insert(at, rng.choice(rng.choice(corpora).frames))
        elif choice < 0.15:
            frames.insert(at, frames[rng.randrange(len(frames))])
        else:
            frames[at] = _change_frame(frames[at], rng)
    data = b"".join(frames)
    if rng.random() < 0.5:  # or most inputs would end at a count that does not agree, before anything is looked at
        data = repaired(data)
    return (_damage(data, rng) if rng.random() < 0.1 else data), True


def _change_frame(frame: bytes, rng: random.Random) -> bytes:
    """One frame changed in its header, its metadata or its payload."""
    try:
        header = unpack_header(bytearray(frame[:HEADER_SIZE]))
    except (PeerError, struct.error):
        return _damage(frame, rng)
    metadata = frame[HEADER_SIZE : HEADER_SIZE + header.metadata]
    payload = frame[HEADER_SIZE + header.metadata :]
    fields = header._asdict()
    part = rng.random()
    if part < 0.55:
        metadata = _damage(metadata, rng) if rng.random() < 0.5 else _change_metadata(metadata, rng)
    elif part < 0.75:
        name = rng.choice(["flags", "stream", "offset", "payload", "kind", "version"])
        fields[name] = rng.choice(INTERESTING) if rng.random() < 0.6 else fields[name] + rng.choice([-1, 1, 64])
    elif part < 0.9:
        payload = _damage(payload, rng)
    else:
        return _damage(frame, rng)
    small = {name: fields[name] & 255 for name in ("flags", "version")}
    wide = {name: fields[name] & (2**64 - 1) for name in ("stream", "offset", "payload")}
    return (
        pack_head(
            Kind(fields["kind"]) if fields["kind"] in list(Kind) else fields["kind"] & 255, metadata, **small, **wide
        )
        + payload
    )


def _change_metadata(metadata: bytes, rng: random.Random) -> bytes:
    """Another value somewhere in the tree of the metadata."""
    try:
        tree = msgpack.unpackb(metadata, unicode_errors="surrogatepass", strict_map_key=False)
    except (ValueError, TypeError):
        return metadata
    holder, here = None, tree
    while isinstance(here, list) and here and (holder is None or rng.random() < 0.85):
        holder, at = here, rng.randrange(len(here))
        here = here[at]
    if holder is None:
        return metadata
    choice = rng.random()
    if choice < 0.15:
        del holder[at]
    elif choice < 0.3:
        holder.insert(at, holder[rng.randrange(len(holder))])
    elif choice < 0.5 and isinstance(here, int) and not isinstance(here, bool):
        holder[at] = max(-(2**63), min(2**64 - 1, here + rng.choice([-1, 1, 2, 64, 2**32])))
    else:
        holder[at] = _anything(rng, 3)
    try:
        return msgpack.packb(tree, unicode_errors="surrogatepass")  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        return metadata


def _anything(rng: random.Random, depth: int) -> Any:
    choice = rng.randrange(10 if depth else 7)
    if choice == 0:
        return rng.choice(INTERESTING)
    if choice == 1:
        return -rng.choice(INTERESTING[:15])
    if choice == 2:
        return rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e300])
    if choice == 3:
        return rng.choice(["", "a", "x" * 100, "if", "\ud800"])
    if choice == 4:
        return rng.choice([b"", b"a", b"x" * 100])
    if choice < 7:
        return rng.choice([None, True, False])
    if choice == 7:
        return {"a": _anything(rng, depth - 1)}
    return [_anything(rng, depth - 1) for _ in range(rng.randrange(6))]


def _damage(data: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled or overwritten."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice([1, 1, 2, 4, 8, 40])
        choice = rng.randrange(6)
        if choice == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif choice == 1:
            changed[at : at + size] = rng.randbytes(size)
        elif choice == 2:
            del changed[at : at + size]
        elif choice == 3:
            changed[at:at] = changed[at : at + size]
        elif choice == 4:
            changed[at : at + 8] = struct.pack(rng.choice(["<Q", ">Q"]), rng.choice(INTERESTING))
        else:
            del changed[at:]
    return bytes(changed)


if __name__ == "__main__":
    main()
