"""A rank that goes wrong in a given way; every rank prints what it learns: see tests/native/test_backend.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.native.ranks.meeting import meet

SECONDS = 4.0
WHO = int(sys.argv[2]) if len(sys.argv) > 2 else 1


def another_size() -> None:
    dist.all_reduce(torch.zeros(1001 if dist.get_rank() == 1 else 1000))


def another_long_size() -> None:
    dist.all_reduce(torch.zeros(1_000_001 if dist.get_rank() == 1 else 1_000_000))


def another_type() -> None:
    dist.all_reduce(
        torch.zeros(1000, dtype=torch.float64 if dist.get_rank() == 1 else torch.float32), async_op=True
    ).wait()


def another_operation() -> None:
    if dist.get_rank() == 1:
        dist.all_gather([torch.zeros(10) for _ in range(dist.get_world_size())], torch.zeros(10))
    else:
        dist.all_reduce(torch.zeros(10))


def pieces_that_differ() -> None:
    ranks = dist.get_world_size()
    rows = [1] * ranks
    mine = [2 if dist.get_rank() == 1 else 1, *rows[1:]]
    dist.all_to_all_single(torch.zeros(ranks), torch.zeros(sum(mine)), rows, mine)
    dist.all_reduce(torch.zeros(10))  # those who noticed nothing hear of it here


def dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(100_000))


def hangs() -> None:
    """A process that stands still, as one on a machine that is out of memory may."""
    if dist.get_rank() == WHO:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.zeros(100_000), async_op=True).get_future().wait()


def does_not_come() -> None:
    if dist.get_rank() == 1:
        time.sleep(SECONDS + 6)
        return
    dist.all_reduce(torch.zeros(10))


def nobody_sends() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(10), 1)
    else:
        time.sleep(SECONDS + 4)


def gives_up() -> None:
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
        time.sleep(2)
    dist.all_reduce(torch.zeros(10))


def main() -> None:
    meet(60.0)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    dist.barrier()
    backend._set_default_timeout(timedelta(seconds=SECONDS))
    rank = dist.get_rank()
    for attempt in ("first", "second"):
        begin = time.monotonic()
        try:
            globals()[sys.argv[1]]() if attempt == "first" else dist.all_reduce(torch.zeros(10))
        except (RuntimeError, ValueError) as error:
            took = time.monotonic() - begin
            said = f"RANK {rank} {attempt} {type(error).__name__} after {took:.1f} s: {error}"
            sys.stdout.write(said.replace("\n", " ") + "\n")
            sys.stdout.flush()
    # The others may still be learning of it; mpirun ends all as soon as one leaves like this.
    time.sleep(3)
    os._exit(3)


if __name__ == "__main__":
    main()
