"""Control messages: every field is checked on both sides."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from tests.wire.pair import carry, greeted, join, opened, sent, welcome

from distributed_training.wire import Expected, MisuseError, PeerError, Reason, Role, refusal
from distributed_training.wire import messages as m
from distributed_training.wire.frames import Kind, pack_head
from distributed_training.wire.messages import decode_message, encode_message, new_packer, unpack_metadata

EVERY: list[m.Message] = [
    join(),
    welcome(),
    m.Refused(Reason.BUSY, "full"),
    m.Request(8),
    m.Lease(5, 1, 10, 20, 0, 2, 30.5),
    m.Cancel(5, Reason.TIMEOUT, "too slow"),
    m.Release(5, 12, Reason.SHUTTING_DOWN),
    m.Progress(1, 9, 64, 5, 120, 2),
    m.NoWork(m.Work.LATER, 2.0),
    m.SampleFailed(5, 1, 11, 4321, "cannot read a.png"),
    m.Task(3, "inference", {"top_k": 3, "threshold": 0.5, "full": False, "name": None}),
    m.TaskEnd(3, 1000),
    m.Credit(2**40),
    m.Blocked(2**20),
    m.BlobOffer(2, "step-10/state.safetensors", 2**33, bytes(range(32))),
    m.BlobPull(2, 2**32),
    m.BlobDone(2, True, ""),
    m.BlobOffer(3, "0a" * 16 + "/ledger.jsonl", 0, bytes(32)),
    m.BlobDone(3, False, "it is of another training"),
    m.Ping(1, 2),
    m.Pong(1, 2, 3),
    m.ProbeReport(1, 10, 0.1),
    m.Goodbye(Reason.DONE, "bye"),
    m.Error(Reason.INTERNAL, "disk full \udcff"),
]


def test_these_are_all_there_are() -> None:
    assert {message.KIND for message in EVERY} == set(m.MESSAGES)


def test_every_message_arrives_as_it_was() -> None:
    for message in EVERY:
        stream, metadata = encode_message(message, new_packer())
        back = decode_message(message.KIND, stream, unpack_metadata(metadata))
        assert back == message
        assert type(back) is type(message)


def test_wrong_values_are_not_sent() -> None:
    for message in EVERY:
        for name in [field.name for field in fields(message)]:  # type: ignore[arg-type]
            for wrong in (-1, 1.5j, [[]], object(), "x" * 5000, 2**63, {"a": []}, {1: 2}, (0,), (1000,), b"short"):
                with pytest.raises((MisuseError, ValueError), match=f"{type(message).__name__}.{name} must|a lease"):
                    encode_message(replace(message, **{name: wrong}), new_packer())  # type: ignore[type-var]


def test_wrong_values_are_refused() -> None:
    for message in EVERY:
        stream, metadata = encode_message(message, new_packer())
        good = unpack_metadata(metadata)
        for at in range(len(good)):
            for wrong in (-1, [[]], {"a": []}, "x" * 5000, 2**63, b"short"):
                with pytest.raises(PeerError):
                    decode_message(message.KIND, stream, [*good[:at], wrong, *good[at + 1 :]])


def test_other_fields_are_refused() -> None:
    for message in EVERY:
        stream, metadata = encode_message(message, new_packer())
        good = unpack_metadata(metadata)
        for wrong in ([*good, 0], good[:-1], None, {}, "text", 5):
            with pytest.raises(PeerError, match="does not have the fields"):
                decode_message(message.KIND, stream, wrong)
        if message.STREAM is None:
            with pytest.raises(PeerError, match="does not have the fields"):
                decode_message(message.KIND, 1, good)


@pytest.mark.parametrize("lease", [(5, 5, 0, 1), (6, 5, 0, 1), (0, 5, 1, 1), (0, 5, 0, 0)])
def test_an_empty_lease_is_refused(lease: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="a lease"):
        m.Lease(1, 0, *lease, 1.0)
    with pytest.raises(PeerError, match="a lease"):
        decode_message(Kind.LEASE, 1, [0, *lease, 1.0])


def test_metadata_that_cannot_be_read() -> None:
    for metadata in (
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\x91\x01\x01",
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({1: 2}),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdc\x08\x01" + b"\xc0" * 0x801,
        b"\x91" * 5000 + b"\xc0",
        b"\xa1\xff",
    ):
        with pytest.raises(PeerError, match="metadata that cannot be read"):
            unpack_metadata(metadata)


def test_a_long_error_is_cut_not_lost() -> None:
    server, worker = opened()
    with pytest.raises(PeerError):
        server.receive_data(pack_head(Kind.REQUEST, msgpack.packb(["x" * 4000])))
    (error,) = _events(worker, sent(server))
    assert isinstance(error, m.Error)
    assert error.reason is Reason.PROTOCOL


def test_what_the_peer_sent_does_not_make_an_error_long() -> None:
    server, _ = opened()
    metadata = msgpack.packb([[["x" * 9000, *[0] * 9]], None])
    with pytest.raises(PeerError) as caught:
        server.receive_data(pack_head(Kind.BATCHES, metadata))
    assert len(str(caught.value)) < 600


def _events(connection: Any, data: bytes) -> list[Any]:
    connection.receive_data(data)
    return list(connection.events())


class TestAdmission:
    EXPECTED = Expected(dataset="d1", plan=1, facts={"seed": 0})

    def test_what_fits_is_welcome(self) -> None:
        assert refusal(join(), self.EXPECTED) is None
        assert refusal(join(dataset="own"), Expected()) is None

    @pytest.mark.parametrize(
        ("changes", "reason", "words"),
        [
            ({"dataset": "d2"}, Reason.DATASET, "fingerprint d2, this run is about d1"),
            ({"plan": 2}, Reason.PLAN, "version 2, the server that of version 1"),
            ({"facts": {"seed": 1}}, Reason.CONFIG, "seed is 0 on the server and 1 on host:1"),
            ({"facts": {"seed": False}}, Reason.CONFIG, "seed is 0 on the server and False"),
            ({"facts": {}}, Reason.CONFIG, "seed is 0 on the server and not set"),
        ],
    )
    def test_what_does_not_is_told_why(self, changes: dict[str, Any], reason: Reason, words: str) -> None:
        found = refusal(join(**changes), self.EXPECTED)
        assert found is not None
        assert found.reason is reason
        assert words in found.text

    def test_the_server_may_only_choose_what_was_offered(self) -> None:
        server, worker = greeted()
        worker.send(join(codecs=(2,)))
        carry(server, worker)
        for wrong in (welcome(codecs=(1,)), welcome(codecs=(), shared=True)):
            with pytest.raises(MisuseError, match="only choose what was offered"):
                server.send(wrong)
        server._offered = frozenset({1})
        server.send(welcome(codecs=(1,)))
        with pytest.raises(PeerError, match="not offered"):
            worker.receive_data(sent(server))

    def test_what_was_agreed_is_known_on_both_sides(self) -> None:
        server, worker = opened(Role.WORKER)
        assert server.codecs == worker.codecs == {1}
        assert not server.shared
        assert server.is_open
        assert worker.is_open
