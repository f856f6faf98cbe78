"""Small models, data and trainers for the tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed_training.config import Config
from distributed_training.training import Callback, Trainer

SAMPLES, FEATURES, CLASSES = 44, 6, 3


def data(samples: int = SAMPLES, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A problem that a line can separate."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, x[:, :CLASSES].argmax(1)


def loader(samples: int = SAMPLES, batch_size: int = 8, **settings: Any) -> DataLoader[Any]:
    """A DataLoader as users write it; 44 samples make 5 batches of 8 and one of 4."""
    return DataLoader(TensorDataset(*data(samples)), batch_size=batch_size, **{"shuffle": True, **settings})


def model(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """The same small network each time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


def config(**changes: Any) -> Config:
    """Settings with dotted keys, double underscores for the dots, that show nothing and log every step."""
    quiet = {"run.progress": "off", "training.log_every": 1, "training.device": "cpu", "training.lr": 0.05}
    return Config().replace(**{**quiet, **{key.replace("__", "."): value for key, value in changes.items()}})


def trainer(net: nn.Module | None = None, *callbacks: Callback, run_dir: Any = False, **changes: Any) -> Trainer:
    """A trainer of the small network that writes no files."""
    return Trainer(net or model(), config=config(**changes), callbacks=callbacks, run_dir=run_dir)


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def assert_same_weights(one: nn.Module | dict[str, Tensor], other: nn.Module | dict[str, Tensor]) -> None:
    """To the last bit."""
    first = one.state_dict() if isinstance(one, nn.Module) else one
    second = other.state_dict() if isinstance(other, nn.Module) else other
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


class Losses(Callback):
    """Remembers the loss of every step by its number."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        self.seen[trainer.cursor.global_step] = float(loss)


class StopAt(Callback):
    """Ends the training after a step, politely or by an exception."""

    def __init__(self, step: int, *, crash: bool = False) -> None:
        self.step, self.crash = step, crash

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        if trainer.cursor.global_step == self.step:
            if self.crash:
                raise RuntimeError("the lights went out")
            trainer.stop("as asked")


class NoisyImages(Dataset[Any]):
    """Images whose augmentation is random in the dataset itself."""

    def __init__(self, samples: int = 20) -> None:
        self.images = torch.randn(samples, 1, 4, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return self.images[at] + 0.1 * torch.randn(1, 4, 4), at % CLASSES


def image_model(dropout: float = 0.3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64, CLASSES),
        )


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    import json

    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
