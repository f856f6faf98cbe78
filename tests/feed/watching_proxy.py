"""A proxy that looks at what goes one way between the GPU side and a loader: counts it, cuts it off, or damages it."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress


class WatchingProxy:
    """Passes bytes on. All counts are of what went to loaders, or to the server."""

    def __init__(
        self, port: int, *, to_server: bool = False, cuts: tuple[int, ...] = (), damage: bytes = b"", times: int = 1
    ) -> None:
        """
        Args:
            port: of the server.
            to_server: what goes to the server is looked at; else what goes to loaders.
            cuts: the connection is cut whenever so many bytes have passed in all.
            damage: where these bytes pass, their last one is changed.
            times: how often.
        """
        self._target, self._to_server, self._cuts = port, to_server, list(cuts)
        self._damage, self._times = damage, times
        self.passed = self.cut = self.damaged = 0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.1)
        self.port = int(self._listening.getsockname()[1])
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> WatchingProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(10)
        self._listening.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            with suppress(TimeoutError):
                one, _ = self._listening.accept()
                self._threads.append(threading.Thread(target=self._pass_on, args=(one,)))
                self._threads[-1].start()

    def _pass_on(self, loader: socket.socket) -> None:
        with loader, suppress(OSError), socket.create_connection(("127.0.0.1", self._target), 10) as server:
            while not self._ended.is_set():
                for end in select.select([loader, server], [], [], 0.1)[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    other = server if end is loader else loader
                    if (other is server) is not self._to_server:
                        other.sendall(data)
                    elif not self._watched(other, data):
                        return

    def _watched(self, other: socket.socket, data: bytes) -> bool:
        """Whether the connection goes on."""
        with self._lock:
            self.passed += len(data)
            at = data.find(self._damage) if self._damage and self.damaged < self._times else -1
            if at >= 0:
                end = at + len(self._damage) - 1
                data = data[:end] + bytes([data[end] ^ 1]) + data[end + 1 :]
                self.damaged += 1
            over = bool(self._cuts) and self.passed >= self._cuts[0]
            if over:
                self._cuts.pop(0)
                self.cut += 1
        if not over:
            other.sendall(data)
        return not over
