"""The CPU side of a split: has the data, and loads batches for `train_gpu.py`, here or elsewhere.

python examples/train_cpu.py                                        the GPU side is on this machine
python examples/train_cpu.py --gpu-host 'dtrain://...' --workers 8  it is elsewhere: the link that it prints
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, random_split

from distributed_training import CPULoader, DistributedTrainingError


def make_data(samples: int) -> TensorDataset:
    """Points in the plane, labelled by which arm of a spiral they lie on."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = radius * 4 + arm * 2.1 + 0.2 * torch.randn(samples, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def jitter(sample: tuple[Tensor, Tensor], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A little noise, another in each epoch, and the same on whatever machine the sample is loaded."""
    point, arm = sample
    return point + torch.from_numpy(rng.normal(0, 0.01, 2).astype("float32")), arm


def main() -> None:
    """Load until the training is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-host", default="127.0.0.1", help="a pairing link, or an address")
    parser.add_argument("--gpu-port", type=int, default=29500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=3000)
    options = parser.parse_args()

    train, held_out = random_split(make_data(options.samples), [0.8, 0.2], torch.Generator().manual_seed(0))
    loader = CPULoader(num_workers=options.workers)
    loader.setup_dataset(train, batch_size=64, shuffle=True, preprocess=jitter, val_dataset=held_out)
    loader.start_loading(gpu_host=options.gpu_host, gpu_port=options.gpu_port, epochs=options.epochs)


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
