"""`dtrain serve` and `dtrain feed` train what `dtrain train` does, whatever happens to either side."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.launching import free_port
from tests.split.conftest import Start, assert_same, free_neighbours, slow_loading, train_here, wait_for, weights_of

from distributed_training.feed import PairingLink
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.verify.audit import audit

COMMON = ["training.device=cpu", "run.progress=plain"]


def words(port: int, *more: str) -> list[str]:
    return [*COMMON, f"network.port={port}", *more]


def test_the_training_is_that_of_one_machine(start: Start) -> None:
    own = words(free_port(), "training.epochs=3", "training.log_every=5", "run.name=fed")
    server, loader = start(["serve", *own], ["feed", *own, "--workers=2"])
    said = server.end()
    assert "Training completed (3 epochs, 69 steps" in said
    assert "bottleneck" in said
    assert "loaded " in loader.end()

    metrics = train_here(*COMMON, "training.epochs=3", "run.name=here")
    assert_same(weights_of("runs/fed"), weights_of("runs/here"))
    run_dir = RunDirectory(Path("runs/fed"))
    events = [event for event in run_dir.events() if event["event"] == "metrics"]
    held_out = [event for event in events if "val_accuracy" in event][-1]
    assert held_out["val_accuracy"] == metrics["val_accuracy"]
    assert held_out["val_loss"] == metrics["val_loss"]
    fed = [event for event in events if "feed_wait_share" in event]
    assert fed
    assert all(0 <= event["feed_wait_share"] <= 1 and event["feed_loaders"] == 2 for event in fed)
    assert {"feed_samples_per_second", "feed_megabytes_per_second", "feed_queue"} <= fed[0].keys()
    proof = audit(run_dir)
    assert (proof.problem, proof.epochs, proof.skipped) == ("", 3, {})


def test_a_loader_and_then_the_gpu_side_are_killed(start: Start) -> None:
    """As between machines: over TLS, with a link that the resumed GPU side still answers to."""
    with slow_loading() as slowly:
        training = ["training.epochs=8", slowly]
        own = words(free_port(), *training, "checkpoint.every_steps=10", "run.name=fed")
        own.append("network.gpu_host=0.0.0.0")
        (server,) = start(["serve", *own])
        server.until("?fp=")
        link = PairingLink.parse(server.screen.partition("'")[2].partition("'")[0])
        feed = ["feed", *own, "--to", str(replace(link, host="127.0.0.1"))]
        first, second = start(feed, feed)
        checkpoints = Path("runs/fed/checkpoints")
        wait_for(lambda: len(list(checkpoints.glob("step-*"))) > 1, lambda: server.screen)
        first.signal(signal.SIGKILL)
        seen = {path.name for path in checkpoints.glob("step-*")}
        wait_for(lambda: {path.name for path in checkpoints.glob("step-*")} - seen, lambda: server.screen)
        server.signal(signal.SIGKILL)
        server.end()
        assert second.alive
        assert all(event["event"] != "finish" for event in RunDirectory(Path("runs/fed")).events()), "it was too quick"

    (again,) = start(["serve", *own, "--resume=auto"])
    assert "Training completed (8 epochs, 184 steps" in again.end()
    second.end()

    train_here(*COMMON, *training, "run.name=here")
    assert_same(weights_of("runs/fed"), weights_of("runs/here"))
    proof = audit(RunDirectory(Path("runs/fed")))
    assert (proof.problem, proof.epochs, proof.resumes) == ("", 8, 1)


def test_a_signal_ends_the_wait_for_loaders_and_saves(start: Start) -> None:
    own = words(free_port(), "training.epochs=1000", "run.name=fed")
    server, loader = start(["serve", *own], ["feed", *own])
    server.until("epoch 2/1000")
    loader.signal(signal.SIGKILL)
    server.until("no loader is connected")
    server.signal(signal.SIGTERM)
    said = server.end()
    assert "Interrupted (SIGTERM received)" in said
    assert "dtrain serve --resume runs/fed" in said
    assert audit(RunDirectory(Path("runs/fed"))).problem == ""


def test_two_ranks_are_one(start: Start) -> None:
    port = free_neighbours()
    own = words(port, "training.epochs=2", "training.batch_size=50", "run.name=fed", "strategy=ddp")
    links = f"dtrain://127.0.0.1:{port},dtrain://127.0.0.1:{port + 1}"
    *ranks, loader = start(["serve", *own], ["serve", *own], ["feed", *own, "--to", links], ranks=2, port=free_port())
    said = ranks[0].end()
    assert f"--to '{links}'" in said
    assert "Training completed (2 epochs" in said
    ranks[1].end()
    loader.end()

    train_here(*COMMON, "training.epochs=2", "training.batch_size=50", "run.name=here")
    assert_same(weights_of("runs/fed"), weights_of("runs/here"), tolerance=1e-5)
    assert audit(RunDirectory(Path("runs/fed"))).problem == ""


def test_a_loader_with_another_config_is_refused(start: Start) -> None:
    port = free_port()
    server, loader = start(["serve", *words(port)], ["feed", *words(port, "training.batch_size=32")])
    assert "batch_size is 64 on the server and 32 on" in " ".join(loader.end().split())
    server.signal(signal.SIGTERM)
    server.end()


DATASET = '''
import numpy as np

class Numbers:
    """Some samples cannot be loaded."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in (7, 30):
            raise OSError(f"the file of {index} is damaged")
        return np.full(4, index, np.float32), index % 2
'''


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_samples_that_cannot_be_loaded(start: Start, in_tmp: Path, policy: str) -> None:
    (in_tmp / "numbers_dataset.py").write_text(DATASET)
    own = words(free_port(), "data.dataset=numbers_dataset:Numbers", "data.validation_fraction=0", "run.name=fed")
    own += ["training.epochs=2", "training.batch_size=8", "model.num_classes=2", f"feed.on_bad_sample={policy}"]
    server, loader = start(["serve", *own], ["feed", *own])
    said = server.end()
    if policy == "stop":
        assert "cannot be loaded" in said
        assert "is damaged" in said
        loader.signal(signal.SIGTERM)
        return
    assert "Training completed" in said, said
    loader.end()
    proof = audit(RunDirectory(Path("runs/fed")))
    assert proof.problem == ""
    assert sorted(sample for ids in proof.skipped.values() for sample in ids) == [7, 7, 30, 30]
    (audited,) = start(["audit", "runs/fed"])
    assert "sample 7" in audited.end()


def test_both_sides_by_one_command(start: Start) -> None:
    own = [*COMMON, "training.epochs=2", "run.name=split"]
    (both,) = start(["train", "--split", *own])
    said = both.end()
    assert "loader | loaded " in said
    assert "Training completed (2 epochs, 46 steps" in said
    assert "bottleneck" in said

    train_here(*COMMON, "training.epochs=2", "run.name=here")
    assert_same(weights_of("runs/split"), weights_of("runs/here"))


def test_a_loader_that_cannot_begin_ends_both_sides(start: Start) -> None:
    (both,) = start(["train", "--split", *COMMON, "data.dataset=csv"])
    said = both.end()
    assert "error: the loader ended with code 3: " in said
    assert "Training" not in said
