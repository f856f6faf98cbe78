"""ZeroMQ: PUSH and PULL over TCP, without copies in Python on either side."""

from __future__ import annotations

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS = ["zmq"]


def _send(port: int, case: Case) -> None:
    import zmq

    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(64)
    socket.bind(f"tcp://127.0.0.1:{port}")
    message = case.message()
    while True:
        socket.send(message, copy=False)


def run(case: Case, take: Take) -> None:
    """A message a batch; its memory is the tensors'."""
    import zmq

    port = free_port()
    with process(_send, port, case):
        socket = zmq.Context().socket(zmq.PULL)
        socket.set_hwm(64)
        socket.connect(f"tcp://127.0.0.1:{port}")
        while take(*case.tensors(socket.recv(copy=False).buffer)):
            pass
        socket.close(0)


WAYS = {"pyzmq": run}
