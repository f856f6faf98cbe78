"""Nothing is read before both sides have proved the token, and no proof serves twice."""

from __future__ import annotations

from typing import Any

import pytest
from tests.wire.pair import PEER_NONCE, SERVER_NONCE, TOKEN, carry, greeted, join, sent

from distributed_training.wire import Authenticated, AuthenticationError, Connection, PeerError, Reason, Rejected, Role
from distributed_training.wire.auth import Authentication
from distributed_training.wire.frames import HEADER_SIZE, Kind, pack_head
from distributed_training.wire.states import State


def server(token: bytes | None = TOKEN, **settings: Any) -> Connection:
    return Connection(Role.SERVER, token=token, **settings)


def worker(token: bytes | None = TOKEN, **settings: Any) -> Connection:
    return Connection(Role.WORKER, token=token, **settings)


@pytest.mark.parametrize("token", [TOKEN, None])
@pytest.mark.parametrize("role", [Role.WORKER, Role.CLIENT, Role.DOCTOR])
def test_both_sides_learn_who_the_other_is(role: Role, token: bytes | None) -> None:
    there, here = server(token), Connection(role, token=token)

    events = carry(there, here)

    assert events == ([Authenticated(role, 1)], [Authenticated(Role.SERVER, 1)])
    assert there.authenticated
    assert here.authenticated
    assert there.state is here.state is State.JOIN


def test_fresh_random_bytes_every_time() -> None:
    assert sent(worker()) != sent(worker())


@pytest.mark.parametrize("token", [b"", b"short"])
def test_a_short_token_is_refused(token: bytes) -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        server(token)


class TestWrong:
    def test_token(self) -> None:
        there, here = server(), worker(b"another token of the same length")
        there.receive_data(sent(here))
        here.receive_data(sent(there))
        with pytest.raises(AuthenticationError, match="does not know the token") as caught:
            there.receive_data(sent(here))
        assert caught.value.reason is Reason.TOKEN_WRONG
        assert not there.authenticated

        here.receive_data(sent(there))
        assert list(here.events()) == [Rejected(Reason.TOKEN_WRONG, (1, 1))]
        assert here.closed

    @pytest.mark.parametrize(
        ("ours", "theirs", "reason"),
        [(TOKEN, None, Reason.TOKEN_NEEDED), (None, TOKEN, Reason.TOKEN_UNEXPECTED)],
    )
    def test_one_side_without_a_token(self, ours: bytes | None, theirs: bytes | None, reason: Reason) -> None:
        there, here = server(ours), worker(theirs)
        with pytest.raises(AuthenticationError):
            there.receive_data(sent(here))
        here.receive_data(sent(there))
        assert list(here.events()) == [Rejected(reason, (1, 1))]

    def test_server(self) -> None:
        """Somebody who answers every challenge without knowing the token is found out by the worker."""
        here, impostor = worker(), Authentication(Role.SERVER, b"x" * 32, b"", None)
        hello = sent(here)[HEADER_SIZE:]
        impostor.read_hello(hello)
        here.receive_data(pack_head(Kind.CHALLENGE, impostor.challenge()))
        proof = sent(here)[HEADER_SIZE:]
        for answer in (impostor.proof(Role.SERVER), proof):
            with pytest.raises(AuthenticationError, match="the server does not know the token"):
                here.receive_data(pack_head(Kind.ACCEPTED, answer))
        assert not here.authenticated
        assert sent(here) == b""

    def test_a_server_that_asks_for_no_token_is_not_trusted(self) -> None:
        here, impostor = worker(), Authentication(Role.SERVER, None, b"", None)
        impostor.version = 1
        with pytest.raises(AuthenticationError, match="does not ask for the token"):
            here.receive_data(pack_head(Kind.CHALLENGE, impostor.challenge()))

    def test_certificate(self) -> None:
        """Somebody between two TLS connections passes all bytes on, but shows another certificate."""
        there, here = server(binding=b"real fingerprint"), worker(binding=b"other fingerprint")
        there.receive_data(sent(here))
        here.receive_data(sent(there))
        with pytest.raises(AuthenticationError, match="somebody stands between"):
            there.receive_data(sent(here))

    def test_versions(self) -> None:
        there, here = server(), Authentication(Role.WORKER, TOKEN, b"", None)
        here.versions = (7, 9)
        with pytest.raises(PeerError, match="versions 7 to 9, this side 1 to 1") as caught:
            there.receive_data(pack_head(Kind.HELLO, here.hello()))
        assert caught.value.reason is Reason.VERSION

    def test_the_highest_common_version_is_chosen(self) -> None:
        there, here = server(), Authentication(Role.WORKER, TOKEN, b"", None)
        here.versions = (1, 9)
        there.receive_data(pack_head(Kind.HELLO, here.hello()))
        here.read_challenge(sent(there)[HEADER_SIZE:])
        assert here.version == 1

    def test_a_version_that_was_not_offered(self) -> None:
        here, there = worker(), Authentication(Role.SERVER, TOKEN, b"", None)
        there.version = 2
        with pytest.raises(PeerError, match="version 2, which was not offered"):
            here.receive_data(pack_head(Kind.CHALLENGE, there.challenge()))

    def test_a_greeting_changed_on_the_way(self) -> None:
        """Whatever of the greeting somebody changes (and repairs the checksum), the proof does not fit any more."""
        for at in range(HEADER_SIZE, HEADER_SIZE + 36):
            there, here = server(), worker()
            hello = bytearray(sent(here))
            hello[at] ^= 2
            with pytest.raises(PeerError):
                _greet(there, here, bytes(hello[HEADER_SIZE:]))
            assert not there.authenticated


