"""A training fed by loader processes is the training with local data: same weights, same ledger."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from tests.feed.conftest import LoaderProcess, StartLoader
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.test_feed import server_for
from tests.training.examples import assert_same_weights, trainer
from torch import Tensor, nn

from distributed_training.data import Loader as LocalLoader
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.training import Callback, Trainer
from distributed_training.verify.audit import audit


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 10))


class Killing(Callback):
    """Ends a loader worker without warning, in the middle of an epoch."""

    def __init__(self, loader: LoaderProcess) -> None:
        self.loader = loader

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        if trainer.cursor.global_step in (10, 90):
            os.kill(self.loader.workers(2)[0], signal.SIGKILL)


def local_training() -> nn.Module:
    dataset, net = make_dataset("arrays"), network()
    with LocalContext(LocalLoader(dataset, make_plan(dataset))) as source:
        trainer(net).train(source, epochs=2)
    return net


class LocalContext:
    """Closes a source at the end."""

    def __init__(self, source: LocalLoader) -> None:
        self.source = source

    def __enter__(self) -> LocalLoader:
        return self.source

    def __exit__(self, *exc: object) -> None:
        self.source.close()


def test_weights_and_ledger_are_those_of_local_data_though_workers_die(start_loader: StartLoader, in_tmp: Path) -> None:
    net = network()
    with server_for("arrays", epochs=2) as server:
        loader = start_loader(server.link(), workers=2)
        trainer(net, Killing(loader), run_dir="run").train(server.source(), epochs=2)
        assert "starting it again" in loader.log
    assert_same_weights(net, local_training())
    proof = audit(RunDirectory(Path("run")))
    assert (proof.problem, proof.epochs, proof.steps) == ("", 2, 0)


def test_a_training_goes_on_from_its_checkpoint_with_a_new_gpu_side(start_loader: StartLoader, in_tmp: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            if trainer.cursor.global_step == 70:
                trainer.stop("the test says so")

    server = server_for("arrays", epochs=2)
    start_loader(server.link(), workers=2)
    trainer(network(), Stop(), run_dir="run").train(server.source(), epochs=2)
    server.close(finished=False)
    net = network()
    with server_for("arrays", epochs=2, port=server.port) as again:
        trainer(net, run_dir=None).train(again.source(), epochs=2, resume="run")
    assert_same_weights(net, local_training())
    assert audit(RunDirectory(Path("run"))).problem == ""
