"""CPU side of an inference: sends data to a GPU side that has the model (inference_gpu.py), gets predictions in order.

python examples/inference_cpu.py
python examples/inference_cpu.py --samples 10000000 --output predictions.npy     memory stays bounded
python examples/inference_cpu.py --to 'dtrain://TOKEN@192.168.1.100:29500?fp=...' --top-k 1
"""

from __future__ import annotations

import argparse

from train_mlp import make_data

from distributed_training import CPULoader, DistributedTrainingError


def main() -> None:
    """Predict, and show what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="127.0.0.1", help="pairing link of the GPU side, or its address")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="all probabilities")
    parser.add_argument("--threshold", type=float, default=0.8, help="confidence from which on a sample passes")
    parser.add_argument("--output", default=None, help="a .npy, .parquet or .csv file")
    options = parser.parse_args()

    loader = CPULoader(num_workers=options.workers)
    result = loader.run_inference(
        gpu_host=options.to,
        gpu_port=options.port,
        inference_dataset=make_data(options.samples),
        batch_size=1024,
        top_k=options.top_k,
        return_full_probabilities=options.full,
        confidence_threshold=options.threshold,
        output=options.output,
    )
    print(f"{result['total_samples']} samples at {result['samples_per_second']:.0f} a second")
    print(f"{result['passed_count']} of them pass the threshold of {options.threshold}")
    if options.output is None:
        for sample in range(min(3, options.samples)):
            best, confidence = result["predictions"][sample], result["confidences"][sample]
            print(f"  sample {sample}: class {best} ({confidence:.3f})")
        print(f"the results take {result['estimated_memory_mb']:.2f} MiB")
    else:
        print(f"written to {result['output']}; in memory they would take {result['estimated_memory_mb']:.2f} MiB")
    transfer = result["transfer"]
    print(f"mode {transfer['mode']}: {transfer['received_per_sample']:.1f} bytes came back for a sample")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
