"""Reading steps of a plan from a dataset, in this process: what local loaders and loaders on other machines both do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from distributed_training.data.base import Batch, Dataset, Share
from distributed_training.data.nested import split_sizes
from distributed_training.data.placing import ORDINARY, Memory, place
from distributed_training.data.plan import Plan, derive_key
from distributed_training.data.randomness import claimed_generators
from distributed_training.data.torch_dataset import fetch

# A call's fixed cost is shared: ids of many steps are computed together, and samples that lie in memory are gathered
# for as many steps as fit into a cache; others that are quickly loaded, for as many as nobody has to wait for.
_IDS_AT_ONCE = 2**15
_STEPS_AT_ONCE = 64
_BYTES_AT_ONCE = 2**20
_NUMBER = 8  # bytes of a sample's number, which goes with it
_SECONDS_AT_ONCE, _SECONDS_AT_ONCE_ALONE = 0.005, 0.02  # in any process, and in one that only loads
# Python collects garbage after some hundred new objects. Many more samples would outlive that and be promoted, until a
# collection goes through everything there is: with 512 rows that took a quarter of the time of cheap ones. In a process
# that only loads there is nothing to go through but samples: what was there when it was forked does not count.
_ROWS_AT_ONCE, _ROWS_AT_ONCE_ALONE = 256, 2048


Rooms = Callable[[int, int], Memory]
"""Gives memory for so many rows of so many bytes each."""


@dataclass(slots=True)
class Block:
    """Neighbouring steps that were fetched in one call."""

    first: int
    steps: list[np.ndarray]
    """Ids of each whole step."""
    own: list[np.ndarray]
    """Ids of the rows of each step that are in `data`."""
    data: Any
    """The rows of all steps together, one after the other."""

    def batches(self, share: Share) -> Iterator[tuple[int, Batch]]:
        """(step, batch) of each step."""
        parts = split_sizes(self.data, [len(rows) for rows in self.own]) if len(self.own) > 1 else [self.data]
        for step, (step_ids, part) in enumerate(zip(self.steps, parts), self.first):
            yield step, share.batch(step_ids, part)


def read_steps(
    dataset: Dataset,
    plan: Plan,
    share: Share,
    epoch: int,
    first: int,
    last: int,
    memory: Memory | None = None,
) -> Iterator[tuple[int, Batch]]:
    """Yield (step, this share of the batch) of the steps [first, last), in this memory or in any."""
    rooms = None if memory is None else lambda rows, size: memory
    for block in read_blocks(dataset, plan, share, epoch, first, last, gathered=memory is None, rooms=rooms):
        for part in [block] if memory is None else _placed(block, memory, dataset, derive_key(plan.seed, epoch)):
            yield from part.batches(share)


def _placed(block: Block, memory: Memory, dataset: Dataset, key: int) -> Iterator[Block]:
    """The block in this memory; step by step where its samples do not fit together, which says whose fault it is."""
    try:
        block.data = place(block.data, memory)
    except RuntimeError:
        for at, (whole, part) in enumerate(zip(block.steps, block.own), block.first):
            yield Block(at, [whole], [part], place(fetch(dataset, part, key), memory))
    else:
        yield block


def read_blocks(
    dataset: Dataset,
    plan: Plan,
    share: Share,
    epoch: int,
    first: int,
    last: int,
    *,
    at_once: int = _BYTES_AT_ONCE,
    gathered: bool = True,
    rooms: Rooms | None = None,
) -> Iterator[Block]:
    """Yield the steps [first, last) as they are fetched: many at once where samples lie in memory, else one by one.

    A block has no more than `at_once` bytes, or one step. Not `gathered`, it holds `StoredRows`, for a dataset that has
    them, or `LooseRows` where it is one step. Samples of several steps may be put together in memory of `rooms`.
    """
    size, key, step = plan.batch_size, derive_key(plan.seed, epoch), first
    planned = max(1, _IDS_AT_ONCE // size)
    for begin in range(first, last, planned):
        ids = plan.span(epoch, begin, min(begin + planned, last))
        offset = 0
        while offset < len(ids):
            some = ids[offset : offset + steps_fetched_together(dataset, plan, at_once) * size]
            offset += len(some)
            steps = [some[at : at + size] for at in range(0, len(some), size)]
            own = [step_ids[share.rows(len(step_ids))] for step_ids in steps] if share.ranks > 1 else steps
            rows = np.concatenate(own) if share.ranks > 1 else some
            data = None if gathered else dataset.rows(rows)
            if data is None and len(steps) == 1:
                data = fetch(dataset, rows, key) if gathered else _fetch_loose(dataset, rows, key)
            elif data is None:
                memory = rooms(len(rows), dataset.sample_bytes or 0) if rooms is not None else ORDINARY
                data = dataset.fetch_steps(rows, key, [len(part) for part in own], memory)
            if data is not None:
                yield Block(step, steps, own, data)
            else:
                for at, (whole, part) in enumerate(zip(steps, own), step):
                    yield Block(at, [whole], [part], fetch(dataset, part, key))
            step += len(steps)


def fetch_apart(dataset: Dataset, ids: np.ndarray, key: int) -> Any:
    """The samples of one step, not put together as far as the dataset can give that: with `StoredRows` or `LooseRows`;
    None where the latter do not fit together."""
    rows = dataset.rows(ids)
    return _fetch_loose(dataset, ids, key) if rows is None else rows


def _fetch_loose(dataset: Dataset, ids: np.ndarray, key: int) -> Any:
    return fetch(dataset, ids, key) if dataset.sample_bytes is None else dataset.fetch_loose(ids, key)


def steps_fetched_together(dataset: Dataset, plan: Plan, at_once: int = _BYTES_AT_ONCE) -> int:
    """How many steps are fetched in one call: several only where rows are rows, however many of them."""
    if dataset.sample_bytes is None:
        return 1
    most = at_once // ((dataset.sample_bytes + _NUMBER) * plan.batch_size)
    if dataset.sample_seconds:
        alone = claimed_generators() is not None
        most_rows = _ROWS_AT_ONCE_ALONE if alone else _ROWS_AT_ONCE
        seconds = _SECONDS_AT_ONCE_ALONE if alone else _SECONDS_AT_ONCE
        rows = min(most_rows, int(seconds / dataset.sample_seconds))
        most = min(most, rows // plan.batch_size)
    return max(1, min(_STEPS_AT_ONCE, most))
