"""The `websockets` library, asyncio on both sides, without compression."""

from __future__ import annotations

import asyncio

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS = ["websockets"]


def _send(port: int, case: Case) -> None:
    from websockets.asyncio.server import ServerConnection, serve

    message = case.message()

    async def handle(connection: ServerConnection) -> None:
        while True:
            await connection.send(message)

    async def main() -> None:
        async with serve(handle, "127.0.0.1", port, compression=None, max_size=None, ping_interval=None) as server:
            await server.serve_forever()

    asyncio.run(main())


async def _receive(port: int, case: Case, take: Take) -> None:
    from websockets.asyncio.client import connect

    uri = f"ws://127.0.0.1:{port}"
    while True:
        try:
            connection = await connect(uri, compression=None, max_size=None, ping_interval=None, proxy=None)
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
    while take(*case.tensors(bytearray(await connection.recv(decode=False)))):
        pass
    connection.transport.abort()


def run(case: Case, take: Take) -> None:
    """A message a batch. It is copied once, into memory that a tensor may be made of."""
    port = free_port()
    with process(_send, port, case):
        asyncio.run(_receive(port, case, take))


def _call_and_send(port: int, case: Case) -> None:
    from websockets.asyncio.client import connect

    message = case.message()

    async def main() -> None:
        while True:
            try:
                connection = await connect(
                    f"ws://127.0.0.1:{port}", compression=None, max_size=None, ping_interval=None, proxy=None
                )
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
        while True:
            await connection.send(message)

    asyncio.run(main())


async def _be_called(port: int, case: Case, take: Take) -> None:
    from websockets.asyncio.server import ServerConnection, serve

    done = asyncio.get_running_loop().create_future()

    async def handle(connection: ServerConnection) -> None:
        while take(*case.tensors(bytearray(await connection.recv(decode=False)))):
            pass
        connection.transport.abort()
        done.set_result(None)

    async with serve(handle, "127.0.0.1", port, compression=None, max_size=None, ping_interval=None):
        await done


def run_masked(case: Case, take: Take) -> None:
    """The same from the side that has dialled, which has to mask what it sends."""
    port = free_port()
    with process(_call_and_send, port, case):
        asyncio.run(_be_called(port, case, take))


WAYS = {"websockets": run, "websockets, client sends": run_masked}
