"""The vae: its loss, its shapes, and no chance in evaluation."""

from __future__ import annotations

import pytest
import torch

from distributed_training.config import ModelConfig
from distributed_training.models import get_model
from distributed_training.runtime.errors import ModelError


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return get_model("vae")(ModelConfig(args={"latent": 3, "hidden": 32}), (1, 4, 4))


def test_output(model: torch.nn.Module) -> None:
    x = torch.rand(5, 1, 4, 4)
    out = model(x)
    assert {k: tuple(v.shape) for k, v in out.items()} == {
        "loss": (),
        "reconstruction": (5, 1, 4, 4),
        "mean": (5, 3),
        "log_variance": (5, 3),
    }
    assert torch.isfinite(model(x, torch.zeros(5))["loss"])


def test_evaluation_uses_the_mean(model: torch.nn.Module) -> None:
    x = torch.rand(5, 1, 4, 4)
    assert not torch.equal(model(x)["reconstruction"], model(x)["reconstruction"])
    out = model.eval()(x)
    assert torch.equal(out["reconstruction"], model(x)["reconstruction"])
    assert torch.equal(out["reconstruction"].flatten(1), model.decoder(out["mean"]))


def test_loss_is_squared_error_plus_divergence_averaged_over_samples(model: torch.nn.Module) -> None:
    x = torch.rand(5, 1, 4, 4)
    out = model.eval()(x)
    normal = torch.distributions.Normal(out["mean"], torch.exp(0.5 * out["log_variance"]))
    divergence = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(1)
    error = (out["reconstruction"] - x).square().sum((1, 2, 3))
    torch.testing.assert_close(out["loss"], (error + divergence).mean())
    each = torch.stack([model(sample[None])["loss"] for sample in x])
    torch.testing.assert_close(out["loss"], each.mean())


def test_learns(model: torch.nn.Module) -> None:
    x = torch.rand(4, 1, 4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = model(x)["loss"].item()
    for _ in range(100):
        optimizer.zero_grad()
        model(x)["loss"].backward()
        optimizer.step()
    assert model(x)["loss"].item() < 0.5 * first


def test_needs_the_shape() -> None:
    with pytest.raises(ModelError, match="vae needs the shape of a sample"):
        get_model("vae")(ModelConfig())
