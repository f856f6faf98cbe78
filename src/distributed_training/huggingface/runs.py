"""A trained run as a folder that transformers loads: the model of one of its checkpoints, its tokenizer, its card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.huggingface.card import Card
from distributed_training.huggingface.model import load_image_processor, load_tokenizer
from distributed_training.huggingface.saving import save
from distributed_training.runtime.errors import ModelError
from distributed_training.training import Trainer


def export(
    trainer: Trainer, folder: str | Path, *, metrics: Mapping[str, float], merge: bool = False, repo: str = ""
) -> Path:
    """Write the model of a trainer, whose weights are loaded, with all that belongs beside it.

    Args:
        folder: where to; made if it is not there.
        metrics: how good these weights are, for the card.
        merge: add adapters to the weights they belong to.
        repo: name that the card gives it; left out, that of the folder.
    """
    config, folder = trainer.config, Path(folder)
    if config.model.name != "huggingface" or config.model.target is not None:
        raise ModelError(
            f"model.name={config.model.target or config.model.name} is no model of transformers, which alone can be "
            "written so; for such a run set model.name=huggingface (docs/huggingface.md)"
        )
    weights = trainer.engine.strategy.state().get("model")
    save(trainer.model, folder, tokenizer=_tokenizer(config), weights=weights, merge=merge)
    Card.of_training(trainer.model, config, metrics, merged=merge).write(folder, repo or folder.resolve().name)
    return folder


def _tokenizer(config: Config) -> Any:
    """What made the inputs of the model: the data's tokenizer, or else that of the checkpoint."""
    data, model = config.data.args, config.model.args
    own = data.get("tokenizer")
    revision = data.get("tokenizer_revision") if own else model.get("revision")
    load = load_image_processor if "image" in str(model["task"]) else load_tokenizer
    return load(str(own or model["checkpoint"]), revision)
