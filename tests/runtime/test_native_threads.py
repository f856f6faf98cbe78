"""Threads of Gloo that still hold something of Python's when the process ends."""

from __future__ import annotations

import subprocess
import sys

from tests.launching import environment

ENDS_WHILE_A_THREAD_LETS_GO = """
import sys, time

import torch
import torch.distributed as dist
from distributed_training.runtime.group import Group
from distributed_training.runtime.world import World

group = Group(World(), torch.device("cpu"), 20.0)
sys.setswitchinterval(1000)  # other threads get Python's lock only where this one gives it away
held = torch.ones(1_000_000)
work = dist.all_reduce(held, async_op=True)
del held, work  # Gloo's thread is now the last that knows of the tensor
end = time.monotonic() + 0.3
while time.monotonic() < end:
    pass
print("all done", flush=True)
"""


def test_a_process_that_is_done_ends_well() -> None:
    command = [sys.executable, "-c", ENDS_WHILE_A_THREAD_LETS_GO]

    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)

    assert (done.returncode, done.stdout, done.stderr) == (0, "all done\n", "")
