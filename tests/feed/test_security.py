"""Who does not belong to the run is turned away cheaply, and training goes on."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

import pytest
from tests.feed.conftest import StartLoader, until
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


def loaders(server: FeedServer, count: int) -> None:
    """Wait until so many workers are connected."""
    for _ in until(10):
        if server.figures().loaders == count:
            return
    raise AssertionError(f"{server.figures().loaders} of {count} workers are connected")


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
        loaders(server, 2)
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
        loaders(server, 3)
        assert "refused a connection from 127.0.0.1" in caplog.text


def test_a_peer_that_sends_byte_by_byte_has_no_more_time() -> None:
    with server_for("arrays", settings=STRICT) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.settimeout(10)
            try:
                for byte in b"dtw\x01" * 100:
                    slow.sendall(bytes([byte]))
                    time.sleep(0.05)
            except OSError:
                pass
        refused(server, 1)


def test_a_link_off_this_machine_needs_token_and_fingerprint() -> None:
    with pytest.raises(ConfigError, match="is not this machine"):
        PairingLink("192.0.2.1", 29500)
