"""Token ids fetched in whole batches, straight from Arrow files in memory or on disk, and padded there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.arrays import fingerprint_of
from distributed_training.data.base import KeyedDataset
from distributed_training.data.text.ragged import Ragged
from distributed_training.runtime.errors import DataError

NOT_JUDGED = -100
"""The label of a position that no loss and no metric looks at."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How samples of different length become rows of one batch."""

    token: int = 0
    """What stands in `input_ids` behind a sample."""
    kind: int = 0
    """What stands in `token_type_ids` there."""
    side: str = "right"
    mode: Literal["longest", "max_length", "none"] = "longest"
    length: int | None = None
    """The fixed length of `max_length`."""
    multiple: int | None = None
    """Lengths are raised to a multiple of this, but not beyond `most`."""
    most: int | None = None
    """What the model takes."""


class TokenDataset(KeyedDataset):
    """Tokenised samples: a batch is a dict of `input_ids`, `attention_mask`, `token_type_ids` for models that take
    them, and `labels`, all int64 (labels of values: float32). `dataset[3]` is one sample as torch tensors.

    Its table is a `datasets.Dataset` without padding and without what follows from the ids: the attention mask, and
    the labels of a language model.
    """

    drew = False  # nothing here is random

    def __init__(
        self,
        table: Any,
        padding: Padding,
        *,
        labels_are_inputs: bool = False,
        classes: list[str] | None = None,
        num_classes: int | None = None,
        name: str = "tokens",
    ) -> None:
        self.table, self.padding, self.name = table, padding, name
        self.labels_are_inputs, self.classes, self.num_classes = labels_are_inputs, classes, num_classes
        self._read()

    @property
    def column_names(self) -> list[str]:
        """The keys of a batch."""
        kinds = ["token_type_ids"] if "token_type_ids" in self._lists else []
        labels = ["labels"] if self.labels_are_inputs or "labels" in self.table.column_names else []
        return ["input_ids", "attention_mask", *kinds, *labels]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, padding not counted."""
        return self._lists["input_ids"].lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        length = len(self)
        if not -length <= sample < length:
            raise IndexError(f"{self.name} has {length} samples, and no sample {sample}")
        return {key: value[0] for key, value in self.fetch(np.array([sample % length])).items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[sample] for sample in range(len(self)))

    def fetch_keyed(self, ids: np.ndarray, key: int) -> dict[str, Tensor]:
        lengths = self.lengths[ids]
        width = self._width(ids, lengths)
        places = np.arange(width)
        if self.padding.side == "left":
            inside = places >= width - lengths[:, None]
        else:
            inside = places < lengths[:, None]
        batch = {"input_ids": self._padded("input_ids", ids, inside, self.padding.token)}
        batch["attention_mask"] = torch.from_numpy(inside.astype(np.int64))
        if "token_type_ids" in self._lists:
            batch["token_type_ids"] = self._padded("token_type_ids", ids, inside, self.padding.kind)
        if self.labels_are_inputs:
            batch["labels"] = batch["input_ids"].masked_fill(torch.from_numpy(~inside), NOT_JUDGED)
        elif "labels" in self._lists:
            batch["labels"] = self._padded("labels", ids, inside, NOT_JUDGED)
        elif self._labels is not None:
            batch["labels"] = torch.from_numpy(self._labels[ids])
        return batch

    def repeats(self, ids: np.ndarray) -> bool:
        return self.sample_bytes is not None  # otherwise its padding depends on what it is fetched beside

    def fingerprint(self) -> str:
        arrays = {f"{name}.lengths": column.lengths for name, column in self._lists.items()}
        if self._labels is not None:
            arrays["labels"] = self._labels
        digest = hashlib.sha256(fingerprint_of("tokens", arrays).encode())
        for name in sorted(self._lists):
            digest.update(self._lists[name].digest())
        digest.update(repr((asdict(self.padding), self.labels_are_inputs, self.classes)).encode())
        return digest.hexdigest()[:16]

    def to_datasets(self) -> Any:
        """A `datasets.Dataset` with all columns, in torch format: for other tools that read those."""

        def complete(batch: dict[str, Any], ids: list[int]) -> dict[str, Any]:
            rows = [self[number] for number in ids]
            return {name: [row[name].tolist() for row in rows] for name in self.column_names}

        return self.table.map(complete, batched=True, with_indices=True).with_format("torch")

    def _width(self, ids: np.ndarray, lengths: np.ndarray) -> int:
        padding = self.padding
        if padding.mode == "max_length" and padding.length is not None:
            return padding.length
        if not len(lengths):  # the shape of a sample, no rows
            return self._width(ids, self.lengths[:1]) if len(self) else 0
        longest, shortest = int(lengths.max()), int(lengths.min())
        if padding.mode == "none" and longest != shortest:
            raise DataError(
                f"{self.name}: samples {ids[int(lengths.argmin())]} and {ids[int(lengths.argmax())]} of one batch have "
                f"{shortest} and {longest} tokens, but data.args.padding=none; set it to longest or max_length"
            )
        if padding.multiple is not None:
            raised = -(-longest // padding.multiple) * padding.multiple
            longest = max(longest, raised if padding.most is None else min(raised, padding.most))
        return longest

    def _padded(self, name: str, ids: np.ndarray, inside: np.ndarray, filling: int) -> Tensor:
        values = self._lists[name].gather(ids)
        if values.size == inside.size:
            return torch.from_numpy(values.astype(np.int64).reshape(inside.shape))
        rows = np.full(inside.shape, filling, dtype=np.int64)
        rows[inside] = values
        return torch.from_numpy(rows)

    def _read(self) -> None:
        """Look at the table's columns: views of the Arrow memory, nothing is copied but lengths and single labels."""
        self._lists = {
            name: Ragged(self.table, name)
            for name in ("input_ids", "token_type_ids", "labels")
            if name in self.table.column_names and Ragged.is_list(self.table, name)
        }
        self._labels: np.ndarray | None = None
        if "labels" in self.table.column_names and "labels" not in self._lists:
            column = np.asarray(self.table.with_format("numpy")["labels"][:])
            self._labels = column.astype(np.float32 if column.dtype.kind == "f" else np.int64)
        lengths = self.lengths
        fixed = self.padding.length if self.padding.mode == "max_length" else None
        if fixed is not None or (len(lengths) and lengths.min() == lengths.max()):
            width = fixed if fixed is not None else self._width(np.zeros(1, dtype=np.int64), lengths[:1])
            self.alone = True
            wide = len(self._lists) + 1 + int(self.labels_are_inputs)  # the attention mask is one, too
            self.sample_bytes = 8 * (width * wide + int(self._labels is not None))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_lists", "_labels"):  # views of memory that the table has
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._read()
