"""The two contracts of data: a `Dataset` is samples by number, a `BatchSource` is batches in step order.

The way of a batch: the plan computes which sample ids make up a step, a dataset fetches them as one batch, a batch
source hands them to the training loop. The loop cannot tell a local loader from one on another machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from distributed_training.data.placing import Memory
    from distributed_training.data.plan import Plan


class Dataset(ABC):
    """A fixed number of samples, fetched by id in whole batches.

    Called from the training process or from loader processes, so an instance must survive pickling or forking. It
    holds no position and no random state: the same ids always give the same samples.
    """

    num_classes: int | None = None
    """Number of classes where the targets are class labels."""
    classes: list[str] | None = None
    """Names of the classes, where they have names."""
    input_shape: tuple[int, ...] | None = None
    """Shape of a sample's input as the model will see it, where that is not the shape of the first tensor here."""
    sample_bytes: int | None = None
    """Size of a sample, where samples may be fetched for many steps at once: rows of tensors, each by itself."""
    sample_seconds: float = 0.0
    """About how long it takes to load one of these, where that is more than a gather from memory."""
    alone: bool = False
    """Whether a batch is nothing but its samples side by side, each the same beside whatever others."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def fetch(self, ids: np.ndarray) -> Any:
        """The samples with these ids (int64, each in [0, len)) as one batch of tensors, first dimension len(ids).

        A batch is any nesting of tuples, lists and dicts; `(inputs, targets)` is the usual one. The tensors belong to
        the caller and share no memory with the dataset. A sample that cannot be read raises DataError naming it.
        """

    def rows(self, ids: np.ndarray) -> Any:
        """The same batch with `StoredRows` in place of tensors, where it is nothing but rows of tensors in memory.

        Whoever only passes a batch on need not gather it first. None for all other datasets.
        """
        return None

    def fetch_steps(self, ids: np.ndarray, key: int, sizes: Sequence[int], memory: Memory) -> Any:
        """The samples of several steps, of so many rows each, as one batch, where `sample_bytes` is known: cut into
        steps it must be what they would be one by one. None where it would not. The key is that of a `KeyedDataset`.

        What has to be put together may be made in `memory`: whoever has use for that looks whether it was.
        """
        return self.fetch(ids)

    def fetch_loose(self, ids: np.ndarray, key: int) -> Any:
        """The samples of one step, with `LooseRows` in place of tensors that would have to be put together first; None
        as for `fetch_steps`.

        Whoever only passes a batch on puts them together where they are to lie, before he asks for anything else: a
        dataset may use their memory again.
        """
        return self.fetch(ids)

    def expect(self, plan: Plan, share: Share, epoch: int, start: int) -> None:  # noqa: B027 (for those that prepare)
        """A loader is about to read this share of an epoch from step `start` on."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short string equal for equal data: what two machines compare before they work on one run."""


class StoredRows(NamedTuple):
    """Rows of a tensor, not gathered."""

    tensor: Tensor
    ids: np.ndarray
    mapped: bool = False
    """Whether they lie in a file that is mapped into memory: to look at one may take a disk's time."""


class LooseRows(NamedTuple):
    """Samples of one type that are to become the rows of a tensor. Whether they have one shape is not known yet."""

    samples: Sequence[Tensor]


@dataclass(frozen=True)
class Splits:
    """The training part of a dataset and the part held out."""

    train: Dataset
    validation: Dataset | None = None


@dataclass(slots=True)
class Batch:
    """One global step's samples, or one rank's share of them."""

    ids: np.ndarray
    """Ids of the samples, in the order of the rows of `data`."""
    data: Any
    """The samples, as `Dataset.fetch` gave them."""
    step_ids: np.ndarray | None = None
    """Ids of the whole step, where `ids` are one rank's share of it."""
    padding: bool = False
    """True where this rank has no share in the step: the sample here is another rank's and counts for nothing."""
    skipped: np.ndarray | None = None
    """Samples that the plan has for this step and that are not here, as they could not be loaded."""
    labels: torch.Tensor | None = None
    """What may be class labels, on the CPU, where the source has brought `data` to the device already."""

    @property
    def rows(self) -> int:
        """Samples in `data`."""
        return len(self.ids)

    @property
    def size(self) -> int:
        """Samples that count."""
        return 0 if self.padding else len(self.ids)

    @property
    def step_size(self) -> int:
        """Samples of the whole step, over all ranks."""
        return len(self.ids) if self.step_ids is None else len(self.step_ids)


