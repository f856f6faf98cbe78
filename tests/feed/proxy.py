"""A proxy that cuts connections after a random number of bytes."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import threading


class CuttingProxy:
    """Passes bytes on between a loader and a server; the first `cuts` connections are cut at a random byte."""

    def __init__(self, port: int, seed: int, cuts: int, longest: int) -> None:
        self._random, self._cuts, self._longest = random.Random(seed), cuts, longest
        self._target = port
        self.cut = 0
        self.positions: list[int] = []
        """Bytes that had passed when a connection was cut."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0.1)
        self.port = int(self._listening.getsockname()[1])
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in [self._accepting, *self._threads]:
            thread.join(10)
        self._listening.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                one, _ = self._listening.accept()
            except TimeoutError:
                continue
            limit = self._position() if self.cut < self._cuts else None
            thread = threading.Thread(target=self._pass_on, args=(one, limit))
            self._threads.append(thread)
            thread.start()

    def _position(self) -> int:
        """As often early, where the handshake is, as anywhere."""
        even = self._random.random() < 0.5
        return self._random.randrange(1, self._longest) if even else int(self._longest ** self._random.random())

    def _pass_on(self, one: socket.socket, limit: int | None) -> None:
        passed = 0
        with one, contextlib.ExitStack() as both:
            try:
                other = both.enter_context(socket.create_connection(("127.0.0.1", self._target), 10))
            except OSError:
                return  # the server has gone: the loader sees its connection end, as without a proxy
            while not self._ended.is_set():
                ready, _, _ = select.select([one, other], [], [], 0.1)
                for end in ready:
                    most = 65536 if limit is None else min(65536, limit - passed)
                    try:
                        data = end.recv(most)
                        (other if end is one else one).sendall(data)
                    except OSError:
                        return
                    passed += len(data)
                    if passed == limit:
                        self.cut += 1
                        self.positions.append(passed)
                    if not data or passed == limit:
                        return
