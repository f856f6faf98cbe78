"""Gradient checkpointing: same gradients, same statistics, less kept."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.models import get_model

CASES = {
    "mlp": ({"hidden": [16, 16], "dropout": 0.5}, (3, 8, 8)),
    "resnet18": ({}, (3, 8, 8)),
    "resnet50": ({}, (3, 8, 8)),
    "vae": ({}, (3, 8, 8)),
    "gpt": ({"layers": 2, "width": 16, "dropout": 0.5}, None),
}


def _batch(name: str) -> dict[str, Tensor]:
    if name == "gpt":
        ids = torch.randint(256, (2, 12))
        return {"input_ids": ids, "labels": ids}
    return {"x": torch.rand(4, 3, 8, 8)}


def _step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(1)
    output = model(**batch)
    loss = output["loss"] if isinstance(output, dict) else output.square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_statistics_are_identical(name: str) -> None:
    torch.manual_seed(0)
    args, shape = CASES[name]
    plain = get_model(name)(ModelConfig(num_classes=5, args=args), shape)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    batch = _batch(name)
    for _ in range(2):
        assert torch.equal(_step(plain, batch), _step(checkpointed, batch))
    for (key, expected), actual in zip(plain.named_parameters(), checkpointed.parameters()):
        assert torch.equal(expected.grad, actual.grad), key
    for (key, expected), actual in zip(plain.named_buffers(), checkpointed.buffers()):
        assert torch.equal(expected, actual), key


@pytest.mark.parametrize("name", CASES)
def test_blocks_run_again_only_while_training(name: str) -> None:
    args, shape = CASES[name]
    model = get_model(name)(ModelConfig(num_classes=5, args=args), shape)
    model.gradient_checkpointing_enable()
    block = {"mlp": "blocks.0", "vae": "encoder", "gpt": "blocks.0"}.get(name, "layer1.0")
    calls = []
    # Recomputing stops at the last tensor needed, so entries are counted and not exits.
    model.get_submodule(block).register_forward_pre_hook(lambda *_: calls.append(block))
    _step(model, _batch(name))
    assert len(calls) == 2
    model.eval()
    _step(model, _batch(name))
    assert len(calls) == 3
