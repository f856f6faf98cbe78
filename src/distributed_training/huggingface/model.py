"""Models and tokenizers of the Hub or of a folder, for those who write Python: what `model.name=huggingface` builds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from distributed_training.config import ModelConfig
from distributed_training.data.text.tokenizers import load_image_processor, load_tokenizer
from distributed_training.models import get_model
from distributed_training.models.huggingface import name_labels

__all__ = ["load_image_processor", "load_model", "load_tokenizer"]


def load_model(checkpoint: str, task: str, *, labels: Sequence[str] | int | None = None, **settings: Any) -> nn.Module:
    """A model of transformers, ready to train.

        model = load_model("distilbert-base-uncased", "sequence_classification", labels=["bad", "good"])
        model = load_model("meta-llama/Llama-3.2-1B", "causal_lm", lora={"rank": 8})

    Args:
        checkpoint: name on the Hub, or a folder that `save_pretrained` made.
        task: sequence_classification, token_classification, causal_lm or image_classification.
        labels: names of the classes, or their number; left out, those of the checkpoint.
        settings: further `model.args`: revision, dtype, attention, lora, quantization, from_scratch, overrides.
    """
    number = labels if isinstance(labels, int) or labels is None else len(labels)
    args = {"checkpoint": str(checkpoint), "task": task, **settings}
    model = get_model("huggingface")(ModelConfig(name="huggingface", num_classes=number, args=args))
    if labels is not None and not isinstance(labels, int):
        name_labels(model, list(labels))
    return model
