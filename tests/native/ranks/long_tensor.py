"""More than 2^31 elements from one rank to the others, and summed: see tests/native/test_backend.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.native.ranks.meeting import meet

meet(300)
size = 2**31 + 3
value = torch.zeros(size, dtype=torch.uint8)
if dist.get_rank() == 0:
    value[:: 2**20] = 7
    value[-3:] = 9
dist.broadcast(value, 0)
assert [int(value[i]) for i in (1, 5 * 2**20, 2**31, size - 1)] == [0, 7, 9, 9]
if dist.get_rank() == 0:
    dist.send(value, 1)
else:
    value.zero_()
    dist.recv(value, 0)
assert [int(value[i]) for i in (3, 2**30, 2**31, size - 1)] == [0, 7, 9, 9]
dist.all_reduce(value)
assert [int(value[i]) for i in (2**30, 2**31 - 1, size - 1)] == [14, 0, 18]
dist.barrier()
