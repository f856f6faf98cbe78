"""What every batch source has to pass: the loop cannot tell a local loader from batches of other machines.

A source's own test inherits `BatchSourceContract` and gives a fixture `source_factory` of at least 3 steps an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.contract.dataset import assert_equal, tensors

from distributed_training.data.base import Batch, BatchSource

Factory = Callable[[], BatchSource]


class BatchSourceContract:
    """Inherit as `class TestX(BatchSourceContract)` and give a fixture `source_factory`."""

    @pytest.fixture
    def source_factory(self) -> Factory:
        """A function that makes a new source of the same data."""
        raise NotImplementedError

    @pytest.fixture
    def source(self, source_factory: Factory) -> Iterator[BatchSource]:
        source = source_factory()
        yield source
        source.close()
        source.close()  # twice is once

    def epoch(self, source: BatchSource, epoch: int, start: int = 0) -> list[tuple[int, Batch]]:
        return list(source.batches(epoch, start))

    def test_steps_come_in_order_from_nought(self, source: BatchSource) -> None:
        steps = [step for step, _ in self.epoch(source, 0)]
        assert len(steps) >= 3
        assert steps == list(range(len(steps)))
        assert source.steps_per_epoch in (None, len(steps))

    def test_every_tensor_has_a_row_for_each_id(self, source: BatchSource) -> None:
        for _, batch in self.epoch(source, 0):
            assert batch.size == len(batch.ids) > 0
            assert all(len(tensor) == batch.size for tensor in tensors(batch.data))

    def test_an_epoch_can_be_entered_at_any_step(self, source: BatchSource) -> None:
        whole = self.epoch(source, 1)
        for start in range(len(whole) + 1):
            rest = self.epoch(source, 1, start)
            assert [step for step, _ in rest] == list(range(start, len(whole)))
            for (_, one), (_, other) in zip(rest, whole[start:]):
                assert_equal(one.data, other.data)
                if source.exact:
                    assert one.ids.tolist() == other.ids.tolist()

    def test_an_epoch_can_be_left_in_the_middle(self, source: BatchSource) -> None:
        batches = source.batches(0)
        next(batches)
        again = self.epoch(source, 0)
        assert [step for step, _ in again] == list(range(len(again)))

    def test_another_source_of_the_same_data_gives_the_same_batches(
        self, source: BatchSource, source_factory: Factory
    ) -> None:
        other = source_factory()
        assert other.describe() == source.describe()
        for (_, one), (_, two) in zip(self.epoch(source, 2), self.epoch(other, 2), strict=True):
            assert one.ids.tolist() == two.ids.tolist()
            assert_equal(one.data, two.data)
        other.close()

    def test_an_exact_source_uses_each_sample_at_most_once_an_epoch(self, source: BatchSource) -> None:
        if source.exact:
            ids = [i for _, batch in self.epoch(source, 3) for i in batch.ids.tolist()]
            assert len(ids) == len(set(ids))
