"""What users have, as a batch source: a torch DataLoader, a dataset, arrays, or any iterable of batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data import Dataset as TorchBase

from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import BatchSource, Dataset
from distributed_training.data.loader import Loader
from distributed_training.data.plan import Plan
from distributed_training.data.stream import StreamSource
from distributed_training.data.torch_dataset import as_dataset
from distributed_training.runtime.errors import DataError


def as_source(
    data: Any,
    plan: Plan,
    *,
    every_sample: bool = False,
    pin_memory: bool = False,
    deadline: float = 300.0,
    resident: str = "auto",
) -> BatchSource:
    """A batch source from `data`, whose length replaces the plan's.

    A DataLoader's own batch size, order, workers and collation are kept. With `every_sample` each sample comes once in
    the dataset's order whatever plan or loader say, as evaluation and prediction need it.
    """
    if isinstance(data, DataLoader):
        data = replan(data, seed=plan.seed, deadline=deadline, resident=resident)
    if isinstance(data, BatchSource):
        return data.in_order() if every_sample and isinstance(data, Loader) else data
    if isinstance(data, (Dataset, TorchBase, np.ndarray, torch.Tensor)) and not isinstance(data, IterableDataset):
        dataset = as_dataset(data)
    elif isinstance(data, (tuple, dict)) and _is_arrays(data):
        dataset = ArrayDataset(data)
    elif isinstance(data, IterableDataset):
        return StreamSource(DataLoader(data, plan.batch_size))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple, dict, str)):
        dataset = as_dataset(data)  # a Hugging Face dataset, or any class of the user's
    elif hasattr(data, "__iter__"):
        return StreamSource(data)
    else:
        raise DataError(
            f"cannot read batches from {type(data).__name__}; pass a DataLoader, a dataset, a tuple of arrays or an "
            "iterable of batches"
        )
    plan = replace(plan, samples=len(dataset))
    if every_sample:
        plan = replace(plan, batch_size=max(min(plan.batch_size, len(dataset)), 1), shuffle=False, drop_last=False)
    return Loader(dataset, plan, pin_memory=pin_memory, deadline=deadline, resident=resident)


def replan(loader: DataLoader[Any], *, seed: int, deadline: float = 300.0, resident: str = "auto") -> BatchSource:
    """A torch DataLoader as a planned loader, if its sampler is an ordinary one; otherwise it is iterated as it is."""
    sampler = loader.sampler
    shuffle = _shuffle_of(sampler, loader.dataset)
    ordinary_batches = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
    if isinstance(loader.dataset, IterableDataset) or shuffle is None or not ordinary_batches:
        return StreamSource(loader)
    dataset = as_dataset(loader.dataset, loader.collate_fn)
    # A DistributedSampler's loader states the batch of one rank; ours is always the global one.
    ranks = sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1
    assert loader.batch_size is not None
    if len(dataset) == 0:
        raise DataError(f"{type(loader.dataset).__name__}: the dataset is empty")
    batch_size = min(loader.batch_size * ranks, len(dataset))  # a DataLoader accepts a batch larger than its dataset
    return Loader(
        dataset,
        Plan(len(dataset), batch_size, seed, shuffle, loader.drop_last),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        deadline=loader.timeout or deadline,
        resident=resident,
    )


def _shuffle_of(sampler: Any, dataset: Any) -> bool | None:
    """Whether an ordinary sampler shuffles; None for one whose choice of samples a plan cannot stand for."""
    sampled: Any = getattr(sampler, "dataset" if isinstance(sampler, DistributedSampler) else "data_source", None)
    if sampled is not dataset and not (hasattr(sampled, "__len__") and len(sampled) == len(dataset)):
        return None  # it knows another number of samples than there are
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True
    if type(sampler) is DistributedSampler:
        return sampler.shuffle
    return None


def _is_arrays(data: Any) -> bool:
    values = data.values() if isinstance(data, dict) else data
    return len(data) > 0 and all(isinstance(value, (np.ndarray, torch.Tensor)) for value in values)
