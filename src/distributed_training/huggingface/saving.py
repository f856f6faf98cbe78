"""Models written as transformers writes them: safetensors, config, tokenizer; adapters by themselves or merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import ModelError
from distributed_training.runtime.hub import hub_errors, hub_token


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    weights: Mapping[str, Tensor] | None = None,
    merge: bool = False,
) -> Path:
    """Write a model so that `from_pretrained` of plain transformers (and peft, for adapters) takes it.

    Args:
        folder: where to; made if it is not there.
        tokenizer: written beside it, or the image processor.
        weights: those to write, by name, where the model's own are divided among processes; left out, its own.
        merge: add adapters to the weights they belong to.
    """
    folder = Path(folder)
    if not hasattr(model, "save_pretrained"):
        raise ModelError(
            f"{type(model).__name__} has no save_pretrained: only models of transformers and peft can be saved so; "
            "the run's checkpoints hold the weights of all others"
        )
    own = dict(weights) if weights is not None else None
    adapted: Any = model
    # transformers imports DeepSpeed where that is installed, which looks for a device and says so.
    with environment_for_a_while(**({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"})):
        if merge and hasattr(model, "merge_and_unload"):
            _merged(adapted, own).save_pretrained(folder)
        else:
            adapted.save_pretrained(folder, state_dict=own)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def _merged(model: Any, weights: Mapping[str, Tensor] | None) -> Any:
    """The model with its adapters added to its weights.

    Made from the checkpoint again, in full: the one here may be divided among processes, or rounded to a few bits.
    """
    if weights is None and not getattr(model, "weights_elsewhere", None):
        return copy.deepcopy(model).merge_and_unload()
    import peft

    inner, settings = model.get_base_model(), model.peft_config[model.active_adapter]
    base, revision = settings.base_model_name_or_path, settings.revision or "main"
    kind: Any = next(k for k in type(inner).__mro__ if k.__module__.startswith("transformers."))
    config = copy.deepcopy(inner.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if getattr(model, "weights_elsewhere", None):
        with hub_errors(f"the frozen weights of {base}", ModelError):
            fresh = kind.from_pretrained(
                base, config=config, revision=revision, token=hub_token(), ignore_mismatched_sizes=True
            )
    else:  # all of them are in `weights`
        fresh = kind(config)
    whole = peft.get_peft_model(fresh, copy.deepcopy(settings))
    result = whole.load_state_dict(weights if weights is not None else model.state_dict(), strict=False)
    missing = set(result.missing_keys) - set(getattr(model, "weights_elsewhere", ()))
    if missing or result.unexpected_keys:
        raise ModelError(
            f"the adapters cannot be merged into {base}: {sorted(missing or result.unexpected_keys)[:3]} do not fit; "
            "save them by themselves (merge=False)"
        )
    if getattr(inner, "generation_config", None) is not None:
        fresh.generation_config = copy.deepcopy(inner.generation_config)
    return whole.merge_and_unload()
