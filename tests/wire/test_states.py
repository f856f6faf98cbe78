"""One table for both sides: who may say what, when."""

from __future__ import annotations

import pytest
from tests.wire.pair import carry, greeted, join, opened, sent, welcome

from distributed_training.wire import Connection, Lost, MisuseError, PeerError, Reason, Role
from distributed_training.wire.frames import GREETING_KINDS, Kind
from distributed_training.wire.messages import MESSAGES, Error, Goodbye, Lease, Ping, Refused, Request
from distributed_training.wire.states import TABLE, State

LEAVE = Goodbye(Reason.DONE, "")


def test_until_the_handshake_ends_only_one_side_may_speak() -> None:
    handshake = [state for state in State if state < State.WORKING]
    for state in handshake:
        speakers = {
            role is Role.SERVER for role, at, kind in TABLE if at is state and kind not in (Kind.GOODBYE, Kind.ERROR)
        }
        assert len(speakers) == 1, state


def test_every_state_but_the_last_leads_somewhere_and_none_leads_back() -> None:
    assert {state for _, state, _ in TABLE} == set(State) - {State.CLOSED}
    assert set(TABLE.values()) == set(State) - {State.HELLO}
    assert all(after >= before for (_, before, _), after in TABLE.items())


def test_whoever_left_says_nothing_more() -> None:
    assert {kind for role, state, kind in TABLE if role is Role.SERVER and state is State.SERVER_LEFT} == {Kind.ERROR}
    for role, left in ((Role.WORKER, State.WORKER_LEFT), (Role.CLIENT, State.CLIENT_LEFT)):
        assert {kind for who, state, kind in TABLE if who is role and state is left} == {Kind.ERROR}


def test_every_kind_can_be_sent_by_somebody() -> None:
    assert {kind for _, _, kind in TABLE} == set(Kind)
    assert set(MESSAGES) | GREETING_KINDS | {Kind.BATCHES, Kind.RESULTS, Kind.BLOB_CHUNK, Kind.PROBE} == set(Kind)


def test_an_illegal_message_is_refused_here_and_there() -> None:
    server, worker = opened()
    lease = Lease(1, 0, 0, 5, 0, 1, 60.0)
    with pytest.raises(MisuseError, match="a worker may not send LEASE in state WORKING"):
        worker.send(lease)
    assert sent(worker) == b""

    other, client = opened(Role.CLIENT)
    with pytest.raises(MisuseError, match="a server may not send LEASE in state SERVING"):
        other.send(lease)
    server.send(lease)
    with pytest.raises(PeerError, match="the server sent LEASE in state SERVING, where it is not allowed"):
        client.receive_data(sent(server))
    (error,) = _received_by(other, client)
    assert isinstance(error, Error)
    assert "LEASE in state SERVING" in error.text
    assert other.state is client.state is State.CLOSED


def _received_by(one: Connection, other: Connection) -> list[object]:
    one.receive_data(sent(other))
    return list(one.events())


def test_a_goodbye_from_each_side_closes() -> None:
    server, worker = opened()
    server.send(LEAVE)
    with pytest.raises(MisuseError, match="may not send PING in state SERVER_LEFT"):
        server.send(Ping(1, 0))
    worker.send(Request(3))  # crosses the goodbye on its way
    there, _ = carry(server, worker)
    assert there == [Request(3)]
    assert server.state is worker.state is State.SERVER_LEFT

    worker.send(LEAVE)
    carry(server, worker)
    assert server.closed
    assert worker.closed


def test_goodbyes_may_cross() -> None:
    server, worker = opened()
    server.send(LEAVE)
    worker.send(LEAVE)
    carry(server, worker)
    assert server.state is worker.state is State.CLOSED


def test_nothing_may_follow_the_end() -> None:
    server, worker = opened()
    server.send(LEAVE)
    carry(server, worker)
    worker.send(LEAVE)
    goodbye = sent(worker)
    server.receive_data(goodbye)
    with pytest.raises(PeerError, match="sent GOODBYE in state CLOSED"):
        server.receive_data(goodbye)


def test_a_refusal_ends_it() -> None:
    server, worker = greeted()
    worker.send(join())
    carry(server, worker)
    server.send(Refused(Reason.DATASET, "another dataset"))
    _, here = carry(server, worker)
    assert here == [Refused(Reason.DATASET, "another dataset")]
    assert worker.closed
    with pytest.raises(MisuseError):
        server.send(welcome())


def test_a_worker_waits_for_its_welcome() -> None:
    server, worker = greeted()
    worker.send(join())
    with pytest.raises(MisuseError, match="may not send REQUEST in state ADMIT_WORKER"):
        worker.send(Request(1))
    carry(server, worker)


@pytest.mark.parametrize("part", [0, 10, 41])
def test_a_stream_that_ends_without_goodbye_is_lost(part: int) -> None:
    server, worker = opened()
    worker.send(Request(1))
    server.receive_data(sent(worker)[:part])
    server.receive_eof()
    server.receive_eof()
    events = [event for event in server.events() if isinstance(event, Lost)]
    assert events == ([Lost(State.WORKING, part != 0)])
    assert server.closed


def test_a_stream_that_ends_after_goodbyes_is_not_lost() -> None:
    server, worker = opened()
    server.send(LEAVE)
    worker.send(LEAVE)
    carry(server, worker)
    server.receive_eof()
    assert list(server.events()) == []


def test_this_side_may_give_up_while_a_frame_arrives() -> None:
    server, worker = opened()
    worker.send(Request(1))
    data = sent(worker)
    server.receive_data(data[:41])
    server.send(Error(Reason.INTERNAL, "no disk"))
    server.receive_data(data[41:])
    assert list(server.events()) == []
    assert server.closed
