"""Tunnels: opened, used, killed and back, closed. The programs behind them are real processes."""

from __future__ import annotations

import importlib.util
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.feed.tunnels.places import ssh_server, stand_in
from tests.launching import need

from distributed_training.feed.tunnels import (
    CloudflaredTunnel,
    GivenAddress,
    NgrokTunnel,
    PublicAddress,
    SshTunnel,
    Tunnel,
    TunnelError,
    TunnelKeeper,
    make_tunnel,
)
from distributed_training.runtime.errors import ConfigError

TOKEN = b"0123456789abcdef01234567"


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers with what it gets, one connection after the other."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            with one:
                while data := one.recv(4096):
                    one.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    yield int(listening.getsockname()[1])
    listening.shutdown(socket.SHUT_RDWR)
    thread.join()
    listening.close()


def passes(address: PublicAddress) -> bool:
    """Whether what is sent to an address comes back."""
    with socket.create_connection((address.host, address.port), 10) as sock:
        sock.sendall(b"there and back")
        return sock.recv(100) == b"there and back"


def agents() -> list[psutil.Process]:
    """The programs that run for this process."""
    return [child for child in psutil.Process().children() if "setpriv" not in child.name()]


Make = Callable[[Path], Tunnel]


def cloudflared(folder: Path) -> Tunnel:
    return CloudflaredTunnel(stand_in(folder, "cloudflared"))


def ngrok(folder: Path, kind: str = "http", authtoken: str | None = "a-secret-of-mine") -> Tunnel:
    program, config_file = stand_in(folder, "ngrok"), str(folder / "ngrok.yml")
    return NgrokTunnel(kind, authtoken=authtoken, program=program, config_file=config_file)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_files_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyngrok puts the agent's config into the home folder."""
    need("pyngrok: pip install -e '.[tunnel]'", importlib.util.find_spec("pyngrok") is not None)
    monkeypatch.setattr("pyngrok.conf.DEFAULT_NGROK_CONFIG_PATH", str(tmp_path / "default.yml"))
    monkeypatch.delenv("NGROK_AUTHTOKEN", raising=False)


@pytest.mark.parametrize("make", [cloudflared, ngrok, lambda folder: ngrok(folder, "tcp")], ids=["cf", "http", "tcp"])
def test_a_killed_tunnel_comes_back_under_another_address(make: Make, echo: int, tmp_path: Path) -> None:
    news: queue.Queue[PublicAddress] = queue.Queue()
    with closing(TunnelKeeper(make(tmp_path), echo, news.put)) as keeper:
        first = keeper.address
        assert passes(first)
        (agent,) = agents()
        os.kill(agent.pid, signal.SIGKILL)
        second = news.get(timeout=30)
        assert second != first
        assert second.raw == first.raw == keeper.tunnel.raw
        assert passes(second)
        (agent,) = agents()
        keeper.watch_from_here()  # ends the thread that has opened it again
        time.sleep(0.2)
        assert agents() == [agent]
        assert passes(second)
    assert agents() == []


def test_ssh_comes_back_at_the_port_that_loaders_know(echo: int, tmp_path: Path) -> None:
    with ssh_server(tmp_path / "keys") as (destination, ssh):
        tunnel = SshTunnel(destination, ssh)
        with closing(TunnelKeeper(tunnel, echo, lambda address: None)) as keeper:
            first = keeper.address
            assert passes(first)
            before = tunnel.pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            _until(lambda: tunnel.pid not in (before, None) and keeper.address == first and _reaches(first))
            assert "GatewayPorts" in tunnel.hint
        with pytest.raises(OSError):
            passes(first)


def _reaches(address: PublicAddress) -> bool:
    try:
        return passes(address)
    except OSError:
        return False


def _until(true: Callable[[], bool]) -> None:
    for _ in range(3000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def test_ssh_says_what_must_work_first(tmp_path: Path) -> None:
    with ssh_server(tmp_path / "keys") as (destination, ssh):
        wrong = ssh.replace(str(tmp_path / "keys" / "user"), str(tmp_path / "keys" / "host"))
        with pytest.raises(TunnelError, match=r"Permission denied .* true` must work without a password"):
            TunnelKeeper(SshTunnel(destination, wrong), 9, lambda address: None)
    with pytest.raises(ConfigError, match="ssh:user@host"):
        SshTunnel("-oProxyCommand=touch x")
    assert agents() == []


def test_a_missing_program_or_account_is_said_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(TunnelError, match=r"no program 'no-such' here.*curl -fsSL -o .*cloudflared-linux-.*chmod \+x"):
        CloudflaredTunnel("no-such").start(9)
    with pytest.raises(TunnelError, match=r"dashboard\.ngrok\.com/get-started/your-authtoken.*NGROK_AUTHTOKEN"):
        TunnelKeeper(ngrok(tmp_path, authtoken=None), 9, lambda address: None)
    assert agents() == []


def test_the_secret_is_never_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(TunnelError, match="authtoken: \\.\\.\\.") as error:
        TunnelKeeper(ngrok(tmp_path, authtoken="bad-secret"), 9, lambda address: None)
    assert "bad-secret" not in str(error.value)
    assert "bad-secret" not in caplog.text


def test_a_program_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    program = tmp_path / "cloudflared"
    program.write_text("#!/bin/sh\necho 'ERR failed to request quick Tunnel: no such host' >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(TunnelError, match="cloudflared ended with code 1: ERR failed to request quick Tunnel"):
        TunnelKeeper(CloudflaredTunnel(str(program)), 9, lambda address: None)


def test_auto_takes_what_is_there_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TunnelError, match=r"neither the program cloudflared nor .* curl .* NGROK_AUTHTOKEN"):
        make_tunnel("auto")
    tunnel, why = make_tunnel("auto", "a-secret")
    assert isinstance(tunnel, NgrokTunnel)
    assert why == "tunnel: ngrok, since NGROK_AUTHTOKEN is set"
    stand_in(tmp_path, "cloudflared")
    tunnel, why = make_tunnel("auto", "a-secret")
    assert isinstance(tunnel, CloudflaredTunnel)
    assert "needs no account" in why


def test_words_for_tunnels() -> None:
    assert isinstance(make_tunnel("ssh:me@host:2222")[0], SshTunnel)
    assert make_tunnel("ngrok:tcp")[0].raw
    assert isinstance(make_tunnel("https://name.example/way")[0], GivenAddress)
    for wrong in ("ngrok:udp", "wireguard", "http://name.example", "ftp://name.example", "tcp://name.example", "ssh:"):
        with pytest.raises(ConfigError):
            make_tunnel(wrong)


def test_links_of_addresses() -> None:
    web = PublicAddress.parse("https://name.example/way").link(TOKEN, "f" * 64)
    assert (web.host, web.port, web.carrier, web.path, web.fingerprint) == ("name.example", 443, "ws", "/way", None)
    raw = PublicAddress.parse("tcp://0.tcp.example:12345").link(TOKEN, "f" * 64)
    assert (raw.port, raw.carrier, raw.fingerprint) == (12345, "tcp", "f" * 64)
    with pytest.raises(ConfigError, match="in the open"):
        PublicAddress.parse("http://name.example")
