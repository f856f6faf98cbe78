"""Images on one side, the model on the other, both on this machine: makes small images, predicts what they show.

python examples/image_inference_example.py

The GPU side is a process of its own, as it would be on another machine. The CPU side decodes the files in loader
processes and sends uint8 pixels; scaling to [0, 1], the model and the softmax are the GPU side's work. The same task is
done three times, to show how much travels back in each mode. Needs pillow: pip install 'distributed-training[files]'
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from distributed_training import CPULoader, DistributedTrainingError, GPUTrainer

COLOURS = ("red", "green", "blue")
MODES = {"predictions": {"top_k": 1}, "top 3": {"top_k": 3}, "all": {"return_full_probabilities": True}}


class ImageFiles(Dataset):
    """The images of a folder, in the order of their names."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class Colour(nn.Module):
    """Says which colour an image has most of. A trained network would take its place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(12.0))

    def forward(self, images: Tensor) -> Tensor:
        """Scores (batch, colours) of images (batch, 3, height, width) in 0..1."""
        return self.scale * images.mean(dim=(2, 3))


def make_images(folder: Path, number: int) -> list[str]:
    """Noisy images of one colour each; the names of the colours."""
    numbers, colours = np.random.default_rng(0), []
    for index in range(number):
        colour = int(numbers.integers(len(COLOURS)))
        pixels = numbers.integers(0, 120, (32, 32, 3))
        pixels[..., colour] += 100
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:03d}.png")
        colours.append(COLOURS[colour])
    return colours


def serve(port: int, tasks: int) -> None:
    """The GPU side."""
    trainer = GPUTrainer(port=port)
    trainer.setup_model(Colour())
    trainer.start_service(mode="inference", tasks=tasks)


def main() -> None:
    """Start the GPU side, send the images, show what came back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    gpu_side = multiprocessing.get_context("spawn").Process(target=serve, args=(port, len(MODES)), daemon=True)
    gpu_side.start()
    with tempfile.TemporaryDirectory() as folder:
        colours = make_images(Path(folder), options.images)
        loader, dataset = CPULoader(num_workers=options.workers), ImageFiles(Path(folder))
        results = {}
        for name, wanted in MODES.items():
            results[name] = loader.run_inference(
                gpu_host="127.0.0.1", gpu_port=port, inference_dataset=dataset, batch_size=8, **wanted
            )
    gpu_side.join(30)

    first = results["top 3"]
    for path, best, sure in list(zip(dataset.paths, first["predictions"], first["confidences"]))[:5]:
        print(f"{path.name}: {COLOURS[best]} ({sure:.2f})")
    right = sum(COLOURS[best] == colour for best, colour in zip(first["predictions"], colours))
    print(f"{right} of {options.images} right, {first['passed_count']} sure by at least 0.8")
    for name, result in results.items():
        transfer = result["transfer"]
        sent, received = transfer["sent_per_sample"], transfer["received_per_sample"]
        print(f"{name}: {sent:.0f} bytes sent and {received:.0f} received for each image")


if __name__ == "__main__":
    try:
        main()
    except DistributedTrainingError as error:
        raise SystemExit(f"error: {error}") from None
