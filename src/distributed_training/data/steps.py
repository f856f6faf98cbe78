"""Reading steps of a plan from a dataset, in this process: what local loaders and loaders on other machines both do."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from torch import Tensor

from distributed_training.data.base import Batch, Dataset, Share
from distributed_training.data.nested import map_tensors, split_sizes
from distributed_training.data.plan import Plan, derive_key
from distributed_training.data.torch_dataset import fetch

# A call's fixed cost is shared: ids of many steps are computed together, and samples that lie in memory are gathered
# for as many steps as fit into a cache.
_IDS_AT_ONCE = 2**15
_STEPS_AT_ONCE = 64
_BYTES_AT_ONCE = 2**20


def read_steps(
    dataset: Dataset,
    plan: Plan,
    share: Share,
    epoch: int,
    first: int,
    last: int,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[int, Batch]]:
    """Yield (step, this share of the batch) of the steps [first, last); `prepare` is applied to all tensors."""
    size, key, step = plan.batch_size, derive_key(plan.seed, epoch), first
    together = steps_fetched_together(dataset, plan) * size
    planned = max(1, _IDS_AT_ONCE // size)
    for begin in range(first, last, planned):
        ids = plan.span(epoch, begin, min(begin + planned, last))
        for offset in range(0, len(ids), together):
            some = ids[offset : offset + together]
            steps = [some[at : at + size] for at in range(0, len(some), size)]
            own = [step_ids[share.rows(len(step_ids))] for step_ids in steps] if share.ranks > 1 else steps
            data = fetch(dataset, np.concatenate(own) if share.ranks > 1 else some, key)
            if prepare is not None:
                data = map_tensors(prepare, data)
            batches = split_sizes(data, [len(rows) for rows in own]) if len(own) > 1 else [data]
            for step_ids, batch in zip(steps, batches):
                yield step, share.batch(step_ids, batch)
                step += 1


def steps_fetched_together(dataset: Dataset, plan: Plan) -> int:
    """How many steps are fetched in one call: several only where that is a mere gather from memory."""
    if dataset.sample_bytes is None:
        return 1
    batch_bytes = max(dataset.sample_bytes * plan.batch_size, 1)
    return max(1, min(_STEPS_AT_ONCE, _BYTES_AT_ONCE // batch_bytes))
