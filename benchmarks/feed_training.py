"""Training fed by loader workers beside the same training with its data in memory: parts of `benchmarks/feed.py`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from benchmarks.feed_peers.base import process
from torch import nn

from distributed_training.bench.measure import interleave, ratio
from distributed_training.config import Config, ModelConfig
from distributed_training.data import ArrayDataset, Dataset, Plan
from distributed_training.data import Loader as LocalLoader
from distributed_training.data.base import BatchSource
from distributed_training.feed import FeedServer, Loader
from distributed_training.models import get_model
from distributed_training.training import Callback, Trainer


class Clock(Callback):
    """Time from the end of one step to the end of the last, the device's work included."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.seconds = 0.0

    def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
        at = trainer.cursor.global_step
        if at in (self.first, self.last):
            if loss.is_cuda:
                torch.cuda.synchronize()
            if at == self.first:
                self._start = time.perf_counter()
            else:
                self.seconds = time.perf_counter() - self._start
                trainer.stop("measured")


@contextmanager
def fed(dataset: Dataset, plan: Plan, workers: int) -> Iterator[FeedServer]:
    """A server with its loader in another process. Nothing may have started threads here before."""
    reading, writing = os.pipe()

    def load() -> None:
        os.close(writing)
        Loader(dataset, plan, os.read(reading, 1000).decode(), workers=workers).run()

    with process(load), FeedServer(plan, dataset=dataset.fingerprint(), epochs=10**6) as server:
        os.write(writing, str(server.link()).encode())
        yield server
    os.close(reading)
    os.close(writing)


def train(model: nn.Module, source: BatchSource, settings: dict[str, Any], warm: int, steps: int) -> float:
    """Milliseconds a step."""
    clock = Clock(warm, warm + steps)
    config = Config.from_dict(
        {"training": {"schedule": "constant", "warmup_epochs": 0, **settings}, "run": {"progress": "off"}}
    )
    trainer = Trainer(model, config=config, callbacks=[clock], run_dir=False)
    trainer.train(source, epochs=10**6)
    trainer.strategy.teardown()
    return clock.seconds / steps * 1e3


def mlp(sizes: list[int]) -> nn.Module:
    """A network of linear layers."""
    torch.manual_seed(0)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())][:-1]
    return nn.Sequential(*layers)


def resnet18() -> nn.Module:
    """For images of 32 pixels."""
    torch.manual_seed(0)
    return get_model("resnet18")(ModelConfig(num_classes=10), (3, 32, 32))


Model = Callable[[], nn.Module]
MODELS: dict[str, tuple[Model, tuple[int, ...], int, int, int]] = {
    # name: model, shape of a sample, batch size, steps to warm up, steps
    "small MLP": (lambda: mlp([100, 512, 10]), (100,), 64, 400, 3000),
    "25M MLP": (lambda: mlp([1024, 3072, 3072, 3072, 1000]), (1024,), 64, 3, 10),
    "ResNet-18, 32 px": (resnet18, (3, 32, 32), 16, 2, 5),
}


def on_cpu(rounds: int) -> dict[str, Any]:
    """Training on one core, loading on another: what receiving adds to a step."""
    return {name: _compare(rounds, *parts) for name, parts in MODELS.items()}


def _compare(rounds: int, make: Model, shape: tuple[int, ...], size: int, warm: int, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    numbers = np.random.default_rng(0)
    samples = max(512, min(16384, 2**26 // int(np.prod(shape))))
    inputs = numbers.standard_normal((samples, *shape)).astype(np.float32)
    dataset = ArrayDataset((inputs, numbers.integers(0, 10, samples)), num_classes=10, name="benchmark")
    plan = Plan(samples, size, 0)
    settings = {"device": "cpu", "batch_size": size}
    shares: list[float] = []

    def local() -> float:
        return train(make(), LocalLoader(dataset, plan), settings, warm, steps)

    def split() -> float:
        with fed(dataset, plan, 1) as server:
            taken = train(make(), server.source(), settings, warm, steps)
            shares.append(server.figures().wait_share)
            return taken

    measured = interleave({"local": local, "split": split}, rounds)
    return {
        "in memory, ms a step": measured["local"].median,
        "spread": measured["local"].spread,
        "over the split, to in memory": ratio(measured, "split", "local"),
        "wait share": float(np.median(shares)),
    }


def on_gpu(rounds: int) -> dict[str, Any]:
    """ResNet-50 in bf16 on 224 px uint8 images from 8 loader workers, beside the same images in memory."""
    if not torch.cuda.is_available():
        raise SystemExit("the part gpu needs a CUDA device")
    size, samples = 256, 4096
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (samples, 3, 224, 224), dtype=np.uint8)
    dataset = ArrayDataset((images, numbers.integers(0, 1000, samples)), num_classes=1000, name="benchmark")
    plan = Plan(samples, size, 0)
    settings = {"device": "cuda", "batch_size": size, "precision": "bf16"}
    shares: list[float] = []

    def model() -> nn.Module:
        torch.manual_seed(0)
        return get_model("resnet50")(ModelConfig(num_classes=1000), (3, 224, 224))

    def local() -> float:
        return train(model(), LocalLoader(dataset, plan, pin_memory=True), settings, 10, 60)

    def resident() -> float:
        return train(model(), Resident(dataset, plan), settings, 10, 60)

    def split() -> float:
        with fed(dataset, plan, 8) as server:
            taken = train(model(), server.source(), settings, 10, 60)
            shares.append(server.figures().wait_share)
            return taken

    measured = interleave({"local": local, "resident": resident, "split": split}, rounds)
    return {
        "ResNet-50, bf16, 224 px uint8, 8 workers": {
            "local loader in the training process, ms a step": measured["local"].median,
            "batches resident on the GPU, ms a step": measured["resident"].median,
            "spread": measured["resident"].spread,
            "over the split, to the local loader": ratio(measured, "split", "local"),
            "over the split, to resident batches": ratio(measured, "split", "resident"),
            "wait share": float(np.median(shares)),
        }
    }


class Resident(LocalLoader):
    """Batches that are on the GPU before training begins: what a step costs without any loading at all."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The same batches every epoch, copied once."""
        if not hasattr(self, "_kept"):
            self._kept = list(super().batches(0, 0))
            for _, batch in self._kept:
                batch.data = tuple([tensor.cuda() for tensor in batch.data])
        return iter(self._kept[start:])
