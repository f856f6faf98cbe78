"""Low-rank adapters (peft) on a frozen model, and loading it in 8 or 4 bits (bitsandbytes).

The frozen weights are those of the checkpoint, so our own checkpoints leave them out: the model says so by
`weights_elsewhere`, and by `base_fingerprint`, which a resume compares.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distributed_training.config.check import between, check_types, did_you_mean, positive
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.imports import require
from distributed_training.runtime.world import read_world

if TYPE_CHECKING:
    from distributed_training.models.huggingface import HuggingFaceArguments

logger = logging.getLogger(__name__)

# peft's names of our tasks. It keeps the last layer of the first two trained by itself.
_TASK_TYPES = {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS", "causal_lm": "CAUSAL_LM"}
_HEADS = ("classifier", "score", "head")
_SAMPLES = 64  # values of a frozen tensor that its fingerprint looks at


@dataclass(kw_only=True)
class LoraArguments:
    """`model.args.lora`."""

    rank: int = 8
    """Rank of each adapter: more can learn more, and takes more memory."""
    alpha: float = 16.0
    """Scale of the adapters, divided by the rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs dropped while training."""
    targets: list[str] = field(default_factory=list)
    """Layers that get one, by the end of their names; `all-linear`: all but the last. Left out: peft's choice."""
    train_too: list[str] = field(default_factory=list)
    """Layers trained as a whole beside the adapters. The last layer of a classifier always is."""

    def __post_init__(self) -> None:
        check_types(self, "model.args.lora")
        positive("model.args.lora.rank", self.rank)
        positive("model.args.lora.alpha", self.alpha)
        between("model.args.lora.dropout", self.dropout, 0, 1)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LoraArguments:
        """The settings of a mapping; an unknown one is an error that names the nearest known."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                hint = did_you_mean(str(key), known) or f"; there are {', '.join(known)}"
                raise ConfigError(f"unknown setting model.args.lora.{key}{hint}")
        return cls(**values)


def add_lora(
    model: Any, lora: LoraArguments, args: HuggingFaceArguments, fresh: Collection[str] | None = None
) -> nn.Module:
    """The model with adapters, all else frozen.

    `fresh` names the weights that did not come from the checkpoint, None meaning all: those are kept in our own.
    """
    peft = require("peft", "hf", "model.args.lora")
    if args.quantization != "none":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    train_too = list(lora.train_too)
    if args.task == "image_classification":
        train_too += [name for name, _ in model.named_children() if name in _HEADS]
    targets: Any = "all-linear" if lora.targets == ["all-linear"] else lora.targets or None
    settings = peft.LoraConfig(
        task_type=_TASK_TYPES.get(args.task),
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=train_too or None,
        revision=args.revision,
    )
    try:
        adapted: Any = peft.get_peft_model(model, settings)
    except (ValueError, KeyError) as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ModelError(
            f"model.args.lora does not fit {type(model).__name__}: {' '.join(str(error).split())[:300]}; "
            f"set model.args.lora.targets to all-linear, or to some of {', '.join(linear[:8])}"
        ) from error
    frozen = {name: p for name, p in adapted.named_parameters() if not p.requires_grad}
    if fresh is not None:
        own = {name for name in frozen if _base_name(name) in fresh and "original_module" not in name}
        adapted.weights_elsewhere = frozenset(frozen.keys() - own)
        adapted.base_fingerprint = fingerprint({n: p for n, p in frozen.items() if _base_name(n) not in fresh})
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    total = sum(p.numel() for p in adapted.parameters())
    logger.info("lora: %s of %s parameters are trained (%.2f%%)", f"{trained:,}", f"{total:,}", 100 * trained / total)
    result: nn.Module = adapted
    return result


def quantised_loading(quantization: str) -> dict[str, Any]:
    """What `from_pretrained` is told for weights in 8 or 4 bits; nothing for none."""
    if quantization == "none":
        return {}
    require("bitsandbytes", "quantization", f"model.args.quantization={quantization}")
    transformers = require("transformers", "hf", "model.name=huggingface")
    if quantization == "int8":
        settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    # They are made on the device where they stay: bitsandbytes packs them in its own way.
    place: Any = read_world().local_rank if torch.cuda.is_available() else "cpu"
    return {"quantization_config": settings, "device_map": {"": place}}


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A short string equal for equal weights: names, shapes, and values evenly spread over each tensor."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().flatten()
        digest.update(f"{name}:{tuple(weights[name].shape)}:{tensor.dtype}".encode())
        at = torch.linspace(0, max(tensor.numel() - 1, 0), min(_SAMPLES, tensor.numel()), dtype=torch.float64).long()
        digest.update(tensor[at.to(tensor.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _base_name(name: str) -> str:
    """What a parameter was called before peft took the model over."""
    plain = name.removeprefix("base_model.model.")
    for layer in (".base_layer.", ".original_module."):
        plain = plain.replace(layer, ".")
    return plain
