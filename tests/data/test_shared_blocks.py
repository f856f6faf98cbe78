"""Batches in shared memory that is used again: what arrives is what was sent, and nobody sees it overwritten."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.contract.dataset import assert_equal

from distributed_training.data import ArrayDataset, Loader, Plan, as_dataset
from distributed_training.data.base import LooseRows, StoredRows
from distributed_training.data.shared_blocks import _MOST_BLOCKS, BlockReceiver, BlockSender, _Packed

NUMBERS = torch.arange(40, dtype=torch.float32).view(10, 4)


class Pair(NamedTuple):
    x: Any
    y: Any


@pytest.fixture
def receiver() -> Iterator[BlockReceiver]:
    found = BlockReceiver()
    yield found
    found.close()


@pytest.fixture
def sender(receiver: BlockReceiver) -> BlockSender:
    return BlockSender(receiver.number)


def arrived(sent: Any) -> Any:
    """What the other side makes of it: both are this process here, so nothing else has to travel."""
    if not isinstance(sent, _Packed):
        return sent
    function, arguments = sent.__reduce__()
    return function(*arguments)


def number(sent: Any) -> int:
    assert isinstance(sent, _Packed)
    return sent.number


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2])),
        ((NUMBERS, torch.tensor(7)), (NUMBERS, torch.tensor(7))),
        ([NUMBERS.bfloat16(), NUMBERS > 3], [NUMBERS.bfloat16(), NUMBERS > 3]),
        (StoredRows(NUMBERS, np.array([3, 0, 3])), NUMBERS[[3, 0, 3]]),
        (
            {"x": StoredRows(NUMBERS.t(), np.array([1])), "n": [torch.ones(3)], "text": ["a", "b"]},
            {"x": NUMBERS.t()[[1]], "n": [torch.ones(3)], "text": ["a", "b"]},
        ),
        (StoredRows(torch.arange(5).to(torch.uint16), np.array([4, 1])), torch.tensor([4, 1], dtype=torch.uint16)),
        ([LooseRows((NUMBERS[1], NUMBERS[0])), torch.arange(2)], [NUMBERS[[1, 0]], torch.arange(2)]),
        (Pair(NUMBERS, torch.arange(3, dtype=torch.int8)), Pair(NUMBERS, torch.arange(3, dtype=torch.int8))),
    ],
)
def test_what_arrives_is_what_was_sent(sender: BlockSender, receiver: BlockReceiver, data: Any, expected: Any) -> None:
    for _ in range(3):
        sent = sender.pack(data)
        assert number(sent) == 0, "always in the same block, as nobody keeps what came before"
        found = arrived(sent)
        assert type(found) is type(expected)
        assert_equal(found, expected)
        del found


@pytest.mark.parametrize(
    "keep",
    [lambda data: data[0], lambda data: data[1], lambda data: data[0][2:, 1], lambda data: data[0].numpy()[1:]],
    ids=["a tensor", "another", "a view", "an array"],
)
def test_a_block_is_used_again_when_the_last_who_looks_at_it_is_gone(
    sender: BlockSender, receiver: BlockReceiver, keep: Any
) -> None:
    found = arrived(sender.pack((NUMBERS, torch.arange(3))))
    kept, before = keep(found), torch.as_tensor(keep(found)).clone()
    del found
    other = sender.pack((NUMBERS * 2, torch.arange(3) * 2))
    assert number(other) == 1
    assert torch.equal(torch.as_tensor(kept), before)
    del kept
    assert number(sender.pack((NUMBERS, torch.arange(3)))) == 0


def test_one_that_is_thrown_away_unseen_gives_back_its_block(sender: BlockSender, receiver: BlockReceiver) -> None:
    sent = [sender.pack(NUMBERS) for _ in range(3)]
    assert [number(one) for one in sent] == [0, 1, 2]
    for one in sent:
        arrived(one)
    assert number(sender.pack(NUMBERS)) == 0


def test_with_all_blocks_in_use_batches_go_the_usual_way(sender: BlockSender, receiver: BlockReceiver) -> None:
    kept = [arrived(sender.pack(NUMBERS + at)) for at in range(_MOST_BLOCKS)]
    more = sender.pack([StoredRows(NUMBERS, np.array([1])), LooseRows((NUMBERS[0],))])
    assert_equal(more, [NUMBERS[[1]], NUMBERS[[0]]])
    assert_equal(kept, [NUMBERS + at for at in range(_MOST_BLOCKS)])
    del kept[3]
    assert number(sender.pack(NUMBERS)) == 3


def test_larger_batches_take_the_place_of_smaller_ones(sender: BlockSender, receiver: BlockReceiver) -> None:
    for size in range(1, 2 * _MOST_BLOCKS):
        rows = torch.full((size, 3000), float(size))
        assert_equal(arrived(sender.pack(rows)), rows)
        small = arrived(sender.pack(NUMBERS))
        assert_equal(small, NUMBERS)
    assert len(receiver._blocks) == len(sender._blocks) <= _MOST_BLOCKS


def test_batches_outlive_the_receiver(sender: BlockSender, receiver: BlockReceiver) -> None:
    kept, late = arrived(sender.pack(NUMBERS)), sender.pack(NUMBERS)
    receiver.close()
    assert arrived(late) is None, "nobody waits for it any more"
    gc.collect()
    assert torch.equal(kept, NUMBERS)


@pytest.mark.parametrize(
    "data",
    [
        NUMBERS.t(),
        torch.zeros(2, 0),
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        "no tensor at all",
        LooseRows((NUMBERS.t(), NUMBERS.t())),
        StoredRows(torch.zeros((3, 2, 2), dtype=torch.uint16).transpose(1, 2), np.array([0, 1])),
    ],
)
def test_what_would_change_in_a_block_goes_the_usual_way(sender: BlockSender, data: Any) -> None:
    sent = sender.pack(data)
    assert not isinstance(sent, _Packed)
    assert sent is data or isinstance(data, (LooseRows, StoredRows))


def test_samples_that_do_not_fit_together_are_an_error_and_cost_no_block(sender: BlockSender) -> None:
    for _ in range(2 * _MOST_BLOCKS):
        with pytest.raises(RuntimeError):
            sender.pack(LooseRows((torch.zeros(2), torch.zeros(3))))
    assert number(sender.pack(NUMBERS)) == 0


class Samples:
    def __len__(self) -> int:
        return 400

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"x": torch.full((3, 5), float(at)) + torch.rand(()), "y": at}


class TestInALoader:
    @pytest.mark.parametrize("kind", ["samples", "arrays"])
    def test_batches_that_are_all_kept_stay_as_they_are(self, kind: str) -> None:
        arrays = ArrayDataset((torch.arange(1200.0).view(400, 3), np.arange(400)))
        dataset, plan = as_dataset(Samples()) if kind == "samples" else arrays, Plan(400, 6, seed=1)
        expected = [batch.data for _, batch in Loader(dataset, plan).batches(1)]
        with closing(Loader(dataset, plan, num_workers=2, deadline=60)) as loader:
            for _ in range(2):
                kept = [batch.data for _, batch in loader.batches(1)]
                assert_equal(kept, expected)
        assert_equal(kept, expected)

    def test_epochs_that_are_broken_off_lose_no_block(self) -> None:
        with closing(Loader(as_dataset(Samples()), Plan(400, 8), num_workers=2, deadline=60)) as loader:
            for epoch in range(6):
                batches = loader.batches(epoch)
                next(batches), next(batches)
            del batches
            for _, batch in loader.batches(9):
                del batch
            gc.collect()
            blocks = loader._blocks._blocks.values()  # type: ignore[union-attr]
            assert 0 < len(blocks) <= 2 * _MOST_BLOCKS
            assert not any(block[0] for block in blocks), "nobody looks at any of them"
