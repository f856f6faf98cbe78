"""A proxy that is a long and narrow link: each direction carries so many bytes a second, each byte takes its time.

All connections share the two directions, as they share a cable. A direction is a token bucket: it keeps its rate to
about one per cent, whatever the sizes that come. What cannot be sent yet stays with the sender, but for a small queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

_PIECE = 8 << 10
_QUEUE = 128 << 10  # bytes of a router's queue, for each connection
_BURST = 0.02  # seconds of the rate that may be made up for after a late wake-up


class _Direction:
    """Half of the link."""

    def __init__(self, rate: float, delay: float) -> None:
        self._rate, self._delay = rate, delay
        self._free = 0.0
        self.carried = 0

    async def carry(self, size: int) -> float:
        """Wait until so many bytes are on their way; when they arrive."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._free = max(self._free, now - _BURST) + size / self._rate
        self.carried += size
        arrives = self._free + self._delay
        if self._free > now:
            await asyncio.sleep(self._free - now)
        return arrives


class SlowLink:
    """Passes bytes on to a port of this machine. `rate` in bytes a second, `round_trip` in seconds."""

    def __init__(self, port: int, rate: float = 2.5e6, round_trip: float = 0.1) -> None:
        self._target, self.rate = port, rate
        self.there, self.back = _Direction(rate, round_trip / 2), _Direction(rate, round_trip / 2)
        self._listening = socket.socket()
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _QUEUE)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(64)
        self._listening.setblocking(False)
        self.port = int(self._listening.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)
        self._listening.close()

    def _run(self) -> None:
        self._main = self._loop.create_task(self._accept())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self) -> None:
        tasks = set()
        while True:
            one, _ = await self._loop.sock_accept(self._listening)
            task = self._loop.create_task(self._connection(one))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _connection(self, one: socket.socket) -> None:
        with one, socket.socket() as other:
            other.setblocking(False)
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE)
            ways: list[asyncio.Task[None]] = []
            try:
                await self._loop.sock_connect(other, ("127.0.0.1", self._target))
                for sender, receiver, direction in ((one, other, self.there), (other, one, self.back)):
                    ways.append(self._loop.create_task(self._pump(sender, receiver, direction)))
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            except OSError:
                pass  # the server has gone: the other end sees its connection end, as without a proxy
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, sender: socket.socket, receiver: socket.socket, direction: _Direction) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = self._loop.create_task(self._arrive(receiver, under_way))
        try:
            while not arriving.done():
                data = await self._loop.sock_recv(sender, _PIECE)
                under_way.put_nowait((await direction.carry(len(data)), data))
                if not data:
                    await arriving
        finally:
            arriving.cancel()
            await asyncio.gather(arriving, return_exceptions=True)

    async def _arrive(self, receiver: socket.socket, under_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        while True:
            when, data = await under_way.get()
            await asyncio.sleep(when - self._loop.time())
            if not data:
                return
            await self._loop.sock_sendall(receiver, data)
