"""A stream of texts as a stream of token ids, for data that is read once from its beginning to its end.

Samples have no numbers here, so the order is the stream's, every rank reads all of it and keeps its part, and a resume
reads past what it has seen: exact as long as the stream gives the same again. Data with numbers has none of these
limits: `data.text.streams` keeps the beginning of a stream on disk for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from distributed_training.data.text.packing import Packer
from distributed_training.data.text.tokenising import Tokenising
from distributed_training.data.text.tokens import NOT_JUDGED
from distributed_training.runtime.errors import ConfigError, DataError

_AT_ONCE = 256  # samples that are tokenised in one call


class TokenStream(IterableDataset[dict[str, Tensor]]):
    """Samples of one length each: packed blocks, or texts padded to `max_length`."""

    def __init__(self, stream: Any, tokenising: Tokenising) -> None:
        settings = tokenising.settings
        if not settings.packing and settings.padding != "max_length":
            raise ConfigError(
                "a stream is put into batches before its lengths are known: use packing=True or padding='max_length'"
            )
        if not settings.packing and tokenising.most is None:
            raise ConfigError("padding='max_length' needs max_length: the tokenizer knows no limit")
        self._stream, self._tokenising = stream, tokenising
        labels = tokenising.labels
        self.classes = labels.names if labels is not None else None
        self.num_classes = labels.count if labels is not None else None

    def set_epoch(self, epoch: int) -> None:
        """Let a stream that shuffles do it anew."""
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._packed() if self._tokenising.settings.packing else self._padded()

    def _tokenised(self) -> Iterator[dict[str, list[Any]]]:
        rows, first = iter(self._stream), 0
        while some := list(islice(rows, _AT_ONCE)):
            batch = {name: [row[name] for row in some] for name in self._tokenising.columns.used}
            yield self._tokenising(batch, list(range(first, first + len(some))))
            first += len(some)

    def _packed(self) -> Iterator[dict[str, Tensor]]:
        block = self._tokenising.block
        packer = Packer(block)
        for batch in self._tokenised():
            tokens = packer.add(np.fromiter((token for row in batch["input_ids"] for token in row), dtype=np.int32))
            for row in torch.from_numpy(tokens.astype(np.int64)).split(block):
                if len(row):
                    yield {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row}

    def _padded(self) -> Iterator[dict[str, Tensor]]:
        width, padding, number = self._tokenising.most, self._tokenising.padding, 0
        assert width is not None
        fillings = {"input_ids": padding.token, "token_type_ids": padding.kind, "labels": NOT_JUDGED}
        for batch in self._tokenised():
            for row in (dict(zip(batch, values)) for values in zip(*batch.values())):
                length = len(row["input_ids"])
                if length > width:
                    raise DataError(
                        f"{self._tokenising.where}, sample {number}: {length} tokens, but the model takes {width}; use "
                        "truncation=True"
                    )
                number += 1
                if length == 0 and self._tokenising.labels is None:
                    continue
                row["attention_mask"] = [1] * length
                if self._tokenising.labels is None:
                    row["labels"] = row["input_ids"]
                yield {name: _filled(row[name], width, fillings.get(name, 0), padding.side) for name in _order(row)}


def _order(row: dict[str, Any]) -> list[str]:
    return [name for name in ("input_ids", "attention_mask", "token_type_ids", "labels") if name in row]


def _filled(values: Any, width: int, filling: int, side: str) -> Tensor:
    if not isinstance(values, list):
        return torch.tensor(values)
    rest = [filling] * (width - len(values))
    return torch.tensor(rest + values if side == "left" else values + rest)
