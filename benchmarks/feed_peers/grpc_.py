"""gRPC: one stream from a server, messages as bytes without protobuf."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS = ["grpc"]
_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _send(port: int, case: Case) -> None:
    import grpc

    message = case.message()

    def batches(request: bytes, context: Any) -> Iterator[bytes]:
        while True:
            yield message

    handler = grpc.method_handlers_generic_handler("feed", {"batches": grpc.unary_stream_rpc_method_handler(batches)})
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler], options=_LIMITS)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    time.sleep(3600)


def run(case: Case, take: Take) -> None:
    """A message a batch; its bytes are the tensors'."""
    port = free_port()
    with process(_send, port, case):
        import grpc

        channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_LIMITS)
        stream = channel.unary_stream("/feed/batches")(b"", wait_for_ready=True)
        for message in stream:
            if not take(*case.tensors(message)):
                break
        stream.cancel()
        channel.close()


WAYS = {"gRPC": run}
