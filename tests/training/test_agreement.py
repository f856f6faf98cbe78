"""Ranks that differ are refused before they train. With real ranks: tests/integration/test_failures.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from distributed_training.config import Config
from distributed_training.runtime.errors import RanksError
from distributed_training.strategies import Place
from distributed_training.strategies.single import SingleDevice
from distributed_training.training.agreement import check_same_everywhere

SOURCE = {"dataset": "abc", "samples": 10}


class Ranks(SingleDevice):
    """Three ranks that have the same, but for what is changed on some."""

    def __init__(self, change: Callable[[int, dict[str, Any]], None]) -> None:
        super().__init__(Place(torch.device("cpu")))
        self.world_size, self._change = 3, change

    def gather_values(self, value: Any) -> list[Any]:
        everyone = [copy.deepcopy(value) for _ in range(self.world_size)]
        for rank, facts in enumerate(everyone):
            self._change(rank, facts)
        return everyone


def check(change: Callable[[int, dict[str, Any]], None], config: Config | None = None) -> None:
    check_same_everywhere(Ranks(change), config or Config(), nn.Linear(2, 2), SOURCE)


def on(which: int, **changed: str) -> Callable[[int, dict[str, Any]], None]:
    names = {key.replace("__", "."): value for key, value in changed.items()}

    def change(rank: int, facts: dict[str, Any]) -> None:
        if rank == which:
            assert names.keys() <= facts.keys()
            facts.update(names)

    return change


def test_equal_ranks_pass() -> None:
    check(lambda rank, facts: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (on(1, training__lr="0.5"), "training.lr is 0.002 on ranks 0, 2 and 0.5 on rank 1"),
        (on(0, training__lr="0.5"), "training.lr is 0.5 on rank 0 and 0.002 on ranks 1, 2"),
        (on(2, torch="'1.0'"), "torch is "),
        (on(2, distributed_training="'0'"), "distributed_training is "),
        (on(1, strategy__name="'zero3'"), "strategy.name is 'auto' on ranks 0, 2 and 'zero3' on rank 1"),
        (
            lambda rank, facts: facts.update({"data: dataset": repr("xyz")} if rank else {}),
            "data: dataset is 'abc' on rank 0",
        ),
        (
            lambda rank, facts: facts.pop("data: samples") if rank == 2 else None,
            "data: samples is 10 on ranks 0, 1 and missing",
        ),
    ],
)
def test_differences_are_named_with_their_ranks(change: Any, message: str) -> None:
    with pytest.raises(RanksError) as error:
        check(change)
    assert message in str(error.value)
    assert "docs/troubleshooting.md#ranks-differ" in str(error.value)
    assert error.value.exit_code == 7


def test_many_differences_are_counted() -> None:
    with pytest.raises(RanksError, match="and 2 more"):
        check(on(1, training__lr="9", training__epochs="9", training__seed="9", training__batch_size="9", torch="9"))


@pytest.mark.parametrize("key", ["data.root", "data.num_workers", "data.pin_memory", "training.device", "run.name"])
def test_what_belongs_to_a_machine_is_not_compared(key: str) -> None:
    seen: list[str] = []
    check(lambda rank, facts: seen.extend(facts))
    assert key not in seen
    assert "training.lr" in seen


def test_one_process_has_nobody_to_differ_from() -> None:
    check_same_everywhere(SingleDevice(Place(torch.device("cpu"))), Config(), nn.Linear(2, 2), SOURCE)
