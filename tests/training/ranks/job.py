"""A training as a user writes it, run alone or in every rank of a job: `job.py OUT [key=value...]`.

What it came to goes to OUT, so that a test can compare worlds: the losses, the metrics, the predictions, the weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from distributed_training import Callback, Config, Trainer
from distributed_training.config.load import config_from_layers, parse_override

SAMPLES, HELD_OUT, CLASSES = 103, 37, 3  # nothing that 2 or 3 ranks or 2 parts divide


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 6, generator=generator)
    return inputs, inputs[:, 0, :CLASSES].argmax(1)


def model(with_batchnorm: bool) -> nn.Module:
    torch.manual_seed(5)
    middle = [nn.BatchNorm1d(8)] if with_batchnorm else []
    return nn.Sequential(nn.Conv1d(2, 8, 3), *middle, nn.Tanh(), nn.Flatten(), nn.Linear(32, CLASSES))


class Curve(Callback):
    """Loss of every step over all ranks, and the rows that a user's own metric would see."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seen: list[list[float]] = []

    def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        self.losses.append(float(trainer.strategy.reduce(loss)))
        inputs = trainer.engine.batch.data[0]  # type: ignore[union-attr]
        self.seen.append(trainer.gather_for_metrics({"first": inputs[:, 0, 0]})["first"].tolist())


def main() -> None:
    out, words = Path(sys.argv[1]), sys.argv[2:]
    own = {word.split("=")[0]: word.split("=")[1] for word in words if word.startswith("job.")}
    base = {
        "training": {"batch_size": 17, "epochs": 3, "schedule": "constant", "warmup_epochs": 0, "log_every": 4},
        "run": {"progress": "off", "root": str(out.parent / "runs"), "name": out.name, "deadline": 60},
    }
    layers = [("test", base), *(("words", parse_override(w)) for w in words if not w.startswith("job."))]
    config: Config = config_from_layers(layers)
    net = model("job.batchnorm" in own)
    adam = own.get("job.optimizer") == "adamw"
    optimizer: torch.optim.Optimizer
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01) if adam else torch.optim.SGD(net.parameters(), 0.02, 0.9)
    curve = Curve()
    metrics = {"f1": MulticlassF1Score(CLASSES), "auroc": MulticlassAUROC(CLASSES, thresholds=None)}
    trainer = Trainer(net, optimizer, config=config, callbacks=[curve], metrics=metrics, device="cpu")
    held_out = data(int(own.get("job.held_out", HELD_OUT)), 2)
    result = trainer.train(data(SAMPLES, 1), held_out)
    predictions = trainer.predict(held_out)
    state = trainer.strategy.state()
    summary = {
        "world": trainer.strategy.world_size,
        "metrics": {k: v for k, v in result.metrics.items() if k not in ("samples_per_second", "lr", "epoch")},
        "losses": curve.losses,
        "seen": curve.seen,
        "status": result.status,
        "run_dir": str(result.run_dir),
        "evaluated": trainer.evaluate(held_out),
    }
    if trainer.strategy.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.json").write_text(json.dumps(summary))
        weights = {name: value.detach().clone().contiguous() for name, value in state["model"].items()}
        save_file({**weights, "predictions": predictions}, out / "tensors.safetensors")
    trainer.close()


if __name__ == "__main__":
    main()