def _greet(there: Connection, here: Connection, hello: bytes) -> None:
    there.receive_data(pack_head(Kind.HELLO, hello))
    here.receive_data(sent(there))
    there.receive_data(sent(here))


class TestReplay:
    def test_a_recorded_conversation_opens_nothing(self) -> None:
        first, here = server(), worker()
        hello = sent(here)
        first.receive_data(hello)
        here.receive_data(sent(first))
        proof = sent(here)
        first.receive_data(proof)
        assert first.authenticated

        second = server()
        second.receive_data(hello)
        with pytest.raises(AuthenticationError):
            second.receive_data(proof)
        assert not second.authenticated

    def test_a_recorded_server_is_not_believed(self) -> None:
        there, here = server(), worker()
        there.receive_data(sent(here))
        challenge = sent(there)
        here.receive_data(challenge)
        there.receive_data(sent(here))
        accepted = sent(there)

        other = worker()
        other.receive_data(challenge)
        with pytest.raises(AuthenticationError):
            other.receive_data(accepted)

    def test_a_proof_sent_back_to_its_maker_is_refused(self) -> None:
        here = worker()
        sent(here)
        challenge = Authentication(Role.SERVER, TOKEN, b"", None)
        challenge.version = 1
        here.receive_data(pack_head(Kind.CHALLENGE, challenge.challenge()))
        with pytest.raises(AuthenticationError):
            here.receive_data(pack_head(Kind.ACCEPTED, sent(here)[HEADER_SIZE:]))

    def test_the_same_random_bytes_give_the_same_proof_so_they_must_be_fresh(self) -> None:
        one = Connection(Role.WORKER, token=TOKEN, nonce=PEER_NONCE)
        other = Connection(Role.WORKER, token=TOKEN, nonce=PEER_NONCE)
        assert sent(one) == sent(other)
        assert SERVER_NONCE != PEER_NONCE


class TestBeforeAuthentication:
    def test_a_stranger_gets_random_bytes_and_nothing_else(self) -> None:
        there = server(nonce=SERVER_NONCE)
        there.receive_data(sent(worker(b"a stranger's token")))
        assert sent(there)[HEADER_SIZE:] == b"\x01\x01\x00\x00" + SERVER_NONCE

    def test_the_server_reads_148_bytes_at_most(self) -> None:
        there, here = server(), worker()
        hello = sent(here)
        there.receive_data(hello)
        here.receive_data(sent(there))
        assert len(hello) + len(sent(here)) == 148

    def test_anything_but_a_greeting_is_refused_by_its_header(self) -> None:
        for kind in set(Kind) - {Kind.HELLO}:
            there = server()
            with pytest.raises(PeerError, match=f"sent {kind.name} in state HELLO"):
                there.receive_data(pack_head(kind, b"x" * 1000)[:HEADER_SIZE])

    @pytest.mark.parametrize(
        "frame",
        [
            pack_head(Kind.HELLO, b"x" * 37),
            pack_head(Kind.HELLO, b"x" * 35),
            pack_head(Kind.HELLO, b""),
            pack_head(Kind.HELLO, b"x" * 36, payload=1),
            pack_head(Kind.HELLO, b"x" * 36, stream=1),
            pack_head(Kind.HELLO, b"x" * 36, version=2),
            pack_head(Kind.HELLO, b"x" * 36, flags=1),
            b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: */*\r\n\r\n",
        ],
    )
    def test_a_wrong_length_is_refused_by_its_header(self, frame: bytes) -> None:
        there = server()
        with pytest.raises(PeerError):
            there.receive_data(frame[:HEADER_SIZE])
        assert len(sent(there)) == HEADER_SIZE + 4  # the refusal: a number, no text
        assert there.closed
        with pytest.raises(PeerError):
            there.receive_data(frame)

    def test_a_worker_may_not_speak_before_the_server_has_proved_itself(self) -> None:
        there, here = server(), worker()
        there.receive_data(sent(here))
        here.receive_data(sent(there))
        with pytest.raises(Exception, match="may not send JOIN in state VERDICT"):
            here.send(join())

    def test_a_refusal_of_unknown_number(self) -> None:
        here = worker()
        with pytest.raises(PeerError, match="unknown number 250"):
            here.receive_data(pack_head(Kind.REJECTED, b"\xfa\x01\x01\x00"))


def test_greeted_pair_is_authenticated() -> None:
    there, here = greeted()
    assert there.peer is Role.WORKER
    assert here.peer is Role.SERVER
