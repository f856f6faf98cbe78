"""Which modules of a model are gathered by themselves, and which rows of a parameter a rank has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distributed_training.models.gpt import GPT, GPTArguments
from distributed_training.strategies import sharding
from distributed_training.strategies.gathering import rows_of_rank
from distributed_training.strategies.sharding import find_units


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "UNIT", 100)


def linear() -> nn.Linear:
    return nn.Linear(10, 10)


def names(model: nn.Module) -> list[str]:
    by_identity = {id(module): name for name, module in model.named_modules()}
    return [by_identity[id(unit)] for unit in find_units(model)]


class Net(nn.Module):
    """Children by name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_the_blocks_of_a_transformer_and_not_what_is_inside_them() -> None:
    model = GPT(GPTArguments(vocab_size=50, context=8, layers=3, heads=2, width=8))
    assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]  # the embedding is the output layer too


def test_parts_of_a_sequential_through_nested_ones() -> None:
    model = nn.Sequential(linear(), nn.Tanh(), nn.Sequential(linear(), nn.Linear(2, 2)), linear())
    assert names(model) == ["0", "2.0", "3"]


def test_large_layers_outside_of_containers() -> None:
    model = Net(first=linear(), small=nn.Linear(3, 3), inner=Net(second=linear()), table=nn.Embedding(50, 10))
    assert names(model) == ["first", "inner.second"]


def test_torchs_own_modules_are_not_taken_apart() -> None:
    """Attention uses the weight of its output layer without calling it."""
    model = Net(attention=nn.MultiheadAttention(20, 2), layers=nn.ModuleList([nn.MultiheadAttention(20, 2)]))
    assert names(model) == ["layers.0"]


def test_experts_that_only_some_ranks_call_belong_to_their_block() -> None:
    block = Net(router=nn.Linear(4, 2), experts=nn.ModuleList([linear(), linear()]))
    assert names(nn.Sequential(block, linear())) == ["0", "1"]


def test_tied_weights_belong_to_the_whole_model() -> None:
    model = Net(first=linear(), layers=nn.ModuleList([linear(), linear()]), last=linear())
    model.last.weight = model.first.weight
    assert names(model) == ["layers.0", "layers.1"]
    model.layers[1].weight = model.layers[0].weight
    assert names(model) == []


def test_a_small_model_is_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "UNIT", 1_000)
    assert names(nn.Sequential(linear(), linear())) == []


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_are_those_of_torchs_chunks(rows: int, ranks: int) -> None:
    whole = torch.arange(rows)
    chunks = [chunk.tolist() for chunk in whole.chunk(ranks)] if rows else []
    chunks += [[] for _ in range(ranks - len(chunks))]
    assert [whole[rows_of_rank(rows, rank, ranks)].tolist() for rank in range(ranks)] == chunks
