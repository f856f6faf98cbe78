"""A variational autoencoder: learns to compress samples to a few numbers and to draw new ones from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.config.check import positive
from distributed_training.models.base import Arguments, CheckpointedModule, Shape, read_args
from distributed_training.runtime.errors import ModelError


@dataclass(kw_only=True)
class VAEArguments(Arguments):
    """`model.args` of vae."""

    latent: int = 16
    """Numbers that a sample is compressed to."""
    hidden: int = 256
    """Width of the hidden layers of encoder and decoder."""

    def check(self) -> None:
        """Refuse empty layers."""
        positive("model.args.latent", self.latent)
        positive("model.args.hidden", self.hidden)


class VAE(CheckpointedModule):
    """Encoder and decoder of two linear layers each; the loss is squared error plus KL divergence."""

    def __init__(self, in_features: int, latent: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_features, hidden), nn.ReLU(), nn.Linear(hidden, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, in_features))

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        """Loss (mean over the batch), reconstruction, mean and log_variance. Labels `y` are not used."""
        mean, log_variance = self.run_block(self.encoder, x.flatten(1)).chunk(2, dim=1)
        # Evaluation must not depend on chance, so it decodes the most likely code.
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean) if self.training else mean
        reconstruction = self.run_block(self.decoder, code).view_as(x)
        # Sums over features overflow in half precision.
        squared_error = (reconstruction.float() - x.float()).square().flatten(1).sum(1)
        divergence = -0.5 * (1 + log_variance.float() - mean.float().square() - log_variance.float().exp()).sum(1)
        return {
            "loss": (squared_error + divergence).mean(),
            "reconstruction": reconstruction,
            "mean": mean,
            "log_variance": log_variance,
        }


def build(config: ModelConfig, input_shape: Shape | None) -> VAE:
    """A vae from the config."""
    args = read_args(VAEArguments, config)
    if input_shape is None:
        raise ModelError("vae needs the shape of a sample, which the dataset does not tell")
    return VAE(math.prod(input_shape), args.latent, args.hidden)
