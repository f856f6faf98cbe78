"""Users' torch datasets and preprocessing functions, as datasets of ours."""

from __future__ import annotations

import hashlib
import inspect
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset, default_collate

from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import Dataset, KeyedDataset, LooseRows
from distributed_training.data.collating import BlockOfSteps, collate_samples, loose_samples
from distributed_training.data.nested import map_tensors, tensors_in, values_in
from distributed_training.data.placing import Memory
from distributed_training.data.plan import extend_key
from distributed_training.data.randomness import drew, global_generators_kept, seed_for_sample, seed_of_sample
from distributed_training.data.sample_draws import Parts, SampleDraws, Task
from distributed_training.runtime.errors import DataError

Collate = Callable[[list[Any]], Any]


def as_dataset(samples: Any, collate: Collate | None = None) -> Dataset:
    """A dataset of ours from anything with `__len__` and `__getitem__`; tensors and arrays keep their fast path."""
    if isinstance(samples, Dataset):
        return samples
    default = collate is None or collate is default_collate
    if isinstance(samples, TensorDataset) and default:
        return ArrayDataset(samples.tensors, name="TensorDataset")
    if isinstance(samples, (np.ndarray, torch.Tensor)) and default:
        return ArrayDataset(samples)
    if not hasattr(samples, "__getitem__") or not hasattr(samples, "__len__"):
        raise DataError(f"{type(samples).__name__} has no __getitem__ and __len__, so it is not a map-style dataset")
    return TorchDataset(samples, collate_samples if collate is None or default else collate)


class TorchDataset(KeyedDataset):
    """A map-style torch dataset. Its random transforms are keyed by sample: see `data.randomness`.

    A dataset with `__getitems__` is asked for the whole batch at once; what is random in it is then keyed by batch.
    """

    def __init__(self, samples: Any, collate: Collate = collate_samples) -> None:
        index = None
        # Look through a plain Subset, for its own __getitems__ cannot be keyed by sample; a user's may do more.
        while isinstance(samples, TorchSubset) and type(samples).__getitem__ is TorchSubset.__getitem__:
            inner = np.asarray(samples.indices, dtype=np.int64)
            index = inner if index is None else inner[index]
            samples = samples.dataset
        self._samples, self._collate, self._index = samples, collate, index
        self._whole_batches = hasattr(samples, "__getitems__")
        self._draws = SampleDraws()
        self._by_rows = self.alone = collate is collate_samples and not self._whole_batches
        self.name = type(samples).__name__
        classes = getattr(samples, "classes", None)
        self.num_classes = len(classes) if classes is not None else None
        self.classes = [str(name) for name in classes] if classes is not None else None

    def __len__(self) -> int:
        return len(self._samples) if self._index is None else len(self._index)

    def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
        own = (ids if self._index is None else self._index[ids]).tolist()
        if not own:  # a rank without a share of the last batch: the shape of a sample, no rows
            return map_tensors(lambda t: t[:0], self.fetch_keyed(np.zeros(1, dtype=np.int64), key))
        start = time.perf_counter()
        rows = self._load(own, key)
        batch = _call(self._collate, rows, what=f"{self.name}: collating samples {own[:4]}...")
        if self._by_rows:
            self._note(batch, len(own), time.perf_counter() - start)
        return batch

    def fetch_steps(self, ids: np.ndarray, key: int, sizes: Sequence[int], memory: Memory) -> Any:
        own = (ids if self._index is None else self._index[ids]).tolist()
        start = time.perf_counter()
        block = BlockOfSteps(len(own), memory)
        try:
            self._draws.load_parts(self._task(own, key), Parts([size for size in sizes if size], block.put))
        except DataError:
            return None  # it comes again in the step that it belongs to
        self.drew = self._draws.drew
        self._note(batch := block.batch(), len(own), time.perf_counter() - start)
        return batch

    def fetch_loose(self, ids: np.ndarray, key: int) -> Any:
        own = (ids if self._index is None else self._index[ids]).tolist()
        start = time.perf_counter()
        try:
            batch = loose_samples(self._load(own, key))
        except DataError:
            return None
        self._note(batch, len(own), time.perf_counter() - start)
        return batch

    def _note(self, batch: Any, rows: int, seconds: float) -> None:
        """What is known of the samples by now: whether those of many steps may be loaded together."""
        tensors = list(batch.values()) if isinstance(batch, dict) else batch
        if isinstance(tensors, list) and all(isinstance(tensor, (torch.Tensor, LooseRows)) for tensor in tensors):
            sizes = [t.samples[0].nbytes * rows if isinstance(t, LooseRows) else t.nbytes for t in tensors]
            self.sample_bytes = max(1, sum(sizes) // rows)
            self.sample_seconds = max(seconds / rows, 1e-9)
        else:
            self._by_rows, self.sample_bytes = False, None

    def _load(self, own: list[int], key: int) -> Any:
        if self._whole_batches:
            with global_generators_kept():
                seed_for_sample(key, own[0])
                return _call(self._samples.__getitems__, own, what=f"{self.name}: samples {own[0]}, ...")
        rows = self._draws.load(self._task(own, key))
        self.drew = self._draws.drew
        return rows

    def _task(self, own: list[int], key: int) -> Task:
        return Task(self._samples.__getitem__, own, own, key, lambda: self._named)

    def _named(self, sample: int) -> Any:
        return _call(self._samples.__getitem__, sample, what=f"{self.name}: sample {sample}")

    def repeats(self, ids: np.ndarray) -> bool:
        own = (ids if self._index is None else self._index[ids]).tolist()
        if self._whole_batches:
            if drew(lambda: self._samples.__getitems__(own)):
                return False
        elif drew(lambda: [self._samples[sample] for sample in own]):
            return False
        if self._collate is collate_samples and not self._whole_batches:
            return True
        alone = [self.fetch_keyed(ids[at : at + 1], 0) for at in range(len(ids))]
        return all(_same(_row(self.fetch_keyed(ids, 0), at), _row(one, 0)) for at, one in enumerate(alone))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.name}:{len(self)}".encode())
        for position in {0, len(self) // 2, len(self) - 1} if len(self) else ():
            sample = self.fetch(np.array([position]))
            for tensor in tensors_in(sample):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else b"")
            for piece in values_in(sample, bytes):
                digest.update(piece)
        return digest.hexdigest()[:16]


