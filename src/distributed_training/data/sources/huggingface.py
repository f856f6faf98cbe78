"""Text and images of the Hugging Face `datasets` library, from the Hub or from files: see `data.text`.

`data.args.name` is a dataset on the Hub; without it `data.root` is a csv, json, parquet, text or arrow file, a folder
of them, or one that `save_to_disk` made. `data.args.tokenizer` makes the inputs, of images too.
"""

from __future__ import annotations

from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.split import hold_out
from distributed_training.data.text.settings import HuggingFaceArguments


def load(config: DataConfig) -> Splits:
    """Batches as dicts of `input_ids`, `attention_mask` and `labels`, or of `pixel_values` and `labels`."""
    arguments = read_arguments(HuggingFaceArguments, config)
    from distributed_training.data.text.loading import load_splits
    from distributed_training.data.text.processing import processing_for

    where = f"data.args.name={arguments.name}" if arguments.name is not None else config.root
    train, validation = load_splits(arguments, config.root)
    processing = processing_for(train, arguments.tokenizer, arguments, where, arguments.tokenizer_revision)
    dataset = processing.process(train)
    if validation is None:
        return hold_out(dataset, config.validation_fraction)
    return Splits(dataset, processing.process(validation, "validation"))
