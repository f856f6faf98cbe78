"""The home side of colab.ipynb: has the data, and loads batches for the GPU in the notebook.

python examples/colab_home.py 'dtrain+ws://...'                           the pairing link that the notebook prints
python examples/colab_home.py abc123.ngrok.app --port 443 --token TOKEN   the same, one by one
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import random_split
from train_cpu import jitter, make_data

from distributed_training import CPULoader, DistributedTrainingError


def main() -> None:
    """Load until the training is over. Started again, with a new link if there is one, it goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu_host", help="the pairing link, or the tunnel's host")
    parser.add_argument("--port", type=int, help="with a host: the tunnel's port")
    parser.add_argument("--token", help="with a host: the token that the notebook prints")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=3000)
    options = parser.parse_args()

    train, held_out = random_split(make_data(options.samples), [0.8, 0.2], torch.Generator().manual_seed(0))
    loader = CPULoader(num_workers=options.workers)
    loader.setup_dataset(train, batch_size=64, shuffle=True, preprocess=jitter, val_dataset=held_out)
    loader.start_loading(options.gpu_host, options.port, epochs=options.epochs, token=options.token)


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
