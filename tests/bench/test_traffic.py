"""Bytes on the wire and the formulas beside them."""

from __future__ import annotations

import socket

import pytest

from distributed_training.bench import formulas, traffic
from distributed_training.config import StrategyConfig


def test_bytes_are_those_that_a_connection_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        into, _ = server.accept()
        with into:
            out.sendall(b"x" * 5000)
            received = 0
            while received < 5000:
                received += len(into.recv(65536))
            before = traffic.sent_bytes()
            out.sendall(b"y" * 100_000)
            received = 0
            while received < 100_000:
                received += len(into.recv(65536))
            into.sendall(b"z")  # carries the last acknowledgement
            out.recv(1)
            sent = traffic.difference(before, traffic.sent_bytes())
    assert 100_000 <= sent <= 100_001


@pytest.mark.parametrize(
    ("settings", "memory", "wire"),
    [
        ({"name": "single"}, 16, 0.0),
        ({"name": "ddp"}, 16, 6.0),
        ({"name": "ddp", "compression": "fp16"}, 16, 3.0),
        ({"name": "zero1"}, 10, 9.0),
        ({"name": "zero2"}, 7, 6.0),
        ({"name": "zero3"}, 4, 9.0),
        ({"name": "deepspeed"}, 7, 6.0),
        ({"name": "deepspeed", "zero_stage": 3}, 4, 9.0),
        ({"name": "accelerate"}, 16, 6.0),
        ({"name": "accelerate", "plugin": "fsdp"}, 4, 9.0),
    ],
)
def test_the_formulas_are_those_of_the_documentation(settings: dict, memory: float, wire: float) -> None:
    strategy, parameters, ranks = StrategyConfig(**settings), 1000, 4
    alone = strategy.name == "single"
    assert formulas.state_bytes(strategy, 4 * parameters, 8 * parameters, 1 if alone else ranks) == memory * parameters
    assert formulas.wire_bytes(strategy, 4 * parameters, ranks) == wire * parameters
