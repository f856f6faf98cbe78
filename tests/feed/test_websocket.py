"""The same frames inside the messages of a WebSocket: what arrives, what is trained, and who is turned away."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.feed.channels import carry
from tests.feed.conftest import StartLoader, connected
from tests.feed.proxy import CuttingProxy
from tests.feed.test_feed import QUICK, fingerprint, local, server_for
from tests.feed.test_security import STRICT, refused
from tests.feed.test_training import local_training, network
from tests.training.examples import assert_same_weights, trainer

from distributed_training.feed import FeedServer, PairingLink
from distributed_training.feed.channel import Channel
from distributed_training.feed.dialling import open_link
from distributed_training.feed.doctor.diagnosis import diagnose
from distributed_training.feed.http_upgrade import GUEST_CALLS, SERVER_CALLS, Head, LostError, RefusedError, refusal
from distributed_training.feed.pairing import new_token
from distributed_training.feed.tls import make_certificate
from distributed_training.feed.websocket import MESSAGE, WebSocket, WebSocketError
from distributed_training.runtime.errors import ConfigError


def web(server: FeedServer) -> PairingLink:
    """The way to a server by WebSocket."""
    link = server.link()
    return PairingLink(link.host, link.port, link.token, link.fingerprint, "ws")


# -- messages


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """A client and a server of one WebSocket whose handshake is done."""
    one, other = socket.socketpair()
    client, server = Channel(one), Channel(other)
    client.wrap(WebSocket(serves=False))
    server.wrap(WebSocket(serves=True))
    yield client, server
    client.close()
    server.close()


@pytest.mark.parametrize("most", [7, 4096, 1 << 21])
@pytest.mark.parametrize("back", [False, True], ids=["masked", "not masked"])
def test_bytes_arrive_as_they_were_sent(ends: tuple[Channel, Channel], back: bool, most: int) -> None:
    sender, receiver = reversed(ends) if back else ends
    numbers = random.Random(most)
    sizes = [1, 3, 125, 126, 65535, 65536, 16384, 16383, 1000, 40] + [numbers.randrange(1, 50_000) for _ in range(20)]
    if most > 7:
        sizes += [MESSAGE, MESSAGE + 1, 3 * MESSAGE + 5, 40]
    pieces = [numbers.randbytes(size) for size in sizes]
    sender.queue([memoryview(piece) for piece in pieces])
    whole = b"".join(pieces)
    assert carry(sender, receiver, len(whole), most) == whole
    assert not sender.pending


def test_no_message_is_longer_than_tunnels_like() -> None:
    for serves in (False, True):
        views = [memoryview(bytes(size)) for size in (5 * MESSAGE, 100, MESSAGE - 50, MESSAGE, 10)]
        websocket, total = WebSocket(serves=serves), 0
        while views:
            for view in websocket.encode(views):
                assert len(view) <= MESSAGE + 14
                total += len(view)
        assert total > 7 * MESSAGE


def test_a_ping_is_answered_and_a_close_is_the_end(ends: tuple[Channel, Channel]) -> None:
    client, server = ends
    server._socket.send(bytes([0x89, 2]) + b"hi")
    client.queue([memoryview(b"data")])
    buffer = memoryview(bytearray(100))
    assert client.receive_into(buffer) is None
    client.flush()
    seen = server._socket.recv(100)
    assert seen[0] == 0x8A
    assert bytes(a ^ b for a, b in zip(seen[6:8], seen[2:6])) == b"hi"
    server.close()
    assert client.receive_into(buffer) == 0


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\x82\x01x", "makes no sense"),  # a client has to mask
        (b"\x81\x81abcdx", "kind 1"),  # text
        (b"\xc2\x81abcdx", "makes no sense"),  # compressed
        (b"\x80\x81abcdx", "kind 0"),  # goes on with nothing
        (b"\x09\x80abcd", "control frame"),  # a ping in parts
        (b"\x89\xfe\x01\x00abcd", "control frame"),  # a long ping
        (b"\x82\xff" + b"\xff" * 8, "makes no sense"),  # a length without end
        (b"\x82\x80abcd" * 101, "without anything in them"),
    ],
)
def test_what_is_no_websocket_is_refused(ends: tuple[Channel, Channel], sent: bytes, said: str) -> None:
    client, server = ends
    client._socket.sendall(sent)
    with pytest.raises(WebSocketError, match=said):
        server.receive_into(memoryview(bytearray(100)))


def test_damaged_messages_are_refused_or_harmless() -> None:
    """Whatever comes, in whatever pieces: bytes, the end, or a WebSocketError, and never a wait without need."""
    numbers = random.Random(7)
    views = [memoryview(numbers.randbytes(size)) for size in (5, 200, 20_000, 70_000)]
    whole, client = b"", WebSocket(serves=False)
    while views:
        whole += b"".join(client.encode(views))
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(numbers.randrange(1, 4)):
            damaged[numbers.choice([numbers.randrange(20), numbers.randrange(len(damaged))])] = numbers.randrange(256)
        left = memoryview(bytes(damaged))

        def read(buffers: list[memoryview]) -> int | None:
            nonlocal left
            total = 0
            for buffer in buffers:
                size = min(len(buffer), len(left), numbers.choice([1, 3, 4000, 100_000]))
                buffer[:size] = left[:size]
                left, total = left[size:], total + size
                if size < len(buffer):
                    break
            return total

        server, buffer, got = WebSocket(serves=True), memoryview(bytearray(8192)), 0
        with contextlib.suppress(WebSocketError):
            while size := server.receive_into(buffer, read):
                got += size
        assert got <= len(whole)


def test_the_websockets_library_understands_us() -> None:
    """Both ways, with its pings, its fragments and its close."""
    from websockets.sync.server import Server, ServerConnection, serve

    def echo(connection: ServerConnection) -> None:
        assert connection.ping().wait(10)
        for message in connection:
            assert isinstance(message, bytes)
            connection.send([message[:10], message[10:]])  # in two fragments

    server: Server = serve(echo, "127.0.0.1", 0, subprotocols=[GUEST_CALLS], compression=None, max_size=None)  # type: ignore[list-item]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        link = PairingLink("127.0.0.1", server.socket.getsockname()[1], carrier="ws")
        channel, _ = open_link(link, 10.0)
        data = random.Random(1).randbytes(3_000_000)
        channel.queue([memoryview(data)])
        assert carry(channel, channel, len(data), 1 << 20) == data
        channel.close()
    finally:
        server.shutdown()
        thread.join(10)


# -- training


def test_a_training_over_websockets_is_that_with_local_data(start_loader: StartLoader) -> None:
    net = network()
    with server_for("arrays", epochs=2, behind_proxy=True, settings=replace(QUICK, per_address=1)) as server:
        loader = start_loader(web(server), workers=3, shared_memory=False)  # all from one address
        trainer(net).train(server.source(), epochs=2)
        assert server.figures().loaders == 3
    assert "exit code 0" in loader.wait()
    assert_same_weights(net, local_training())


def test_large_batches_in_a_websocket_in_tls_of_our_own(start_loader: StartLoader) -> None:
    with server_for("large", token=new_token(), certificate=make_certificate()) as server:
        start_loader(web(server), "large", shared_memory=False)
        assert fingerprint(server.source().batches(0)) == local("large")


def test_websockets_that_are_cut_at_any_byte(start_loader: StartLoader) -> None:
    with server_for("arrays", token=new_token(), epochs=2) as server, CuttingProxy(server.port, 5, 8, 40_000) as proxy:
        link = PairingLink("127.0.0.1", proxy.port, server.link().token, carrier="ws")
        start_loader(link, workers=2, shared_memory=False)
        for epoch in range(2):
            assert fingerprint(server.source().batches(epoch)) == local("arrays", epoch)
        assert proxy.cut >= 4, proxy.positions


# -- strangers


HEAD = (
    "GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    f"Sec-WebSocket-Protocol: {GUEST_CALLS}\r\n"
)
STRANGERS = {
    "GET /favicon.ico HTTP/1.1\r\nHost: x\r\n\r\n": "HTTP/1.1 426",
    HEAD + "Origin: https://elsewhere.example\r\n\r\n": "HTTP/1.1 403",
    HEAD.replace(GUEST_CALLS, "chat") + "\r\n": "HTTP/1.1 400",
    HEAD.replace(GUEST_CALLS, SERVER_CALLS) + "\r\n": "HTTP/1.1 409",
    HEAD + "X: " + "x" * 20_000: "HTTP/1.1 431",
    HEAD + "no field\r\n\r\n": "HTTP/1.1 431",
    "GET " + "\0" * 50: "",  # and then nothing
    HEAD + "\r\n" + "garbage" * 10: "HTTP/1.1 101",
}


def test_strangers_that_speak_http_are_turned_away(start_loader: StartLoader, caplog: pytest.LogCaptureFixture) -> None:
    with server_for("arrays", behind_proxy=True, settings=STRICT, epochs=2) as server:
        start_loader(web(server))
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(5)]
        for said, answer in STRANGERS.items():
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
                heard = b""
                with contextlib.suppress(ConnectionError):
                    sock.sendall(said.encode())
                    while piece := sock.recv(65536):
                        heard += piece
                assert heard.decode("latin-1").startswith(answer), (said, heard)
                assert answer or not heard
        refused(server, len(STRANGERS))
        connected(server, 1)
        assert fingerprint(seen + list(batches)) == local("arrays")
        assert "refused a connection from 127.0.0.1" in caplog.text


def test_behind_a_proxy_a_token_is_needed_and_addresses_mean_nothing(start_loader: StartLoader) -> None:
    with server_for("arrays", behind_proxy=True) as server:
        assert server.link().token is not None
        link = PairingLink("127.0.0.1", server.port, carrier="ws")
        assert "it needs a token" in start_loader(link).wait()
    with pytest.raises(ConfigError, match="on this machine only"):
        server_for("arrays", behind_proxy=True, host="0.0.0.0")
    with pytest.raises(ConfigError, match="all loaders come from this machine"):
        server_for("arrays", behind_proxy=True, allow="192.0.2.7")


# -- what tunnels and proxies answer


@pytest.mark.parametrize(
    ("first", "fields", "kind", "said"),
    [
        ("HTTP/1.1 502 Bad Gateway", {}, LostError, "nothing answers behind it"),
        ("HTTP/1.1 530 ", {}, LostError, "nothing answers behind it"),
        ("HTTP/1.1 404 Not Found", {"ngrok-error-code": "ERR_NGROK_3200"}, LostError, "ERR_NGROK_3200.*has ended"),
        ("HTTP/1.1 429 Too Many Requests", {}, LostError, "too many requests"),
        ("HTTP/1.1 403 Forbidden", {}, RefusedError, "does not let this machine through"),
        ("HTTP/1.1 200 OK", {}, RefusedError, "a page of its own first"),
        ("HTTP/1.1 301 Moved", {"location": "https://there"}, RefusedError, "use that address itself"),
        ("HTTP/1.1 409 Conflict", {}, RefusedError, "dtrain serve --connect"),
        ("SSH-2.0-OpenSSH", {}, RefusedError, "does not speak HTTP"),
    ],
)
def test_an_answer_of_a_tunnel_says_what_to_do(
    first: str, fields: dict[str, str], kind: type[Exception], said: str
) -> None:
    error = refusal(Head(first, fields), "gpu.example:443")
    assert isinstance(error, kind)
    with pytest.raises(kind, match=said):
        raise error


def test_the_doctor_goes_the_same_way() -> None:
    with server_for("arrays", behind_proxy=True) as server:
        found = diagnose(web(server), seconds=0.2)
        assert found.ok, found.checks
        assert "takes WebSockets" in next(check.text for check in found.checks if check.name == "tunnel")
        wrong = diagnose(replace(web(server), token=new_token()), seconds=0.2)
        assert wrong.checks[-1].name == "token"


class ConnectProxy:
    """An HTTP proxy that wants a password and connects everybody to one port of this machine."""

    def __init__(self, target: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port, self._target = self._listening.getsockname()[1], target
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._listening.accept()
                with one:
                    self._connect(one)

    def _connect(self, one: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += one.recv(4096)
        self.asked.append(head.decode())
        if b"Basic bWU6c2VjcmV0" not in head:
            one.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        one.sendall(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
        with socket.create_connection(("127.0.0.1", self._target)) as other:
            back = threading.Thread(target=_pass_on, args=(other, one))
            back.start()
            _pass_on(one, other)
            back.join()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    for end in (one, other):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_through_an_http_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_for("arrays", token=new_token(), certificate=make_certificate()) as server:
        proxy = ConnectProxy(server.port)
        try:
            link = replace(web(server), host="gpu.invalid", port=443)
            monkeypatch.delenv("NO_PROXY", raising=False)
            monkeypatch.delenv("no_proxy", raising=False)
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
            found = diagnose(link, seconds=0.2, timeout=5.0)
            assert found.checks[-1].name == "proxy"
            assert "wants a password" in found.checks[-1].text
            monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{proxy.port}")
            found = diagnose(link, seconds=0.2)
            assert found.ok, found.checks
            assert proxy.asked[-1].startswith("CONNECT gpu.invalid:443 HTTP/1.1\r\nHost: gpu.invalid:443\r\n")
        finally:
            proxy.close()
