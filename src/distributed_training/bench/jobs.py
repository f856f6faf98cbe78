"""The trainings that loops are measured with: a model, data in memory, an optimizer. The same for every loop.

Data is made up but can be learned (labels are those of a fixed random network, tokens follow each other), so that the
loss after some steps says whether a variant trains as it should.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.models import get_model

Kind = Literal["vectors", "images", "tokens"]
Batch = tuple[Tensor, Tensor]
_DISTINCT = 64  # batches that lie on the device; more would only take memory
_BLOCK = 256  # samples made at a time, to stay small


@dataclass(frozen=True)
class Job:
    """One training by name. `batch_size` and the numbers of steps may be replaced."""

    name: str
    title: str
    kind: Kind
    model: str
    arguments: dict[str, Any]
    shape: tuple[int, ...]
    """Of one sample: features, (channels, height, width), or (tokens,)."""
    classes: int
    batch_size: int
    warm: int
    """Steps at the beginning of each turn that are not measured."""
    steps: int
    """Steps that are."""
    fast: str = "bf16"
    """The arithmetic with which it is fastest on a GPU, for the loops by hand that are made for speed."""
    threads: int = 0
    """CPU threads of torch; 0: torch decides. A step too small for two is measured with one."""

    def build(self) -> nn.Module:
        """The model, with the same weights every time."""
        torch.manual_seed(0)
        if self.kind == "vectors":  # the leanest there is: what is left of a step is the loop
            widths = [*self.shape, *self.arguments["hidden"], self.classes]
            layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
            return nn.Sequential(*layers[:-1])
        settings = ModelConfig(num_classes=self.classes, args=dict(self.arguments))
        return get_model(self.model)(settings, self.shape)

    def optimizer(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        """What most people would take: AdamW for language, SGD with momentum for the rest."""
        if self.kind == "tokens":
            return torch.optim.AdamW(model.parameters(), lr=3e-4, **options)
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)

    @property
    def turn(self) -> int:
        """Steps of a turn in all; the last begins after the clock has stopped."""
        return self.warm + self.steps + 1

    def arrays(self, steps: int) -> Batch:
        """Inputs and targets of that many batches, in host memory."""
        numbers = torch.Generator().manual_seed(1)
        count = steps * self.batch_size
        if self.kind == "tokens":
            return self._tokens(count, numbers)
        teacher = torch.randn(int(torch.tensor(self.shape).prod()), self.classes, generator=numbers)
        inputs = torch.empty(count, *self.shape)
        targets = torch.empty(count, dtype=torch.long)
        for first in range(0, count, _BLOCK):
            rows = inputs[first : first + _BLOCK].normal_(generator=numbers)
            targets[first : first + _BLOCK] = (rows.flatten(1) @ teacher).argmax(1)
        return inputs, targets

    def _tokens(self, count: int, numbers: torch.Generator) -> Batch:
        """Runs of counting up: what comes next can be learned."""
        begins = torch.randint(0, self.classes, (count, 1), generator=numbers)
        strides = torch.randint(1, 4, (count, 1), generator=numbers)
        tokens = (begins + strides * torch.arange(self.shape[0])) % self.classes
        return tokens, tokens

    def batches(self, device: torch.device) -> list[Batch]:
        """The batches of a turn on the device, for loops that take them as they are."""
        inputs, targets = self.arrays(min(self.turn, _DISTINCT))
        parts = zip(inputs.split(self.batch_size), targets.split(self.batch_size))
        return [(rows.to(device), labels.to(device)) for rows, labels in parts]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch."""
        if self.kind == "tokens":
            found: Tensor = model(batch[0], labels=batch[1])["loss"]
            return found
        return F.cross_entropy(model(batch[0]), batch[1])


def _gpt(layers: int, heads: int, width: int, vocabulary: int, context: int) -> dict[str, Any]:
    return {"layers": layers, "heads": heads, "width": width, "vocab_size": vocabulary, "context": context}


_MLP = ("vectors", "mlp", {"hidden": [512]}, (100,), 10)
_MLP_25M = ("vectors", "mlp", {"hidden": [3072, 3072, 3072]}, (1024,), 1000)
_RESNET18: tuple[Any, ...] = ("images", "resnet18", {}, (3, 32, 32), 10)
_RESNET50 = ("images", "resnet50", {"small_images": False}, (3, 32, 32), 100)  # the stem of torchvision
_RESNET50_224: tuple[Any, ...] = ("images", "resnet50", {}, (3, 224, 224), 1000)
_GPT2 = ("tokens", "gpt", _gpt(12, 12, 768, 50304, 1024), (1024,), 50304)
_GPT_TINY = ("tokens", "gpt", _gpt(2, 2, 64, 256, 64), (64,), 256)


def _job(name: str, title: str, model: tuple[Any, ...], batch_size: int, warm: int, steps: int, **more: Any) -> Job:
    kind, builder, arguments, shape, classes = model
    return Job(name, title, kind, builder, arguments, shape, classes, batch_size, warm, steps, **more)


JOBS: dict[str, Job] = {
    job.name: job
    for job in (
        _job("mlp", "MLP 100-512-10", _MLP, 64, 50, 500, fast="fp32", threads=1),
        _job("resnet18", "ResNet-18, 32 px", _RESNET18, 16, 2, 8),
        _job("resnet50-128", "ResNet-50, 32 px", _RESNET50, 128, 40, 200),
        _job("resnet50-1024", "ResNet-50, 32 px", _RESNET50, 1024, 10, 100),
        _job("gpt2", "GPT-2 small", _GPT2, 16, 5, 30),
        _job("resnet50-224", "ResNet-50, 224 px", _RESNET50_224, 256, 20, 60),
        _job("mlp-25m", "MLP of 25M parameters", _MLP_25M, 64, 3, 10, threads=1),
        _job("gpt-tiny", "GPT of 0.1M parameters", _GPT_TINY, 8, 5, 40, threads=1),
    )
}
"""Parts choose which of them are measured where; the last is for trying things out."""
