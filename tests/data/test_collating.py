"""Samples put together: as torch does it, step by step, and before the next sample is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import assert_equal
from tests.feed.datasets import UsesMemoryAgain
from torch.utils.data import DataLoader, default_collate

from distributed_training.data import Loader, Plan, as_dataset
from distributed_training.data.base import Share
from distributed_training.data.collating import BlockOfSteps, collate_samples, loose_samples
from distributed_training.data.nested import split_sizes, tensors_in
from distributed_training.data.placing import ORDINARY, Memory
from distributed_training.data.steps import read_blocks, read_steps

CLIPS = torch.randn(9, 1, 4, 5, 3).permute(0, 1, 4, 2, 3)  # channels last
USUAL: dict[str, Callable[[int], Any]] = {
    "tensor and number": lambda at: (torch.full((3,), at), at),
    "a dict of all kinds": lambda at: {"x": torch.rand(2, 2), "n": at, "f": at / 3, "b": at % 2 == 0},
    "arrays": lambda at: (np.full((2, 3), at, np.int16), np.float32(at), np.int64(at)),
    "numbers without a shape": lambda at: (torch.tensor(at), np.array(at, np.uint8)),
    "half precision": lambda at: (torch.full((7,), at, dtype=torch.bfloat16),),
    "nothing in them": lambda at: (torch.zeros(0, 3), at),
}


def block_of(make: Callable[[int], Any], sizes: list[int], memory: Memory = ORDINARY) -> Any:
    block, at = BlockOfSteps(sum(sizes), memory), 0
    for size in sizes:
        block.put(at, [make(row) for row in range(at, at + size)])
        at += size
    return block.batch()


@pytest.mark.parametrize("kind", USUAL)
def test_cut_into_steps_a_block_is_what_torch_makes_of_each(kind: str) -> None:
    made = [USUAL[kind](at) for at in range(9)]
    for sizes in ([9], [4, 4, 1], [1] * 9):
        found = block_of(made.__getitem__, sizes)
        assert type(found) is type(default_collate(made))
        for begin, size, part in zip(np.cumsum([0, *sizes]), sizes, split_sizes(found, sizes)):
            expected = default_collate(made[begin : begin + size])
            assert_equal(part, expected)
            assert [t.dtype for t in tensors_in(part)] == [t.dtype for t in tensors_in(expected)]


def test_torchs_order_of_elements_is_kept_unless_it_is_not_wanted() -> None:
    def clip(at: int) -> Any:
        return CLIPS[at], at

    found, plain = block_of(clip, [4, 5]), block_of(clip, [4, 5], ORDINARY._replace(plain=True))
    assert_equal(found, plain)
    assert found[0][:4].stride() == torch.stack(list(CLIPS[:4])).stride() != plain[0][:4].stride()
    assert plain[0].is_contiguous()
    mixed = block_of(lambda at: (CLIPS[at].contiguous() if at == 7 else CLIPS[at],), [4, 5])
    assert mixed is None, "torch alone knows what that becomes"


class _Own(torch.Tensor):
    """A kind of tensor of somebody else's."""


