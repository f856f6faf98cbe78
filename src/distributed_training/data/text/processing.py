"""Data of any form made ready for a model: one dataset, several splits by name, or a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed_training.data.text.images import ImageProcessing
from distributed_training.data.text.settings import ProcessSettings
from distributed_training.data.text.token_stream import TokenStream
from distributed_training.data.text.tokenising import Tokenising
from distributed_training.data.text.tokenizers import load_image_processor, load_tokenizer
from distributed_training.runtime.errors import ConfigError, DataError


def processing_for(
    train: Any, tokenizer: Any, settings: ProcessSettings, where: str, revision: str | None = None
) -> Any:
    """What is to be done to every sample, found out from the training data; has `process(dataset, split)`.

    `tokenizer` is one, or its name on the Hub or folder; for images, an image processor.
    """
    images = settings.task == "image_classification"
    if tokenizer is None:
        raise ConfigError(
            "data.args.tokenizer is not set: a name on the Hub or a folder, such as ${model.args.checkpoint}"
        )
    if isinstance(tokenizer, str):
        tokenizer = (load_image_processor if images else load_tokenizer)(tokenizer, revision)
    if images:
        return ImageProcessing(train, tokenizer, settings, where)
    return Tokenising.for_data(train, tokenizer, settings, where)


def process_splits(data: Any, tokenizer: Any, settings: ProcessSettings, where: str = "the data") -> Any:
    """A dataset, or every split of a mapping, ready for a model. Labels are numbered by the split `train`."""
    if is_stream(data):
        return _streams({"": data}, tokenizer, settings, where)[""]
    if not isinstance(data, Mapping):
        _refuse_empty(data, where)
        return processing_for(data, tokenizer, settings, where).process(data)
    if not data:
        raise DataError(f"{where}: holds no split")
    for name, split in data.items():
        if not is_stream(split):
            _refuse_empty(split, f"{where}, split {name}")
    if any(is_stream(split) for split in data.values()):
        return _streams(data, tokenizer, settings, where)
    first = data["train"] if "train" in data else next(iter(data.values()))
    processing = processing_for(first, tokenizer, settings, where)
    return {name: processing.process(split, name) for name, split in data.items()}


def is_stream(data: Any) -> bool:
    """Whether samples can only be read one after the other."""
    return hasattr(data, "__iter__") and not hasattr(data, "__len__")


def _streams(data: Mapping[str, Any], tokenizer: Any, settings: ProcessSettings, where: str) -> dict[str, Any]:
    if settings.task == "image_classification":
        raise ConfigError("a stream of images is not processed here; say how many samples to keep on disk")
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    made = {}
    for name, stream in data.items():
        if stream.features is None:
            stream = stream._resolve_features()
        numbered = settings.task == "causal_lm" or settings.labels is not None or _has_names(stream, settings, where)
        if not numbered:
            raise ConfigError("the labels of a stream are not known before it was read: give their names with labels=")
        made[name] = TokenStream(stream, Tokenising.for_data(stream, tokenizer, settings, where))
    return made


def _has_names(stream: Any, settings: ProcessSettings, where: str) -> bool:
    from distributed_training.data.text.columns import choose_columns

    feature = stream.features[choose_columns(stream.features, settings, where).label]
    feature = getattr(feature, "feature", feature)
    return hasattr(feature, "names") or str(getattr(feature, "dtype", "")).startswith("float")


def _refuse_empty(dataset: Any, where: str) -> None:
    if len(dataset) == 0:
        raise DataError(f"{where}: holds no samples")
