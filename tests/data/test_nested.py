"""Walking batches: every nesting keeps its shape, and a batch splits into nearly equal parts."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch

from distributed_training.data.nested import batch_length, map_tensors, split_batch, split_sizes, tensors_in, to_device


class Pair(NamedTuple):
    inputs: Any
    targets: Any


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


class TestMapTensors:
    def test_applies_to_every_tensor_and_keeps_the_nesting(self) -> None:
        data = {"x": torch.ones(2), "more": (torch.ones(1), [torch.ones(3), "text", 5, None])}
        mapped = map_tensors(double, data)
        assert list(mapped) == ["x", "more"]
        assert isinstance(mapped["more"], tuple)
        assert isinstance(mapped["more"][1], list)
        assert mapped["x"].tolist() == [2, 2]
        assert mapped["more"][1][0].tolist() == [2, 2, 2]
        assert mapped["more"][1][1:] == ["text", 5, None]

    def test_a_named_tuple_stays_one(self) -> None:
        mapped = map_tensors(double, Pair(torch.ones(2), {"y": torch.ones(1)}))
        assert isinstance(mapped, Pair)
        assert mapped.inputs.tolist() == [2, 2]
        assert mapped.targets["y"].tolist() == [2]

    @pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
    def test_any_mapping_becomes_a_dict(self, kind: type) -> None:
        mapped = map_tensors(double, kind({"x": torch.ones(1)}))
        assert type(mapped) is dict
        assert mapped["x"].tolist() == [2]

    @pytest.mark.parametrize("value", [3, 2.5, "text", None, b"bytes"])
    def test_anything_else_is_passed_through(self, value: Any) -> None:
        assert map_tensors(double, value) is value


class TestTensorsIn:
    def test_come_in_order(self) -> None:
        data = (torch.tensor(0), {"a": torch.tensor(1), "b": [torch.tensor(2), "text"]}, Pair(torch.tensor(3), None))
        assert [int(t) for t in tensors_in(data)] == [0, 1, 2, 3]

    def test_there_may_be_none(self) -> None:
        assert list(tensors_in({"x": 1, "y": ("a", None)})) == []


def test_to_device_moves_every_tensor() -> None:
    moved = to_device({"x": torch.ones(2), "n": 3}, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["n"] == 3


class TestBatchLength:
    @pytest.mark.parametrize(
        ("data", "length"),
        [
            (torch.zeros(5, 2), 5),
            ((torch.zeros(3, 2), torch.zeros(3)), 3),
            ({"scale": torch.tensor(1.0), "x": torch.zeros(4, 1)}, 4),
            (torch.zeros(0, 2), 0),
            ({"n": 7}, 1),
            (torch.tensor(1.0), 1),
        ],
    )
    def test_is_the_first_dimension_of_the_first_tensor_that_has_one(self, data: Any, length: int) -> None:
        assert batch_length(data) == length


class TestSplitBatch:
    @pytest.mark.parametrize(
        ("size", "parts", "sizes"),
        [(8, 2, [4, 4]), (10, 4, [2, 3, 2, 3]), (7, 3, [2, 2, 3]), (4, 1, [4]), (1, 1, [1])],
    )
    def test_parts_are_nearly_equal_and_lose_nothing(self, size: int, parts: int, sizes: list[int]) -> None:
        cut = split_batch((torch.arange(size), {"y": torch.arange(size) * 2}), size, parts)
        assert [count for count, _ in cut] == sizes == [len(data[0]) for _, data in cut]
        assert torch.cat([data[0] for _, data in cut]).tolist() == list(range(size))
        assert torch.cat([data[1]["y"] for _, data in cut]).tolist() == list(range(0, 2 * size, 2))

    def test_parts_are_views(self) -> None:
        whole = torch.zeros(4)
        split_batch(whole, 4, 2)[1][1].fill_(1)
        assert whole.tolist() == [0, 0, 1, 1]

    def test_what_is_not_a_row_for_each_sample_goes_to_every_part(self) -> None:
        cut = split_batch({"x": torch.arange(4), "scale": torch.tensor(2.0), "table": torch.zeros(9), "n": 1}, 4, 2)
        for _, data in cut:
            assert data["scale"].item() == 2
            assert data["table"].shape == (9,)
            assert data["n"] == 1

    def test_parts_without_a_sample_hold_the_first_one_and_count_nothing(self) -> None:
        """A strategy may exchange something in every micro-batch: all ranks must have the same number of them."""
        cut = split_batch((torch.arange(5, 7),), 2, 4)
        assert [count for count, _ in cut] == [0, 1, 0, 1]
        assert [data[0].tolist() for _, data in cut] == [[5], [5], [5], [6]]


class TestSplitSizes:
    @pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 3, 1], [2]])
    def test_batches_have_the_sizes_asked_for(self, sizes: list[int]) -> None:
        cut = split_sizes(torch.arange(sum(sizes)), sizes)
        assert [len(part) for part in cut] == sizes
        assert torch.cat(cut).tolist() == list(range(sum(sizes)))

    def test_every_batch_has_the_nesting_of_the_whole(self) -> None:
        x, y = torch.arange(3), torch.arange(3) * 2
        assert [type(part) for part in split_sizes((x, y), [2, 1])] == [tuple, tuple]
        assert [type(part) for part in split_sizes([x, y], [2, 1])] == [list, list]
        first, last = split_sizes({"x": x, "more": (y, [x])}, [2, 1])
        assert first["x"].tolist() == [0, 1]
        assert last["more"][0].tolist() == [4]
        assert last["more"][1][0].tolist() == [2]
