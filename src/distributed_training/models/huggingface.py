"""Models of the Hugging Face Hub or a folder of `save_pretrained`, by what they are for: `model.name=huggingface`.

What comes back is transformers' own class, whose output has `.loss`: nothing is wrapped around it, so that everything
transformers offers works on it. Adapters and quantised loading are in `models.adapters`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from distributed_training.config import ModelConfig
from distributed_training.models.adapters import LoraArguments, add_lora, quantised_loading
from distributed_training.models.base import Arguments, Shape, read_args
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.hub import hub_errors, hub_token, without_token
from distributed_training.runtime.imports import require

logger = logging.getLogger(__name__)

# What a task is called, and the class of transformers that makes its models.
TASKS = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "causal_lm": "AutoModelForCausalLM",
    "image_classification": "AutoModelForImageClassification",
}
CLASSIFIERS = tuple(task for task in TASKS if task != "causal_lm")


@dataclass(kw_only=True)
class HuggingFaceArguments(Arguments):
    """`model.args` of huggingface."""

    task: Literal["sequence_classification", "token_classification", "causal_lm", "image_classification"]
    """What the model is for; decides its last layer and its loss."""
    checkpoint: str
    """Name on the Hub, or a folder that `save_pretrained` made."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    from_scratch: bool = False
    """Take only the shape of the model from the checkpoint, with fresh weights."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of the weights; auto: that of the checkpoint. `training.precision` decides about the arithmetic."""
    attention: str | None = None
    """Attention kernel: eager, sdpa, flash_attention_2, ... Left out: what transformers chooses."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Load the weights in 8 or 4 bits (bitsandbytes, on a GPU); they are frozen then, so `lora` is needed too."""
    lora: dict[str, Any] | None = None
    """Train low-rank adapters (peft) in place of the weights: rank, alpha, dropout, targets, train_too."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Settings of the checkpoint's own config.json that are to be others, such as `attention_dropout: 0`."""

    def check(self) -> None:
        """Refuse what cannot be trained."""
        if self.quantization != "none" and self.lora is None:
            raise ConfigError(
                f"model.args.quantization={self.quantization} freezes the weights, so that nothing is left to train; "
                "add adapters with model.args.lora={rank: 8}"
            )
        if self.quantization != "none" and self.from_scratch:
            raise ConfigError("model.args.quantization is for trained weights, but model.args.from_scratch=true")

    @property
    def adapters(self) -> LoraArguments | None:
        """The adapters asked for."""
        return LoraArguments.read(self.lora) if self.lora is not None else None


def build(config: ModelConfig, input_shape: Shape | None = None) -> nn.Module:
    """The model a config asks for. `num_classes` is the number of labels of a classifier."""
    for name in ("task", "checkpoint"):
        if name not in config.args:
            raise ConfigError(f"model.name=huggingface needs model.args.{name}" + _hint(name))
    config = dataclasses.replace(config, args={**config.args, "task": str(config.args["task"]).replace("-", "_")})
    return load(read_args(HuggingFaceArguments, config), config.num_classes)


def load(args: HuggingFaceArguments, num_labels: int | None = None) -> nn.Module:
    """A model of transformers, with adapters where asked for."""
    transformers = require("transformers", "hf", "model.name=huggingface")
    adapters = args.adapters  # refused before anything is downloaded
    config = load_config(args, num_labels)
    loader = getattr(transformers, TASKS[args.task])
    where = f"model.args.checkpoint={args.checkpoint}"
    options: dict[str, Any] = {"attn_implementation": args.attention} if args.attention is not None else {}
    if args.from_scratch:
        model, missing = loader.from_config(config, **options), None
        if args.dtype not in ("auto", "float32"):
            model = model.to(dtype=getattr(torch, args.dtype))
    else:
        options |= quantised_loading(args.quantization)
        if num_labels is not None and args.task in CLASSIFIERS:
            options["ignore_mismatched_sizes"] = True  # a head for other labels is made anew
        with _said_plainly(where):
            model, info = loader.from_pretrained(
                args.checkpoint,
                config=config,
                revision=args.revision or "main",
                dtype=args.dtype,
                token=hub_token(),
                output_loading_info=True,
                **options,
            )
        missing = _fresh_weights(info)
        if missing:
            logger.info("%s: new weights for %s", where, ", ".join(sorted(missing)[:4]))
    model.train()  # from_pretrained gives it in evaluation mode
    return add_lora(model, adapters, args, missing) if adapters is not None else model


