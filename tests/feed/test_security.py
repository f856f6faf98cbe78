"""Who does not belong to the run is turned away cheaply, and training goes on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import pytest
from tests.feed import attackers
from tests.feed.conftest import StartLoader, connected, until
from tests.feed.test_feed import fingerprint, local, server_for

from distributed_training.feed import FeedServer, FeedSettings, PairingLink
from distributed_training.feed.pairing import new_token
from distributed_training.feed.tls import make_certificate
from distributed_training.runtime.errors import ConfigError

STRICT = FeedSettings(authentication=0.5, half_open=8, per_address=40, deadline=30.0, absence=30.0)


def refused(server: FeedServer, count: int) -> None:
    """Wait until so many connections were turned away."""
    for _ in until(10):
        if server.figures().refused >= count:
            return
    raise AssertionError(f"{server.figures().refused} of {count} were refused")


@pytest.mark.parametrize("token", [None, b"not the token of this run"], ids=["no token", "wrong token"])
def test_a_loader_needs_the_token(
    start_loader: StartLoader, token: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with server_for("arrays", token=new_token(), settings=STRICT) as server:
        said = start_loader(PairingLink("127.0.0.1", server.port, token)).wait()
        assert "refused the connection" in said
        assert "pairing link that it prints" in said
        assert "refused a connection from 127.0.0.1" in caplog.text
        start_loader(server.link())
        assert fingerprint(server.source().batches(0)) == local("arrays")


def test_tls_with_the_right_certificate(start_loader: StartLoader) -> None:
    with server_for("arrays", token=new_token(), certificate=make_certificate()) as server:
        start_loader(server.link(), workers=2, shared_memory=False)
        assert fingerprint(server.source().batches(0)) == local("arrays")


def test_large_batches_over_tls(start_loader: StartLoader) -> None:
    with server_for("large", token=new_token(), certificate=make_certificate()) as server:
        start_loader(server.link(), "large", shared_memory=False)
        assert sum(len(batch.ids) for _, batch in server.source().batches(0)) == 512


def test_tls_with_another_certificate_is_not_trusted(start_loader: StartLoader) -> None:
    with server_for("arrays", token=new_token(), certificate=make_certificate()) as server:
        link = server.link()
        wrong = PairingLink(link.host, link.port, link.token, "0" * 64)
        assert "shows a certificate with fingerprint" in start_loader(wrong).wait()
        assert not server.figures().loaders


def test_off_this_machine_token_and_certificate_are_made(start_loader: StartLoader) -> None:
    with server_for("arrays", host="0.0.0.0") as server:
        link = server.link("127.0.0.1")
        assert link.token is not None
        assert link.fingerprint is not None
        assert PairingLink.parse(str(link)) == link
        start_loader(link)
        assert fingerprint(server.source().batches(0, 50)) == local("arrays", 0, 50)


def test_a_greeting_that_takes_its_time_is_answered_when_it_comes() -> None:
    patient = replace(STRICT, authentication=60.0)
    with server_for("arrays", token=new_token(), settings=patient) as server:
        connection = attackers.guest(server)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            time.sleep(0.3)  # the server has looked for it, and waits
            attackers.carry(sock, connection, lambda: connection.authenticated)
            assert not server.figures().refused


def test_only_allowed_hosts_may_connect(caplog: pytest.LogCaptureFixture) -> None:
    with server_for("arrays", allow="192.0.2.7") as server:
        with socket.create_connection(("127.0.0.1", server.port)) as stranger:
            stranger.settimeout(10)
            assert stranger.recv(1) == b""
        refused(server, 1)
        assert "only 192.0.2.7 may connect" in caplog.text


def test_strangers_do_not_disturb_training(start_loader: StartLoader, caplog: pytest.LogCaptureFixture) -> None:
    with server_for("arrays", token=new_token(), settings=STRICT, epochs=2) as server, ExitStack() as strangers:
        start_loader(server.link(), workers=2)
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(5)]
        connected(server, 2)
        address = ("127.0.0.1", server.port)
        for number in range(60):  # more than may be half open, and than may come from one address
            sock = strangers.enter_context(socket.create_connection(address))
            if number % 3 == 0:
                sock.sendall(os.urandom(200))  # garbage
            elif number % 3 == 1:
                sock.sendall(b"dtw\x01\x01")  # a greeting that never goes on
            if number == 30:
                start_loader(server.link())
        assert fingerprint(seen + list(batches)) == local("arrays")
        refused(server, 60)
        assert fingerprint(server.source().batches(1)) == local("arrays", 1)
        connected(server, 3)
        assert "refused a connection from 127.0.0.1" in caplog.text


OUTSIDE = {
    attackers.replays_a_handshake: "does not know the token of this run",
    attackers.has_another_token: "does not know the token of this run",
    attackers.has_no_token: "has no token, and this run needs one",
    attackers.says_garbage: "does not speak this protocol",
    attackers.claims_a_huge_greeting: "more than is allowed",
    attackers.sends_a_batch_first: "sent BATCHES in state HELLO",
    attackers.sends_byte_by_byte: "did not prove that it belongs to this run within 0.5 s",
    attackers.says_nothing: "did not prove that it belongs to this run within 0.5 s",
}
INSIDE = {
    attackers.damages_a_frame: "was damaged on the way (checksum)",
    attackers.sends_nonsense: "metadata that cannot be read",
    attackers.sends_long_metadata: "more than is allowed",
    attackers.sends_more_than_its_credit: "bytes with a credit of",
    attackers.sends_more_than_there_is: "more than is allowed",
    attackers.speaks_as_the_server: "sent LEASE in state WORKING, where it is not allowed",
    attackers.brings_what_nobody_asked_for: "which nobody asked for",
    attackers.forges_lines_of_the_log: "is gone: FeedError: it reports: really WARNING all is lost",
}


@pytest.mark.parametrize(
    ("attack", "said"), [*OUTSIDE.items(), *INSIDE.items()], ids=[attack.__name__ for attack in [*OUTSIDE, *INSIDE]]
)
def test_an_attack_is_refused_and_training_goes_on(
    start_loader: StartLoader, caplog: pytest.LogCaptureFixture, attack: Callable[[FeedServer], None], said: str
) -> None:
    settings = replace(STRICT, memory=8 << 20)
    with server_for("arrays", token=new_token(), settings=settings, epochs=2) as server:
        start_loader(server.link())
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(5)]
        attack(server)
        assert fingerprint(seen + list(batches)) == local("arrays")
        assert fingerprint(server.source().batches(1)) == local("arrays", 1)
        connected(server, 1)
        (line,) = [line for line in caplog.messages if said in line]
        assert "127.0.0.1:" in line
        assert line.isprintable()
        assert bool(server.figures().refused) == (attack in OUTSIDE)
        assert server.hub.memory_held <= settings.memory


def test_other_samples_than_planned_are_not_taken(start_loader: StartLoader, caplog: pytest.LogCaptureFixture) -> None:
    with server_for("arrays", token=new_token(), settings=STRICT) as server:
        server.hub.seek(0, 0)
        attackers.brings_other_samples(server)  # nobody else is there, so it gets the first steps
        start_loader(server.link())
        assert fingerprint(server.source().batches(0)) == local("arrays")
        assert "came with other samples than the plan has" in caplog.text


def test_a_peer_that_never_finishes_the_tls_handshake(start_loader: StartLoader) -> None:
    safe = {"token": new_token(), "certificate": make_certificate()}
    with server_for("arrays", settings=STRICT, **safe) as server, ExitStack() as strangers:
        for _ in range(4):
            sock = strangers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            sock.sendall(b"\x16\x03\x01\x02\x00")  # the first bytes of a handshake
        start_loader(server.link())
        assert fingerprint(server.source().batches(0)) == local("arrays")
        refused(server, 4)


def test_a_link_off_this_machine_needs_token_and_fingerprint() -> None:
    with pytest.raises(ConfigError, match="is not this machine"):
        PairingLink("192.0.2.1", 29500)
