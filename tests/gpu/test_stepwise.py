"""A loop of one's own on real GPUs: data from the CPU, one GPU, two in one process, two ranks on one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.launching import ROOT, run_ranks
from tests.training.by_hand import adam, assert_same, batches, close, network, plain_loop
from torch import nn

from distributed_training import create_distributed_trainer

SIZES = (13, 7, 1, 13)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=needs_two)])
def test_gpus_of_one_process_equal_the_cpu(gpus: int, tmp_path: Path) -> None:
    net, expected = network(), network()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 3.0, 1.0]))
    with create_distributed_trainer(net, num_gpus=gpus) as trainer:
        assert next(net.parameters()).is_cuda
        losses = [trainer.train_step(x, y, weighted, adam(net)) for x, y in batches(SIZES)]
        x, y = batches([5])[0]
        outputs = trainer.evaluate_step(x, y, weighted).outputs
        trainer.load(trainer.save(tmp_path))
    assert outputs.device.type == "cpu"
    assert losses == close(plain_loop(expected, batches(SIZES), weighted.cpu()))
    assert_same(net, expected, 1e-5)


PROGRAM = """
import torch
from torch import nn
from tests.training.by_hand import adam, assert_same, batches, network, plain_loop
from distributed_training import Config, create_distributed_trainer

config = Config.from_dict({"training": {"precision": "fp32"}, "strategy": {"name": "ddp", "backend": "gloo"}})
net, expected = network(), network()
with create_distributed_trainer(net, config=config) as trainer:
    assert trainer.world_size == 2 and trainer.device.type == "cuda"
    for x, y in batches((13, 7, 1, 13)):
        trainer.train_step(x, y, nn.CrossEntropyLoss(), adam(net))
plain_loop(expected, batches((13, 7, 1, 13)), nn.CrossEntropyLoss())
assert_same(net, expected, 1e-5)
"""


def test_two_ranks_share_a_gpu(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run_ranks(2, [str(program)], PYTHONPATH=path)
