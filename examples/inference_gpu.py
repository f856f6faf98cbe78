"""GPU side of an inference: predicts with a trained model for clients that have the data.

python examples/train_mlp.py                      trains the model, into runs/train_mlp
python examples/inference_gpu.py                  serves it to this machine, until Ctrl-C
python examples/inference_gpu.py --host 0.0.0.0   serves it to others, too: prints the pairing link that they need
"""

from __future__ import annotations

import argparse

from train_mlp import make_model

from distributed_training import DistributedTrainingError, GPUTrainer


def main() -> None:
    """Load the weights, and serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", default="runs/train_mlp")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--tasks", type=int, default=None, help="end after so many clients")
    options = parser.parse_args()

    trainer = GPUTrainer(port=options.port, device=options.device, host=options.host)
    trainer.setup_model(make_model())
    trainer.trainer.load(options.run_dir)
    served = trainer.start_service(mode="inference", tasks=options.tasks)
    print(f"served {served.tasks} clients, {served.samples} samples")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
