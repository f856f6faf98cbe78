"""A loop of one's own on real ranks equals one process with the whole batch; its checkpoint goes on in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.forked_ranks import RankServer
from tests.launching import CHECKS, free_port, run_mpi
from tests.training.by_hand import adam, assert_same, batches, network, plain_loop
from torch import nn

from distributed_training import create_distributed_trainer

STEPWISE = "tests/training/ranks/stepwise_checks.py"


@pytest.mark.parametrize(("ranks", "which"), [(2, ""), (3, "uneven or ignored or accumulation or outputs or save")])
def test_ranks_share_every_batch(rank_server: RankServer, tmp_path: Path, ranks: int, which: str) -> None:
    rank_server.check(ranks, [STEPWISE, "-k", which], FOLDER=str(tmp_path), RANKS=str(ranks))
    data, criterion = batches((13, 7, 13, 5)), nn.CrossEntropyLoss()
    net, expected = network(seed=7), network()
    plain_loop(expected, data, criterion)
    with create_distributed_trainer(net, num_gpus=0) as trainer:
        trainer.load(tmp_path / "saved")
        for x, y in data[2:]:
            trainer.train_step(x, y, criterion, adam(net))
    assert_same(net, expected)


def test_under_mpirun_too(tmp_path: Path) -> None:
    which = ["-k", "(uneven and auto) or accumulation or save"]
    run_mpi(2, [*CHECKS, STEPWISE, *which], FOLDER=str(tmp_path), RANKS="2", MASTER_PORT=str(free_port()))
