"""Your own model and DataLoader with `Trainer`.

python examples/train_mlp.py                              trains, into runs/train_mlp
python examples/train_mlp.py --epochs 20 --resume auto    goes on from there
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from distributed_training import DistributedTrainingError, EarlyStopping, Trainer


def make_data(samples: int) -> TensorDataset:
    """Points in the plane, labelled by which arm of a spiral they lie on."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = radius * 4 + arm * 2.1 + 0.2 * torch.randn(samples, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, arm)


def make_model() -> nn.Module:
    """Two points in, a score for each arm out."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def main() -> None:
    """Train, and show what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--run-dir", default="runs/train_mlp")
    parser.add_argument("--resume", default="never", help="never, auto, or the path of a run or checkpoint")
    options = parser.parse_args()

    data = make_data(options.samples)
    train, held_out = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    model = make_model()
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        callbacks=[EarlyStopping(monitor="val_accuracy", mode="max", patience=5)],
        run_dir=options.run_dir,
    )
    result = trainer.train(
        DataLoader(train, batch_size=64, shuffle=True),
        DataLoader(held_out, batch_size=256),
        epochs=options.epochs,
        resume=options.resume,
    )
    print(f"{result.status} after {result.steps} steps, accuracy {result.metrics['val_accuracy']:.3f}")
    print(f"best checkpoint: {result.best_checkpoint}")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