ODD: dict[str, Callable[[int], Any]] = {
    "another shape": lambda at: (torch.zeros(2 + (at == 5)), 1),
    "another shape from one step on": lambda at: (torch.zeros(2 + (at >= 4)), 1),
    "another type": lambda at: (torch.zeros(2, dtype=torch.float64 if at == 5 else torch.float32), 1),
    "another type from one step on": lambda at: (torch.zeros(2, dtype=torch.float64 if at >= 4 else torch.float32), 1),
    "a number that is no integer": lambda at: (torch.zeros(2), 1.5 if at == 6 else 1),
    "a truth value among numbers": lambda at: (torch.zeros(2), True if at == 6 else 1),
    "a larger integer of NumPy's": lambda at: (np.int64(1) if at >= 4 else np.int32(1),),
    "a number that is too large": lambda at: (torch.zeros(2), 2**70 if at == 8 else 1),
    "a text": lambda at: (torch.zeros(2), "a"),
    "no tensor": lambda at: ("a" if at == 5 else torch.zeros(2),),
    "fewer values": lambda at: (torch.zeros(2), 1)[: 1 + (at != 5)],
    "more values": lambda at: (torch.zeros(2), 1, 2)[: 2 + (at >= 4)],
    "another key from one step on": lambda at: {"x": 1} if at < 4 else {"y": 1},
    "one more key from one step on": lambda at: {"x": 1} if at < 4 else {"x": 1, "y": 1},
    "a dict from one step on": lambda at: (1, 2) if at < 4 else {"x": 1, "y": 2},
    "another key": lambda at: {"x": 1} if at != 5 else {"y": 1},
    "a list": lambda at: [torch.zeros(2), 1],
    "a gradient": lambda at: (torch.zeros(2, requires_grad=True),),
    "a kind of tensor": lambda at: (torch.zeros(2).as_subclass(_Own),),
    "one of a kind of tensor": lambda at: (torch.zeros(2).as_subclass(_Own) if at == 5 else torch.zeros(2),),
    "sparse": lambda at: (torch.eye(2).to_sparse(),),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_only_torch_can_put_together_is_left_to_it(kind: str) -> None:
    make = ODD[kind]
    assert block_of(make, [4, 5]) is None
    block = BlockOfSteps(9, ORDINARY)
    block.put(0, [make(at) for at in range(4)])
    block.put(4, [make(at) for at in range(4, 9)])
    assert block.batch() is None


def test_keys_say_what_a_value_is_and_not_their_order() -> None:
    def turned(at: int) -> dict[str, int]:
        return {"x": at, "y": -at} if at < 4 else {"y": -at, "x": at}

    assert_equal(block_of(turned, [4, 5]), {"x": torch.arange(9), "y": -torch.arange(9)})
    block = BlockOfSteps(2, ORDINARY)
    block.put(0, [turned(0)])
    block.put(0, [turned(7)])  # anew
    block.put(1, [turned(1)])
    assert_equal(block.batch(), {"x": torch.tensor([7, 1]), "y": torch.tensor([-7, -1])})


def test_it_can_be_begun_anew() -> None:
    block = BlockOfSteps(4, ORDINARY)
    block.put(0, [(torch.zeros(2), 1), (torch.zeros(2), 2)])
    block.put(2, [(torch.zeros(3), 3), (torch.zeros(2), 4)])
    assert block.batch() is None
    block.put(0, [(torch.ones(2), 5), (torch.ones(2), 6)])
    block.put(2, [(torch.ones(2), 7), (torch.ones(2), 8)])
    assert_equal(block.batch(), [torch.ones(4, 2), torch.tensor([5, 6, 7, 8])])


def test_one_kind_of_tensor_among_others_is_put_together_as_torch_does() -> None:
    rows = [(torch.zeros(2), 1), (torch.ones(2).as_subclass(_Own), 2)]
    ours, theirs = collate_samples(rows), default_collate(rows)
    assert type(ours[0]) is type(theirs[0])
    assert_equal([ours[0].as_subclass(torch.Tensor)], [theirs[0].as_subclass(torch.Tensor)])


@pytest.mark.parametrize("rows", [[(torch.zeros(2), "a")], [[torch.zeros(2)]], [torch.zeros(2)], ["a"]])
def test_only_the_usual_kinds_are_left_loose(rows: list[Any]) -> None:
    assert loose_samples(rows) is None
    assert loose_samples([(torch.zeros(2),), (torch.zeros(2, dtype=torch.float64),)]) is None


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("room", "size"), [(1, 1), (16, 16), (64, 16), (48, 16), (100, 16)])
def test_a_dataset_may_use_its_memory_again_after_a_batch(room: int, size: int, shuffle: bool) -> None:
    plan = Plan(600, size, 0, shuffle=shuffle)
    for gathered in (True, False):
        dataset = as_dataset(UsesMemoryAgain(room=room))
        for block in read_blocks(dataset, plan, Share(), 0, 0, plan.steps_per_epoch, gathered=gathered):
            data = block.data if gathered or len(block.steps) > 1 else dataset.fetch(block.own[0])
            assert data[1].tolist() == np.concatenate(block.own).tolist()
            assert torch.equal(data[0], data[1][:, None].expand(-1, 300).float())
            assert torch.equal(data[2], -data[1][:, None].expand(-1, 5))
    steps = list(read_steps(as_dataset(UsesMemoryAgain(room=room)), plan, Share(), 0, 0, plan.steps_per_epoch))
    theirs = DataLoader(UsesMemoryAgain(room=room), size, sampler=plan.span(0, 0, plan.steps_per_epoch))  # type: ignore[arg-type]
    for (_, batch), expected in zip(steps, theirs, strict=True):
        assert_equal(batch.data, expected)


def test_so_it_may_in_loader_processes() -> None:
    plan = Plan(600, 16, 0)
    loader = Loader(as_dataset(UsesMemoryAgain()), plan, num_workers=2)
    for _, batch in loader.batches(0):
        assert batch.data[1].tolist() == batch.ids.tolist()
        assert torch.equal(batch.data[0], batch.data[1][:, None].expand(-1, 300).float())
    loader.close()
