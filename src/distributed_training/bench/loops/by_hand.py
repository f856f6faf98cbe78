"""Loops without any library: the plain one that everybody writes, and what people do to it for speed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from distributed_training.bench.jobs import Batch, Job
from distributed_training.bench.loops.base import Pace, PacedBatches, prepare
from distributed_training.bench.turn_worker import Orders

_WARM = 5  # steps before a graph is recorded: kernels are chosen, optimizer state is made


def run(
    orders: Orders,
    *,
    job: str,
    changes: dict[str, Any],
    device: str,
    threads: int,
    precision: str = "fp32",
    channels_last: bool = False,
    compile: str = "",
    capture: bool = False,
    fused: bool = False,
) -> None:
    """Train without end. Batches lie on the device already: nothing is left to do but to compute."""
    settings, place = prepare(job, changes, device, threads)
    precision = settings.fast if precision == "fast" else precision
    if fused and place.type == "cuda":
        torch.backends.cudnn.benchmark = True
    if precision == "tf32":
        torch.set_float32_matmul_precision("high")
    model = settings.build().to(place)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = _optimizer(settings, model, fused, capture)
    called: Any = torch.compile(model, mode=compile) if compile else model

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(place.type, torch.bfloat16) if precision == "bf16" else nullcontext():
            loss = settings.loss(called, batch)
        loss.backward()
        optimizer.step()
        return loss

    batches = settings.batches(place)
    if channels_last:
        batches = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in batches]
    one = _recorded(step, batches[0]) if capture else step
    data = PacedBatches(batches, Pace(orders, settings.warm, settings.steps, place), settings)
    while True:
        for batch in data:
            one(batch)


def _optimizer(job: Job, model: nn.Module, fused: bool, capture: bool) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"fused": True} if fused else {}
    if capture and job.kind == "tokens":
        options["capturable"] = True
    return job.optimizer(model, **options)


def _recorded(step: Callable[[Batch], Tensor], example: Batch) -> Callable[[Batch], Tensor]:
    """The whole step as one CUDA graph, by the recipe of torch's documentation."""
    inputs, targets = example[0].clone(), example[1].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            step((inputs, targets))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step((inputs, targets))

    def replay(batch: Batch) -> Tensor:
        inputs.copy_(batch[0])
        targets.copy_(batch[1])
        graph.replay()
        return loss

    return replay
