"""Ranks that go wrong in given ways; each prints what it learns: see tests/native/test_backend_trouble.py.

Every case has a group of its own, so that one program can go through several.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.native.ranks.meeting import meet

SECONDS = 2.0
PATIENT = 60.0  # for what is found long before a deadline


def other() -> int:
    """The first rank of the second half, which is a host of its own where there are several; 1 of two ranks."""
    return dist.get_world_size() // 2


def differs() -> bool:
    """Whether this rank is of the half that does something else."""
    return dist.get_rank() >= other()


def another_size(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1001 if dist.get_rank() == 1 else 1000), group=group)


def another_long_size(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(1_000_001 if dist.get_rank() == 1 else 1_000_000), group=group)


def another_type(group: dist.ProcessGroup) -> None:
    dtype = torch.float64 if dist.get_rank() == 1 else torch.float32
    dist.all_reduce(torch.zeros(1000, dtype=dtype), group=group, async_op=True).wait()


def another_operation(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 1:
        dist.all_gather([torch.zeros(10) for _ in range(dist.get_world_size())], torch.zeros(10), group=group)
    else:
        dist.all_reduce(torch.zeros(10), group=group)


def another_piece(group: dist.ProcessGroup) -> None:
    ranks = dist.get_world_size()
    rows = [1] * ranks
    mine = [2 if dist.get_rank() == 1 else 1, *rows[1:]]
    dist.all_to_all_single(torch.zeros(ranks), torch.zeros(sum(mine)), rows, mine, group=group)
    dist.all_reduce(torch.zeros(10), group=group)  # those who noticed nothing hear of it here


def another_host(group: dist.ProcessGroup) -> None:
    """Hosts that go different ways: each waits for what the other does not send."""
    if differs():
        dist.all_gather([torch.zeros(10) for _ in range(dist.get_world_size())], torch.zeros(10), group=group)
    else:
        dist.all_reduce(torch.zeros(10), group=group)


def another_way(group: dist.ProcessGroup) -> None:
    """A call that would end without an answer, beside one that needs it."""
    if dist.get_rank() == 1:
        dist.gather(torch.zeros(10), None, 0, group=group)
    dist.all_reduce(torch.zeros(10), group=group)


def another_root(group: dist.ProcessGroup) -> None:
    root = other() if differs() else 0
    into = [torch.zeros(10) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.gather(torch.zeros(10), into, root, group=group)
    dist.all_reduce(torch.zeros(10), group=group)  # those who were done hear of it here


def two_roots(group: dist.ProcessGroup) -> None:
    dist.broadcast(torch.zeros(10), other() if differs() else 0, group=group)
    dist.all_reduce(torch.zeros(10), group=group)  # two who both gave hear of it here


def does_not_come(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 1:
        time.sleep(SECONDS + 2)
    dist.all_reduce(torch.zeros(10), group=group)


def nobody_sends(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(10), 1, group=group)
    time.sleep(SECONDS + 2)
    dist.all_reduce(torch.zeros(10), group=group)


def gives_up(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 1:
        group._get_backend(torch.device("cpu")).abort()
    dist.all_reduce(torch.zeros(10), group=group)


def dies(group: dist.ProcessGroup) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(100_000), group=group)


def hangs(group: dist.ProcessGroup, who: int = 1) -> None:
    """A process that stands still, as one on a machine that is out of memory may."""
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.zeros(100_000), group=group, async_op=True).get_future().wait()


def the_second_host_hangs(group: dist.ProcessGroup) -> None:
    hangs(group, who=2)


def learn(case: str, which: str, operation: Callable[[dist.ProcessGroup], None], group: dist.ProcessGroup) -> None:
    """Say what an operation ends with."""
    try:
        operation(group)
    except (RuntimeError, ValueError) as error:
        said = f"RANK {dist.get_rank()} {case} {which} {type(error).__name__}: {error}"
        sys.stdout.write(said.replace("\n", " ") + "\n")
        sys.stdout.flush()


def main() -> None:
    meet()
    for case in sys.argv[1:]:
        patient = case.startswith(("another_", "two_"))
        group = dist.new_group(timeout=timedelta(seconds=PATIENT if patient else SECONDS))
        learn(case, "first", globals()[case], group)
        learn(case, "second", lambda group: dist.all_reduce(torch.zeros(10), group=group), group)
    # The others may still be learning of it; mpirun ends all as soon as one leaves like this.
    time.sleep(SECONDS)
    os._exit(3)


if __name__ == "__main__":
    main()
