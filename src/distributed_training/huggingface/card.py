"""The model card of a published model: what it is, what it was trained on and how, how good it is, how to use it."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from distributed_training.config import Config
from distributed_training.models.huggingface import TASKS
from distributed_training.runtime.imports import require
from distributed_training.runtime.run_directory import FROM_PYTHON

# What the Hub calls a task; the word that the class of such a model ends in is that of its Auto class.
_PIPELINES = {
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "causal_lm": "text-generation",
    "image_classification": "image-classification",
}
_VERSIONS = ("distributed-training", "torch", "transformers", "datasets", "tokenizers", "peft", "accelerate")
_SETTINGS = (
    "training.epochs",
    "training.batch_size",
    "training.optimizer",
    "training.lr",
    "training.schedule",
    "training.warmup_epochs",
    "training.weight_decay",
    "training.gradient_clip",
    "training.precision",
    "training.seed",
)
_EXAMPLES = {
    "text-classification": '"A sentence to be judged."',
    "token-classification": '"Ada Lovelace lived in London."',
    "text-generation": '"Once upon a time"',
    "image-classification": '"photograph.jpg"',
}


@dataclass(frozen=True)
class Card:
    """The facts of a card."""

    model: str
    """Class of the model."""
    task: str | None
    """One of `TASKS`, where it is one of these."""
    parameters: int
    """Weights in all."""
    trained: int
    """Weights that were trained."""
    base: str | None = None
    """The checkpoint that it started from."""
    adapters: bool = False
    """Whether the files are adapters, to be put on `base`."""
    dataset: str | None = None
    """What it was trained on."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was trained."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """How good it is on held-out data."""

    @classmethod
    def of_training(
        cls, model: nn.Module, config: Config, metrics: Mapping[str, float], *, merged: bool = False
    ) -> Card:
        """The card of a model as a training left it. `merged`: its adapters are added to its weights."""
        inside: Any = getattr(model, "get_base_model", None)
        inner: Any = inside() if inside is not None else model
        # Divided among processes, a parameter may say that it is empty.
        sizes = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in model.parameters()]
        measured = {n.removeprefix("val_"): v for n, v in metrics.items() if n.startswith("val_") and math.isfinite(v)}
        return cls(
            model=type(inner).__name__,
            task=next((task for task, auto in TASKS.items() if type(inner).__name__.endswith(auto[9:])), None),
            parameters=sum(size for size, _ in sizes),
            trained=sum(size for size, is_trained in sizes if is_trained),
            base=_shareable(getattr(getattr(inner, "config", None), "_name_or_path", "") or None),
            adapters=inner is not model and not merged,
            dataset=_dataset(config),
            settings={key: config.get(key) for key in _SETTINGS if config.get(key) is not None}
            | ({"lora": config.model.args["lora"]} if config.model.args.get("lora") else {}),
            metrics=measured,
        )

    def write(self, folder: Path, repo: str) -> Path:
        """Put the card into a folder to be published, as README.md."""
        path = folder / "README.md"
        path.write_text(self.text(repo), encoding="utf-8")
        return path

    def text(self, repo: str) -> str:
        """The card as the Hub wants it: metadata in YAML, then Markdown."""
        name = repo.rpartition("/")[2]
        sections = [
            f"# {name}",
            self._summary(),
            "## How to use",
            f"```python\n{self._usage(repo)}\n```",
        ]
        if self.metrics:
            values = {metric: f"{value:.4f}" for metric, value in self.metrics.items()}
            sections += ["## How good it is", "On held-out data:", _table(("metric", "value"), values)]
        sections += ["## How it was trained", _table(("setting", "value"), self.settings)]
        sections += ["## Versions", _table(("library", "version"), _versions())]
        return f"---\n{self._metadata(name)}\n---\n\n" + "\n\n".join(sections) + "\n"

    def _summary(self) -> str:
        what = f"`{self.model}` of {self.parameters:,} parameters"
        if self.base or self.dataset:
            what += f", fine-tuned from `{self.base}`" if self.base else ", trained"
        if self.dataset:
            what += f" on `{self.dataset}`"
        if self.trained < self.parameters:
            what += f" by low-rank adapters (LoRA): {self.trained:,} of them were trained"
        return f"{what}. Trained with `distributed-training`."

    def _usage(self, repo: str) -> str:
        pipeline = _PIPELINES.get(self.task or "")
        if self.adapters and self.task is not None:
            auto = f"AutoPeftModelFor{TASKS[self.task][12:]}"
            if self.task == "image_classification":
                return f'from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base_model, "{repo}")'
            return f'from peft import {auto}\n\nmodel = {auto}.from_pretrained("{repo}")'
        if pipeline is None:
            return f'from transformers import AutoModel\n\nmodel = AutoModel.from_pretrained("{repo}")'
        run = f'run = pipeline("{pipeline}", model="{repo}")\nprint(run({_EXAMPLES[pipeline]}))'
        return f"from transformers import pipeline\n\n{run}"

    def _metadata(self, name: str) -> str:
        hub = require("huggingface_hub", "hf", "a model card")
        pipeline = _PIPELINES.get(self.task or "")
        results = []
        if pipeline is not None:
            results = [
                hub.EvalResult(
                    task_type=pipeline,
                    dataset_type=self.dataset or "unknown",
                    dataset_name=self.dataset or "held-out data",
                    metric_type=metric,
                    metric_value=round(value, 6),
                )
                for metric, value in self.metrics.items()
            ]
        data = hub.ModelCardData(
            library_name="peft" if self.adapters else "transformers",
            pipeline_tag=pipeline,
            base_model=self.base,
            tags=["distributed-training", *(["lora"] if self.trained < self.parameters else [])],
            model_name=name if results else None,
            eval_results=results or None,
        )
        return str(data.to_yaml())


def _shareable(name: str | None) -> str | None:
    """A name of the Hub as it is; nothing of a path on somebody's machine."""
    if name is None or name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).exists():
        return None
    return name


def _dataset(config: Config) -> str | None:
    """What the data is called, without the place where it lies on somebody's machine."""
    if config.data.dataset == FROM_PYTHON:
        return None
    if config.data.dataset != "huggingface":
        return config.data.dataset
    given = config.data.args.get("name") or config.data.args.get("path") or config.data.root
    return _shareable(str(given)) or Path(str(given)).name or None


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _table(head: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
