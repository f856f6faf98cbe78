"""torch's RPC (TensorPipe): the receiver calls for batches, several calls at a time.

By itself it uses shared memory on one machine; the second way is the one between machines.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any

import torch

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS: list[str] = []
_CALLS = 8
_batch: tuple[torch.Tensor, ...] = ()


def _join(name: str, rank: int, port: int, how: dict[str, Any]) -> Any:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4, **how)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    return rpc


def _next_batch() -> tuple[torch.Tensor, ...]:
    return _batch


def _send(port: int, case: Case, how: dict[str, Any]) -> None:
    global _batch
    _batch = tuple([torch.from_numpy(part) for part in case.batch()])
    _join("sender", 1, port, how)
    time.sleep(3600)


def run(case: Case, take: Take, **how: Any) -> None:
    """A call a batch."""
    port = free_port()
    with process(_send, port, case, how):
        rpc = _join("receiver", 0, port, how)
        calls = deque([rpc.rpc_async("sender", _next_batch) for _ in range(_CALLS)])
        while True:
            calls.append(rpc.rpc_async("sender", _next_batch))
            if not take(*calls.popleft().wait()):
                break
        rpc.shutdown(graceful=False)


WAYS = {
    "torch RPC, shared memory": run,
    "torch RPC, TCP": functools.partial(run, _transports=["uv"], _channels=["basic"]),
}
