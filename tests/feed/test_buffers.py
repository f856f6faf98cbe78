"""Memory is used again, but never while somebody looks at it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distributed_training.feed.buffers import BufferPool, block_size
from distributed_training.feed.tensors import as_tensor
from distributed_training.wire.dtypes import BY_NAME
from distributed_training.wire.tensors import Origin


def address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_tensor_is_gone() -> None:
    pool = BufferPool(1 << 20)
    memory = pool.allocate(100_000)
    where = address(memory)
    tensor = torch.frombuffer(memory[64:128], dtype=torch.float32)
    del memory
    other = pool.allocate(100_000)
    assert address(other) != where
    view = tensor[3:5]
    del tensor
    third = pool.allocate(100_000)
    assert address(third) != where
    del view
    assert address(pool.allocate(99_000)) == where
    del other, third
    assert pool.used_bytes == 0
    assert pool.free_bytes == 3 * block_size(100_000)


@pytest.mark.parametrize(
    "look",
    [
        lambda memory: memory[64:128],
        lambda memory: np.ndarray((4, 4), np.float32, memory[64:128]),
        lambda memory: np.ndarray((4, 4), np.float32, memory[64:128])[1:, 2].T,
        lambda memory: np.frombuffer(memory, np.uint8)[7:9],
        lambda memory: np.asarray(memory)[7:9],
        lambda memory: torch.from_numpy(np.ndarray((4, 4), np.float32, memory[64:128])),
        lambda memory: torch.from_numpy(np.ndarray((4, 4), np.float32, memory[64:128]))[2].view(-1),
        lambda memory: torch.frombuffer(memory, dtype=torch.int16)[5:6],
        lambda memory: as_tensor(BY_NAME["float32"], (4, 4), memory[64:128], Origin.TENSOR)[1],
        lambda memory: as_tensor(BY_NAME["bfloat16"], (4, 8), memory[64:128], Origin.TENSOR)[1],
        lambda memory: as_tensor(BY_NAME["float32"], (4, 4), memory[64:128], Origin.ARRAY)[1:],
    ],
)
def test_whatever_looks_at_memory_keeps_it(look: Callable[[memoryview], Any]) -> None:
    pool = BufferPool(1 << 20)
    seen = look(pool.allocate(100_000))
    gc.collect()
    assert pool.used_bytes > 0
    del seen
    gc.collect()
    assert pool.used_bytes == 0


def test_no_more_is_kept_than_allowed() -> None:
    pool = BufferPool(block_size(50_000))
    blocks = [pool.allocate(50_000) for _ in range(4)]
    blocks.clear()
    assert pool.free_bytes == block_size(50_000)
    pool.close()
    assert pool.free_bytes == 0


@pytest.mark.parametrize("size", [1, 63, 16 << 10, (16 << 10) + 1, 99_999, 1 << 20, (1 << 20) + 1, 9_600_512])
def test_blocks_are_aligned_and_hardly_larger_than_needed(size: int) -> None:
    memory = BufferPool(0).allocate(size)
    assert len(memory) == size
    assert address(memory) % 64 == 0
    assert size <= block_size(size) <= max(16 << 10, size * 9 // 8 + 2048)
