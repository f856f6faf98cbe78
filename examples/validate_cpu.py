"""CPU side of a validation: sends held-out data to a GPU side that has the model (validate_gpu.py).

python examples/validate_cpu.py
python examples/validate_cpu.py --to 'dtrain://TOKEN@192.168.1.100:29500?fp=...'
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import random_split
from train_mlp import make_data

from distributed_training import CPULoader, DistributedTrainingError


def main() -> None:
    """Validate, and show what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="127.0.0.1", help="pairing link of the GPU side, or its address")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    _, held_out = random_split(make_data(options.samples), [0.8, 0.2], torch.Generator().manual_seed(0))
    loader = CPULoader(num_workers=options.workers)
    result = loader.run_validation(gpu_host=options.to, gpu_port=options.port, val_dataset=held_out)
    print(f"{result['total_samples']} samples, accuracy {result['accuracy']:.3f}, loss {result['average_loss']:.4f}")
    for name, figures in result["per_class"].items():
        print(f"  class {name}: {figures['correct']} of {figures['samples']} right, f1 {figures['f1']:.3f}")
    print(result["confusion_matrix"])
    print(f"{result['bytes_sent']} bytes sent, {result['bytes_received']} received, {result['seconds']:.2f} s")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
