"""A training loop of your own, on one process or many.

python examples/train_mpi.py
mpirun -np 2 python examples/train_mpi.py
mpirun --hostfile hosts.txt python examples/train_mpi.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from distributed_training import DistributedTrainingError, create_distributed_trainer


def make_data(samples: int) -> tuple[Tensor, Tensor]:
    """Points in the plane, labelled by which arm of a spiral they lie on. The same in every process."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = radius * 4 + arm * 2.1 + 0.2 * torch.randn(samples, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--num-gpus", type=int, default=None, help="GPUs of each process")
    parser.add_argument("--save", default=None, help="a folder for checkpoints")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    points, arms = make_data(options.samples)
    held_out = options.samples // 5
    criterion = nn.CrossEntropyLoss()

    with create_distributed_trainer(model, num_gpus=options.num_gpus) as trainer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for epoch in range(options.epochs):
            order = held_out + torch.randperm(options.samples - held_out)  # seeded alike: the same on every rank
            for rows in order.split(64):  # the global batch: the trainer divides it
                loss = trainer.train_step(points[rows], arms[rows], criterion, optimizer)
            if trainer.rank == 0:
                print(f"epoch {epoch}: loss {loss:.4f}")
        result = trainer.evaluate_step(points[:held_out], arms[:held_out], criterion)
        if options.save:
            trainer.save(options.save)
        if trainer.rank == 0:
            accuracy = (result.outputs.argmax(1) == arms[:held_out]).float().mean()
            print(f"{trainer.world_size} processes, {trainer.steps} steps, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
