"""picows: WebSocket frames from C, asyncio on both sides."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS = ["picows"]


def _send(port: int, case: Case) -> None:
    from picows import WSListener, WSMsgType, WSTransport, WSUpgradeRequest, ws_create_server

    message = case.message()

    class Sender(WSListener):
        paused = False

        def on_ws_connected(self, transport: WSTransport) -> None:
            self.transport = transport
            asyncio.get_running_loop().call_soon(self.send)

        def send(self) -> None:
            while not self.paused:
                self.transport.send(WSMsgType.BINARY, message)
            # on: resume_writing

        def pause_writing(self) -> None:
            self.paused = True

        def resume_writing(self) -> None:
            self.paused = False
            asyncio.get_running_loop().call_soon(self.send)

    async def main() -> None:
        def listen(request: WSUpgradeRequest) -> Sender:
            return Sender()

        server = await ws_create_server(listen, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


async def _receive(port: int, case: Case, take: Take) -> None:
    from picows import WSFrame, WSListener, WSTransport, ws_connect

    done = asyncio.get_running_loop().create_future()

    class Receiver(WSListener):
        def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
            if done.done():
                return
            try:
                memory: Any = bytearray(frame.get_payload_as_memoryview())  # the frame's own is gone after this call
                if not take(*case.tensors(memory)):
                    done.set_result(None)
            except Exception as error:
                done.set_exception(error)

    while True:
        try:
            transport, _ = await ws_connect(
                Receiver, f"ws://127.0.0.1:{port}", max_frame_size=1 << 26, logger_name="feed"
            )
            break
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)
    await done
    transport.disconnect()


def run(case: Case, take: Take) -> None:
    """A frame a batch."""
    port = free_port()
    with process(_send, port, case):
        asyncio.run(_receive(port, case, take))


WAYS = {"picows": run}
