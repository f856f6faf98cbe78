"""Datasets of the `datasets` library as the loop wants them: samples by number, batches padded to their longest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from distributed_training.data.base import Dataset
from distributed_training.data.text.ragged import Ragged
from distributed_training.data.text.tokens import Padding, TokenDataset
from distributed_training.data.torch_dataset import as_dataset
from distributed_training.runtime.errors import DataError

_TAKEN = ("input_ids", "attention_mask", "token_type_ids", "pixel_values", "labels")


def as_planned(data: Any, tokenizer: Any = None) -> Any:
    """What `Trainer.train` takes: a tokenised `datasets.Dataset` with its texts padded, all else as it is."""
    if isinstance(data, Dataset) or type(data).__module__.partition(".")[0] != "datasets":
        return data
    if not hasattr(data, "__getitem__"):
        raise DataError(
            "a streamed dataset has no sample numbers, so that no run on it could be repeated; keep its first samples "
            "with load_data(..., streaming=True, samples=N)"
        )
    if "labels" not in data.column_names and "label" in data.column_names:
        data = data.rename_column("label", "labels")
    _check_columns(data.column_names)
    if "input_ids" in data.column_names and not _has_padding(data):
        return TokenDataset(data, _padding(data, tokenizer), name="datasets.Dataset")
    taken = [name for name in data.column_names if name in _TAKEN]
    return as_dataset(data.select_columns(taken).with_format("torch"), _stack)


def _check_columns(columns: list[str]) -> None:
    there = f"the dataset has the columns {', '.join(columns)}"
    if "input_ids" not in columns and "pixel_values" not in columns:
        raise DataError(
            f"{there}, but neither input_ids nor pixel_values: tokenise it first, with process(data, tokenizer)"
        )
    if "labels" not in columns:
        raise DataError(f"{there}, but no labels to train on")


def _has_padding(data: Any) -> bool:
    """Whether somebody has filled the texts up already: then what is text is told by the attention mask alone."""
    if "attention_mask" not in data.column_names or not Ragged.is_list(data, "attention_mask"):
        return False
    mask = Ragged(data, "attention_mask")
    return not bool(mask.gather(np.arange(len(data))).all())


def _padding(data: Any, tokenizer: Any) -> Padding:
    token = getattr(tokenizer, "pad_token_id", None)
    lengths = Ragged(data, "input_ids").lengths
    if token is None and len(lengths) and lengths.min() != lengths.max():
        raise DataError(
            "texts of unequal length need a tokenizer that knows what to pad with: give the trainer tokenizer=, and "
            "one without a pad token tokenizer.pad_token = tokenizer.eos_token"
        )
    kind = getattr(tokenizer, "pad_token_type_id", 0) or 0
    return Padding(token=token or 0, kind=kind, side=getattr(tokenizer, "padding_side", "right"))


def _stack(rows: Any) -> dict[str, torch.Tensor]:
    """Samples of equal shapes as one batch."""
    if isinstance(rows, dict):  # the library's answer to several numbers at once
        return {name: torch.as_tensor(values) for name, values in rows.items()}
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
