"""Load a dataset and make it ready for a model: the first two stages of a training with Hugging Face libraries.

data = load_data("examples/text/topics")
ready = process(data, tokenizer="data/tiny/sequence-classification")
ready["train"][0]   # {'input_ids': tensor([...]), 'attention_mask': ..., 'labels': tensor(0)}
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from distributed_training.config.check import check_types, did_you_mean
from distributed_training.data.text.loading import load_all, take
from distributed_training.data.text.processing import process_splits
from distributed_training.data.text.settings import LoadSettings, ProcessSettings
from distributed_training.runtime.errors import ConfigError


def load_data(source: str | Path, *, split: str | None = None, **settings: Any) -> Any:
    """Every split of a dataset by name, or the one asked for, as the `datasets` library has them.

    Args:
        source: a file or folder (csv, json, parquet, text, arrow, images, or of `save_to_disk`), or else a name on the
            Hub. A file or folder of that name goes first.
        split: one split, a part (`train[:80%]`) or a sum of them; left out, a dict of all.
        settings: subset, revision, format, options, samples, streaming: see `LoadSettings`. A stream without `samples`
            is given as it is, to be read from its beginning to its end.
    """
    local = Path(source).expanduser()
    is_path = local.exists() or str(source).startswith((".", "/", "~"))
    chosen = _settings(LoadSettings, {**settings, "name": None if is_path else str(source)}, "load_data")
    splits, where = load_all(chosen, local if is_path else None)
    if chosen.streaming and chosen.samples is None:
        return splits if split is None else splits[split]
    if split is not None:
        return take(splits, split, where, "split", chosen)
    return {name: take(splits, name, where, "split", chosen) for name in splits}


def process(data: Any, tokenizer: Any, **settings: Any) -> Any:
    """What a model takes, from a dataset or a dict of splits: token ids, masks and labels as torch tensors.

    Args:
        data: what `load_data` gave, or any dataset of the `datasets` library. Labels get their numbers from the split
            `train`.
        tokenizer: of transformers, or its name on the Hub or folder; an image processor for images.
        settings: task, text, text_pair, label, labels, num_labels, max_length, truncation, padding, packing, num_proc,
            ...: see `ProcessSettings`.

    The results are datasets for every trainer here; they have `classes` and `num_classes`, and `to_datasets()`.
    """
    return process_splits(data, tokenizer, _settings(ProcessSettings, settings, "process"))


def _settings(kind: Any, given: dict[str, Any], function: str) -> Any:
    known = [field.name for field in dataclasses.fields(kind)]
    for key in given:
        if key not in known:
            names = ", ".join(name for name in known if name in inspect.signature(kind).parameters)
            raise ConfigError(f"{function}() does not take {key}; it takes {names}{did_you_mean(key, known)}")
    settings = kind(**given)
    check_types(settings, function)
    return settings
