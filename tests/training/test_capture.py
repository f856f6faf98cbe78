"""Recording a step needs a GPU (tests/gpu/test_capture.py); without one nothing is recorded, and `on` is an error."""

from __future__ import annotations

import pytest
import torch
from tests.training.examples import assert_same_weights, loader, model, trainer
from torch import nn

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.channels import wants_channels_last


def test_on_the_cpu_nothing_is_recorded() -> None:
    nets = [model(0.1), model(0.1)]
    for net, choice in zip(nets, ("auto", "off")):
        trainer(net, training__capture=choice).train(loader(), epochs=1)
    assert_same_weights(*nets)


def test_on_where_it_cannot_be_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"training\.capture=on: strategy single on cpu cannot be recorded"):
        trainer(training__capture="on").train(loader(), epochs=1)


def test_channels_are_innermost_where_it_helps() -> None:
    images, rows = nn.Sequential(nn.Conv2d(3, 4, 3)), model()
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert wants_channels_last(images, gpu, "bf16", "auto")
    assert not wants_channels_last(images, cpu, "bf16", "auto")
    assert not wants_channels_last(images, gpu, "fp32", "auto")
    assert not wants_channels_last(rows, gpu, "bf16", "auto")
    assert wants_channels_last(rows, cpu, "fp32", "on")
    assert not wants_channels_last(images, gpu, "bf16", "off")
