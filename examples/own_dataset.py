"""Your own dataset, preprocessing and model, named by import path in config_own_model.yaml.

cd examples && dtrain train config_own_model.yaml
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Waves(Dataset):
    """Sine waves of three frequencies with a random phase. `classes` tells the model how many there are."""

    classes = ("slow", "middle", "fast")

    def __init__(self, samples: int = 600, length: int = 64) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = index % len(self.classes)
        phase = np.random.default_rng(index).uniform(0, 2 * np.pi)
        return torch.sin(torch.arange(self.length) * 0.2 * (1 + kind) + phase), kind


def add_noise(sample: tuple[Tensor, Tensor], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Noise that is new in each epoch and the same in each run: `rng` is keyed by (seed, epoch, sample)."""
    wave, kind = sample
    return wave + torch.from_numpy(rng.normal(0, 0.3, wave.shape).astype(np.float32)), kind


class WaveNet(nn.Module):
    """Two convolutions and a linear head. `num_classes` is filled in from the dataset."""

    def __init__(self, width: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=2), nn.ReLU(), nn.Conv1d(width, width, 9, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, waves: Tensor) -> Tensor:
        """Scores (batch, classes) of waves (batch, length)."""
        scores: Tensor = self.head(self.features(waves[:, None]).mean(dim=2))
        return scores
