"""What it brings to compute convolutions with the channels innermost (training.channels_last), for each strategy.

    python benchmarks/channels_last.py [--strategies single,ddp,zero1] [--pixels 224] [--batch-size 256]

Eager steps of ResNet-50 on one GPU with images that lie there, each strategy with and without by turns.
`single` and `ddp` store weights so; the others turn the inputs of convolutions.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch.nn import functional as F

from distributed_training.bench.measure import interleave
from distributed_training.config import ModelConfig, StrategyConfig
from distributed_training.models import build_model
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, StepSettings, make_strategy

CUDA = torch.device("cuda", 0)
RESNET = ModelConfig(name="resnet50", args={"small_images": False})
WARM, STEPS = 4, 10


def step_ms(strategy_name: str, order: str, asked: argparse.Namespace) -> float:
    """Milliseconds of a step."""
    shape = (3, asked.pixels, asked.pixels)
    torch.manual_seed(0)
    model = build_model(RESNET, num_classes=1000, input_shape=shape)
    optimizer = torch.optim.SGD(model.to(CUDA).parameters(), lr=0.1, momentum=0.9)
    strategy = make_strategy(Place(CUDA, World(), StrategyConfig(name=strategy_name), deadline=60))
    forward = strategy.setup(model, optimizer, StepSettings(precision=asked.precision, channels_last=order))
    images = torch.randn(asked.batch_size, *shape, device=CUDA)
    labels = torch.randint(1000, (asked.batch_size,), device=CUDA)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(-WARM, STEPS):
        if step == 0:
            began.record()
        with strategy.micro_batch(last=True):
            with strategy.autocast():
                loss = F.cross_entropy(forward(images), labels)
            strategy.backward(loss)
        strategy.step(loss.detach())
    ended.record()
    torch.cuda.synchronize()
    strategy.teardown()
    return began.elapsed_time(ended) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="single,ddp,zero1,zero2,zero3,accelerate")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {asked.precision}")
    print(f"{asked.batch_size} images of {asked.pixels} pixels")
    for name in asked.strategies.split(","):
        turns = {order: partial(step_ms, name, order, asked) for order in ("on", "off")}
        found = interleave(turns, asked.rounds, warmup=0)
        on, off = found["on"].median, found["off"].median
        print(f"{name:12} innermost {on:7.2f} ms, as usual {off:7.2f} ms a step: {off / on:.2f} times", flush=True)


if __name__ == "__main__":
    main()