class Share:
    """One rank's part of every step: a run of neighbouring rows, as even as it can be."""

    __slots__ = ("rank", "ranks")

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Share) and (self.rank, self.ranks) == (other.rank, other.ranks)

    def rows(self, size: int) -> slice:
        """Which rows of a step of `size` samples. Nothing to do is row 0 again: see `Batch.padding`."""
        start, end = size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks
        return slice(start, end) if end > start else slice(0, 1)

    def batch(self, step_ids: np.ndarray, data: Any) -> Batch:
        """A batch around this rank's rows, which `data` holds already."""
        if self.ranks == 1:
            return Batch(step_ids, data)
        size = len(step_ids)
        padding = size * self.rank // self.ranks == size * (self.rank + 1) // self.ranks
        return Batch(step_ids[self.rows(size)], data, step_ids, padding)


class ToldToStop(Exception):
    """A source was told to stop while it waited for samples: see `BatchSource.heed`."""


class BatchSource(ABC):
    """Batches in step order. The training loop is its only caller, from one thread."""

    exact = True
    """Whether a resumed or distributed run sees the very same batches; False only for streams without sample ids."""

    local = True
    """Whether the samples come from this machine."""

    @property
    def told(self) -> dict[str, Any]:
        """What other machines said of their samples: number of classes, shape."""
        return {}

    share = Share()
    """Which part of every step is read: the whole, or one rank's. Set before the first batch."""

    device: torch.device | None = None
    """Where batches will be computed. A source may bring them there ahead of time; it need not."""

    epochs: int | None = None
    """Epochs of the training, read one after the other: a source may begin with the next one while the end of this one
    is dealt with. None where no epoch follows, as in an evaluation."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None when it is known only at the end (iterable datasets)."""

    @abstractmethod
    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield (step, this source's share of the batch) of this epoch from step `start` on.

        A new call ends the one before it.
        """

    def describe(self) -> dict[str, Any]:
        """What must be equal for two runs to see the same batches; kept in checkpoints and compared on resume."""
        return {}

    def heed(self, told_to_stop: Callable[[], bool]) -> None:  # noqa: B027 (for sources that wait)
        """How to see that training is to stop: a source that waits for others then ends its batches early."""

    def metrics(self) -> dict[str, float]:
        """What is worth logging of where the batches come from, since the last call."""
        return {}

    def close(self) -> None:  # noqa: B027 (optional)
        """End worker processes and free memory. Safe to call twice."""


class KeyedDataset(Dataset):
    """A dataset whose samples have a random part: augmentation drawn from a key instead of a worker's generator."""

    drew: bool = True
    """Whether anything random went into what was fetched last. False only where that was seen: such samples are the
    same under every key."""

    @abstractmethod
    def fetch_keyed(self, ids: np.ndarray, key: int) -> Any:
        """As `fetch`, each sample's random part a function of (key, its id) alone. The key stands for (seed, epoch)."""

    def repeats(self, ids: np.ndarray) -> bool:
        """Whether these samples are the same under every key, and beside whatever others they are fetched.

        True only where that was seen: then those who keep samples need not fetch them again.
        """
        return False

    def fetch(self, ids: np.ndarray) -> Any:
        """The samples with a fixed key: what evaluation sees."""
        return self.fetch_keyed(ids, 0)

    def fetch_steps(self, ids: np.ndarray, key: int, sizes: Sequence[int], memory: Memory) -> Any:
        return self.fetch_keyed(ids, key)

    def fetch_loose(self, ids: np.ndarray, key: int) -> Any:
        return self.fetch_keyed(ids, key)
