"""Small trainings of transformers' models, described by plain values: run alone in a test, or by ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training import ArrayDataset, Callback, Config, Trainer
from distributed_training.huggingface import load_model, save

SAMPLES, BATCH, LONGEST = 20, 8, 12
NO_DROPOUT = {
    "sequence_classification": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "token_classification": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "causal_lm": {"attention_dropout": 0.0},
}


class Losses(Callback):
    """The loss of every step, over all ranks."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        self.found.append(trainer.strategy.reduce(loss.float().clone()))

    @property
    def values(self) -> list[float]:
        return [float(loss) for loss in self.found]


def folder_of(task: str) -> str:
    """What the script that makes tiny models calls a task."""
    return task.replace("_", "-")


def make_model(tiny: Path, task: str, **settings: Any) -> nn.Module:
    """A tiny model without dropout, always the same."""
    torch.manual_seed(0)
    labels = 3 if task != "causal_lm" else None
    return load_model(str(tiny / folder_of(task)), task, labels=labels, overrides=NO_DROPOUT[task], **settings)


def make_data(task: str, vocabulary: int, samples: int = SAMPLES) -> ArrayDataset:
    """Texts of very different length, padded, with what is padding not judged."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, vocabulary, (samples, LONGEST), generator=generator)
    lengths = 2 + torch.arange(samples) * 7 % (LONGEST - 1)
    mask = (torch.arange(LONGEST)[None] < lengths[:, None]).long()
    if task == "sequence_classification":
        labels = ids[:, 0] % 3
    else:
        labels = (ids if task == "causal_lm" else ids % 3).masked_fill(mask == 0, -100)
    arrays = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    return ArrayDataset(arrays, num_classes=None if task == "causal_lm" else 3)


def settings(**changed: Any) -> Config:
    """A short training; keys have `__` for a dot."""
    values = {
        "training.epochs": 2,
        "training.batch_size": BATCH,
        "training.lr": 1e-3,
        "training.schedule": "linear",
        "training.warmup_epochs": 0,
        "training.gradient_clip": 1.0,
        "training.device": "cpu",
        "run.progress": "off",
        "run.deadline": 60.0,
        "checkpoint.keep": 5,
        **{key.replace("__", "."): value for key, value in changed.items()},
    }
    return Config().replace(**values)


def train(case: dict[str, Any], tiny: Path) -> dict[str, Any]:
    """What a training of a case came to: losses, validation, size of its checkpoint; its model written if asked for."""
    task = case["task"]
    model: Any = make_model(tiny, task, **case.get("model", {}))
    data = make_data(task, model.config.vocab_size)
    losses = Losses()
    trainer = Trainer(
        model, config=settings(**case.get("settings", {})), callbacks=[losses], run_dir=case.get("run_dir", False)
    )
    try:
        result = trainer.train(data, data, resume=case.get("resume"))
        if case.get("save"):
            weights = trainer.engine.strategy.state().get("model")
            if trainer.strategy.rank == 0:
                save(model, case["save"], weights=weights, merge=case.get("merge", False))
            trainer.strategy.barrier()
        found = {"losses": losses.values, "val_loss": result.metrics["val_loss"], "steps": result.steps}
        assert all(math.isfinite(loss) for loss in found["losses"])
        return found
    finally:
        trainer.close()
