"""The GPU side of a split: has the model, trains it on batches that `train_cpu.py` loads, here or elsewhere.

python examples/train_gpu.py                              loaders on this machine
python examples/train_gpu.py --host 0.0.0.0               loaders anywhere; prints the pairing link for them
torchrun --nproc_per_node=2 examples/train_gpu.py         two GPUs, each with a part of every batch
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from distributed_training import DistributedTrainingError, GPUTrainer


def make_model() -> nn.Module:
    """Two points in, a score for each arm of the spiral out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def main() -> None:
    """Wait for loaders, train, and show what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="address to listen at; left out, loaders of this machine only")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--cpu-host", help="the only address that may connect")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--run-dir", default="runs/train_gpu")
    parser.add_argument("--resume", default="never", help="never, auto, or the path of a run or checkpoint")
    options = parser.parse_args()

    trainer = GPUTrainer(port=options.port, device=options.device, host=options.host)
    trainer.setup_model(make_model(), learning_rate=5e-3, run_dir=options.run_dir)
    result = trainer.start_training(cpu_host=options.cpu_host, resume=options.resume)
    print(f"{result.status} after {result.steps} steps, accuracy {result.metrics['val_accuracy']:.3f}")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
