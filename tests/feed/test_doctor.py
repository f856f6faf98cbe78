"""The doctor finds the way in order, or names the step that fails and what mends it. Real servers, real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.feed.conftest import StartLoader, connected
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.test_feed import QUICK, fingerprint, local, server_for
from tests.launching import free_port

from distributed_training import __version__
from distributed_training.feed import FeedServer, PairingLink
from distributed_training.feed import session as feed_session
from distributed_training.feed.doctor.batches import BatchShape, measure_batches
from distributed_training.feed.doctor.diagnosis import diagnose
from distributed_training.feed.doctor.report import Diagnosis
from distributed_training.feed.doctor.server import DoctorServer
from distributed_training.feed.pairing import new_token
from distributed_training.feed.tls import make_certificate
from distributed_training.wire import Connection

ALL = [
    "link", "name", "machine", "port", "tls", "versions", "token", "server", "clock", "round trip", "bandwidth there",
    "bandwidth back",
]  # fmt: skip


@pytest.fixture(scope="module")
def safe() -> Iterator[FeedServer]:
    """A server that needs token and certificate."""
    with DoctorServer(token=new_token(), certificate=make_certificate(), settings=QUICK) as server:
        yield server


def look(link: Any, **options: Any) -> Diagnosis:
    return diagnose(link, **{"seconds": 0.3, "timeout": 5.0, **options})


def fault(link: Any, **options: Any) -> tuple[str, str, str]:
    """(name, text, fix) of the check that failed: the last one, and the only one."""
    found = look(link, **options)
    assert not found.ok
    assert [check.status for check in found.checks[:-1]] == ["ok"] * (len(found.checks) - 1)
    last = found.checks[-1]
    assert last.status == "failed"
    return last.name, last.text, last.fix


def test_all_is_well(safe: FeedServer) -> None:
    said: list[str] = []
    batch = BatchShape(bytes=10_000, samples=64)
    found = look(str(safe.link()), batch=batch, seconds=0.8, say=lambda check: said.append(check.name))
    assert found.ok
    assert said == [check.name for check in found.checks] == [*ALL, "batches"]
    assert found.value("there") == __version__
    assert found.value("purpose") == "doctors only"
    assert abs(float(str(found.value("clock_ahead_s")))) < 1.0  # it is the same clock
    assert 0 < float(str(found.value("shortest_ms"))) <= float(str(found.value("median_ms")))
    there = float(str(found.value("bytes_per_second_there")))
    assert there > 1e6
    assert float(str(found.value("bytes_per_second_back"))) > 1e6
    assert min(int(str(found.value(f"slices_{way}"))) for way in ("there", "back")) > 1  # it went on to the end
    assert found.value("samples_per_second") == pytest.approx(there / 10_000 * 64, rel=1e-3)
    assert str(safe.link().token) not in str(found.to_dict())


def test_beside_a_training_it_disturbs_nothing(start_loader: StartLoader) -> None:
    with server_for("slow", epochs=2) as server:
        start_loader(server.link(), "slow", workers=2)
        connected(server, 2)
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(2)]
        found: list[Diagnosis] = []
        visits = [threading.Thread(target=lambda: found.append(look(server.link()))) for _ in range(2)]
        for visit in visits:
            visit.start()
        assert fingerprint(seen + list(batches)) == local("slow")
        for visit in visits:
            visit.join()
        assert [one.ok for one in found] == [True, True], [one.checks[-1] for one in found]
        assert [(one.value("purpose"), one.value("loaders")) for one in found] == [("training", 2)] * 2
        assert server.figures().loaders == 2
        assert server.hub.memory_held <= QUICK.memory
        assert fingerprint(server.source().batches(1)) == local("slow", 1)


def test_a_server_for_doctors_turns_loaders_away(start_loader: StartLoader) -> None:
    with DoctorServer() as server:
        assert "trains nothing; start `dtrain serve`" in start_loader(server.link()).wait()


def test_enough_doctors_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed_training.feed.doctor.session._AT_A_TIME", 0)
    with DoctorServer() as server:
        name, text, fix = fault(server.link())
    assert (name, fix) == ("welcome", "wait until the other doctor is done")
    assert "doctors are here already" in text


def test_a_server_that_goes_away_in_the_middle() -> None:
    with DoctorServer() as server:
        closing = threading.Thread(target=server.close)
        name, text, fix = fault(
            server.link(), seconds=30.0, say=lambda check: closing.start() if check.name == "round trip" else None
        )
        closing.join()
    assert name == "measuring"
    assert "was lost in the middle" in text
    assert "see whether the GPU side still runs" in fix


# -- each fault names its own fix


def test_a_link_that_is_none() -> None:
    name, text, fix = fault("dtrain://192.0.2.1:29500")
    assert name == "link"
    assert "has not a token" in text
    assert "copy the whole link" in fix


def test_a_name_that_is_not_known() -> None:
    name, text, fix = fault(PairingLink("no-such-machine.invalid", 29500, new_token(), "0" * 64))
    assert (name, "no-such-machine.invalid" in text) == ("name", True)
    assert "give the address" in fix


def test_nothing_listens() -> None:
    port = free_port()
    name, text, fix = fault(PairingLink("127.0.0.1", port))
    assert (name, "nothing listens at this port" in text) == ("port", True)
    assert "start the GPU side there" in fix
    assert f"sport = :{port}" in fix


def test_a_machine_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(4):  # nobody accepts: once its queue is full, what comes is dropped as a firewall would
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        name, text, fix = fault(PairingLink("127.0.0.1", full.getsockname()[1]), timeout=0.5)
    assert (name, "no answer within 0.5 s" in text) == ("machine", True)
    assert "firewall" in fix


def test_a_wrong_token(safe: FeedServer) -> None:
    link = safe.link()
    name, text, fix = fault(PairingLink(link.host, link.port, new_token(), link.fingerprint))
    assert (name, "is not that of the run there" in text) == ("token", True)
    assert "take the pairing link" in fix


def test_a_missing_token(safe: FeedServer) -> None:
    link = safe.link()
    name, text, fix = fault(PairingLink(link.host, link.port, None, link.fingerprint))
    assert (name, "needs a token" in text) == ("token", True)
    assert "take the pairing link" in fix


def test_another_certificate(safe: FeedServer) -> None:
    link = safe.link()
    name, text, fix = fault(PairingLink(link.host, link.port, link.token, "0" * 64))
    assert (name, "the link says 0000000000000000" in text) == ("tls", True)
    assert "somebody stands between" in fix


def test_a_link_without_the_certificate(safe: FeedServer) -> None:
    name, text, _ = fault(PairingLink(safe.link().host, safe.port, safe.link().token))
    assert (name, "wants TLS" in text) == ("tls", True)


def test_a_certificate_where_there_is_none() -> None:
    with DoctorServer(token=new_token()) as server:
        name, text, fix = fault(PairingLink("127.0.0.1", server.port, server.link().token, "0" * 64))
    assert (name, "does not speak TLS" in text) == ("tls", True)
    assert "take the pairing link" in fix


@contextmanager
def stranger(says: bytes, *, leaves: bool = False) -> Iterator[int]:
    """The port of a program that is not ours."""
    ended = threading.Event()

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            sock.sendall(says)
            if not leaves:
                ended.wait(20)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listening.getsockname()[1])
        ended.set()
        thread.join()


def test_another_program_has_the_port() -> None:
    with stranger(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        name, text, fix = fault(PairingLink("127.0.0.1", port))
    assert (name, "is no dtrain: its first bytes are b'SSH-2.0-" in text) == ("protocol", True)
    assert "another program has that port" in fix


def test_another_program_that_says_nothing() -> None:
    with stranger(b"") as port:
        name, text, fix = fault(PairingLink("127.0.0.1", port), timeout=0.5)
    assert (name, "does not answer" in text) == ("protocol", True)
    assert "another program has that port" in fix


def test_an_address_that_is_not_allowed() -> None:
    with DoctorServer(allow="192.0.2.7") as server:
        name, text, fix = fault(server.link())
    assert (name, "ended the connection at once" in text) == ("protocol", True)
    assert "cpu_host" in fix
    assert "127.0.0.1" in fix


def test_another_version_of_the_protocol(safe: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._authentication.versions = (7, 9)

    monkeypatch.setattr(feed_session, "Connection", Newer)
    name, text, fix = fault(safe.link())
    assert (name, "speaks protocol versions 7 to 9" in text) == ("protocol", True)
    assert "install the same release" in fix


def test_another_release(safe: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed_training.feed.doctor.session.__version__", "99.0")
    found = look(safe.link())
    (check,) = [check for check in found.checks if check.status == "warning"]
    assert found.ok
    assert (check.name, "99.0 there" in check.text) == ("versions", True)


def test_another_sample_plan(safe: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributed_training.feed.doctor.session.PLAN_VERSION", 99)
    name, text, fix = fault(safe.link())
    assert (name, "and 99 there" in text) == ("versions", True)
    assert "install the same release" in fix


def test_batches_of_a_dataset() -> None:
    dataset = make_dataset("arrays")
    batch = measure_batches(dataset, make_plan(dataset), seconds=0.2)
    assert batch.samples == 16
    assert 16 * (20 * 4 + 8 + 8) <= batch.bytes < 16 * (20 * 4 + 8 + 8) + 3 * 64
    assert batch.seconds > 0
    text, values = batch.estimate(1e6)
    assert values["samples_per_second"] == pytest.approx(1e6 / batch.bytes * 16, rel=1e-3)
    assert "one worker here loads" in text