class PreprocessedDataset(KeyedDataset):
    """A dataset with a user's function applied to each sample before batching.

    The function gets one sample and may take a second argument `rng`, a NumPy generator keyed by (seed, epoch, sample).
    """

    def __init__(self, dataset: Dataset, function: Callable[..., Any], name: str = "preprocess") -> None:
        self._dataset, self._function, self.name = dataset, function, name
        self._wants_rng = "rng" in _parameters(function)
        self._draws = SampleDraws()
        self.num_classes, self.classes = dataset.num_classes, dataset.classes

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self._dataset.alone

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
        if not len(ids):
            return map_tensors(lambda t: t[:0], self.fetch_keyed(np.zeros(1, dtype=np.int64), key))
        own_key = extend_key(key, 1)  # what is drawn here has nothing to do with what the dataset drew
        plain = self._on_rows(ids, key, own_key)
        # A function may have changed the rows that it was tried on.
        task = Task(plain, range(len(ids)), ids.tolist(), own_key, lambda: self._on_rows(ids, key, own_key, named=True))
        rows = self._draws.load(task)
        self.drew = self._draws.drew or self._wants_rng or drew_something(self._dataset)
        return _call(collate_samples, rows, what=f"{self.name}: batching what it returned")

    def _on_rows(self, ids: np.ndarray, key: int, own_key: int, *, named: bool = False) -> Callable[[int], Any]:
        """The function of a row of these samples, fetched for it; `named`: an error says which sample it was."""
        batch = fetch(self._dataset, ids, key)

        def plain(row: int) -> Any:
            if not self._wants_rng:
                return self._function(_row(batch, row))
            seed = seed_of_sample(own_key, int(ids[row]))
            return self._function(_row(batch, row), rng=np.random.Generator(np.random.Philox(seed)))

        return (lambda row: _call(plain, row, what=f"{self.name}: sample {ids[row]}")) if named else plain

    def repeats(self, ids: np.ndarray) -> bool:
        if self._wants_rng or not repeats(self._dataset, ids):
            return False
        batch = fetch(self._dataset, ids, 0)
        return not drew(lambda: [self._function(_row(batch, row)) for row in range(len(ids))])

    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._dataset.fingerprint()}:{self.name}".encode()).hexdigest()[:16]


def fetch(dataset: Dataset, ids: np.ndarray, key: int) -> Any:
    """A batch of any dataset; the key matters only to those with a random part."""
    return dataset.fetch_keyed(ids, key) if isinstance(dataset, KeyedDataset) else dataset.fetch(ids)


def drew_something(dataset: Dataset) -> bool:
    """Whether anything random went into what was fetched last from any dataset: see `KeyedDataset.drew`."""
    return dataset.drew if isinstance(dataset, KeyedDataset) else False


def repeats(dataset: Dataset, ids: np.ndarray) -> bool:
    """Whether these samples of any dataset are the same in every epoch: see `KeyedDataset.repeats`."""
    return dataset.repeats(ids) if isinstance(dataset, KeyedDataset) else True


def _same(one: Any, other: Any) -> bool:
    """Whether two samples are equal to the last bit."""
    first, second = list(tensors_in(one)), list(tensors_in(other))
    if list(values_in(one, bytes)) != list(values_in(other, bytes)):
        return False
    return len(first) == len(second) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second)
    )


def _call(function: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what}: {type(error).__name__}: {error}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Where in the user's code it was raised: what a person looks for in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if len(frames) > 1 else ""


def _row(batch: Any, row: int) -> Any:
    if isinstance(batch, Mapping):
        return {key: _row(value, row) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)) and not all(isinstance(value, (str, bytes)) for value in batch):
        values = [_row(value, row) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch[row]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return {}
