"""A script whose training is a closure: `spawn` forks it. What it finds is printed as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from distributed_training import Config, Trainer, spawn
from distributed_training.launch.spawn import start_method


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 8)
    y = (x.sum(1) > 0).long()
    config = Config.from_dict({"training": {"epochs": 2, "batch_size": 16}, "run": {"progress": "off"}})

    def train() -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 2)
        trainer = Trainer(model, config=config, device="cpu", run_dir=False)
        loss = trainer.train((x, y), (x, y)).metrics["val_loss"]
        trainer.close()
        return {"weight": model.weight.flatten().tolist(), "strategy": trainer.strategy.name, "loss": loss}

    print(json.dumps({"method": start_method(train), "alone": train(), "ranks": spawn(train, nproc=2)}))  # noqa: T201


if __name__ == "__main__":
    main()