def load_config(args: HuggingFaceArguments, num_labels: int | None = None) -> Any:
    """The checkpoint's config.json, with the labels of the data and the overrides of the user in it."""
    transformers = require("transformers", "hf", "model.name=huggingface")
    where = f"model.args.checkpoint={args.checkpoint}"
    _check_folder(args.checkpoint)
    with _said_plainly(where):
        config = transformers.AutoConfig.from_pretrained(
            args.checkpoint, revision=args.revision or "main", token=hub_token()
        )
    for name, value in args.overrides.items():
        if not hasattr(config, name):
            raise ConfigError(f"model.args.overrides.{name}: {type(config).__name__} has no such setting")
        setattr(config, name, value)
    if args.task in CLASSIFIERS and num_labels is not None and config.num_labels != num_labels:
        config.num_labels = num_labels  # sets id2label and label2id to LABEL_0, ... too
    if args.task == "sequence_classification" and getattr(config, "pad_token_id", None) is None:
        # Models that read from left to right look for the last token that is no padding.
        config.pad_token_id = config.eos_token_id
    if args.task == "causal_lm":
        config.use_cache = False  # for generating text; a generation config turns it on again
    return config


def name_labels(model: nn.Module, names: Sequence[str] | None) -> None:
    """Put the names of the classes into a model's config, which `save_pretrained` writes beside the weights."""
    config: Any = getattr(model, "config", None)
    if names is None or not hasattr(config, "id2label") or len(names) != getattr(config, "num_labels", None):
        return
    known = [str(config.id2label[n]) for n in range(len(names))]
    if known != list(names) and sorted(known) == sorted(names):
        logger.warning(
            "the checkpoint has its labels in another order (%s) than the data (%s); it is trained anew for the data's",
            ", ".join(known),
            ", ".join(names),
        )
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}


def _check_folder(checkpoint: str) -> None:
    """A path that is no folder of a model would be taken for a name on the Hub, and the error would be about that."""
    path = Path(checkpoint).expanduser()
    looks_like_path = checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1 or path.exists()
    if looks_like_path and not (path / "config.json").is_file():
        what = "holds no config.json" if path.is_dir() else "is no folder"
        raise ModelError(
            f"model.args.checkpoint={checkpoint} {what}; give a name on the Hub or a folder that save_pretrained made"
        )


def _fresh_weights(info: Any) -> frozenset[str]:
    """Names of the weights that the checkpoint did not have, or in another shape."""
    mismatched = [key[0] if isinstance(key, (tuple, list)) else key for key in info.get("mismatched_keys", ())]
    return frozenset([*info.get("missing_keys", ()), *mismatched])


@contextmanager
def _said_plainly(where: str) -> Iterator[None]:
    """What transformers says about a checkpoint that it cannot use, in one line with the setting in front."""
    transformers = require("transformers", "hf", "model.name=huggingface")
    logs, level = transformers.utils.logging, transformers.utils.logging.get_verbosity()
    bars = logs.is_progress_bar_enabled()
    logs.set_verbosity_error()  # every rank would say what is in our own log once
    logs.disable_progress_bar()
    try:
        with hub_errors(where, ModelError):
            yield
    except (ValueError, OSError, ImportError, RuntimeError, KeyError) as error:
        raise ModelError(without_token(f"{where}: {' '.join(str(error).split())[:500]}")) from error
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def _hint(name: str) -> str:
    return f": one of {', '.join(TASKS)}" if name == "task" else ": a name on the Hub, or a folder of save_pretrained"
