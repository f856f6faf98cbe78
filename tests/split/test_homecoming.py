"""A GPU side that vanishes with all it had costs the steps since the last checkpoint that came home, and no more."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from tests.launching import free_port
from tests.split.conftest import Side, Start, assert_same, slow_loading, train_here, wait_for, weights_of

from distributed_training.checkpoint import find_checkpoint
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.verify.audit import audit

COMMON = ["training.device=cpu", "run.progress=plain", "feed.checkpoints_home=on", "checkpoint.every_steps=10"]
HOME = Path("home/fed-home")


def steps_at(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def vanish(*sides: Side) -> None:
    """With everything on the machine."""
    for side in sides:
        side.signal(signal.SIGKILL)
    for side in sides:
        side.end()
    shutil.rmtree("gpu")


def test_the_gpu_side_vanishes_again_and_again(start: Start) -> None:
    with slow_loading() as slowly:
        training = ["training.device=cpu", "training.epochs=14", slowly]
        own = [*COMMON, *training, f"network.port={free_port()}", "run.name=fed"]
        serve, feed = ["serve", *own, "run.root=gpu"], ["feed", *own, "run.root=home", "--workers=2"]
        server, loader = start(serve, feed)
        wait_for(lambda: steps_at(HOME), lambda: server.screen + loader.screen)
        vanish(server)
        reached = steps_at(HOME)[-1]
        assert loader.alive

        (server,) = start(serve)  # as before, without a word about resuming
        server.until("going on from step")
        wait_for(lambda: steps_at(HOME)[-1] > reached, lambda: server.screen + loader.screen)
        vanish(server, loader)
        assert all(event["event"] != "finish" for event in RunDirectory(HOME).events()), "it was too quick"

    server, loader = start(serve, feed)  # the same two commands
    assert "Training completed (14 epochs, 322 steps" in server.end()
    said = loader.end()
    assert "at home: weights of step 322 in home/fed-home/checkpoints/step-0000000322, metrics in" in said

    train_here(*training, "checkpoint.every_epochs=0", "run.name=here")
    for run in (Path("gpu/fed"), HOME):
        assert_same(weights_of(run), weights_of("runs/here"))
        proof = audit(RunDirectory(run))
        assert (proof.problem, proof.epochs, proof.resumes) == ("", 14, 2)
    events = list(RunDirectory(HOME).events())
    assert (events[-1]["event"], events[-1]["status"]) == ("finish", "completed")
    assert "val_accuracy" in events[-1]


def test_a_stopped_training_is_at_home_and_another_one_does_not_touch_it(start: Start) -> None:
    own = [*COMMON, f"network.port={free_port()}", "run.name=fed"]
    server, loader = start(["serve", *own, "training.epochs=1000", "run.root=gpu"], ["feed", *own, "run.root=home"])
    wait_for(lambda: steps_at(HOME), lambda: server.screen + loader.screen)
    server.signal(signal.SIGTERM)
    assert "Interrupted (SIGTERM received)" in server.end()
    last = find_checkpoint(Path("gpu/fed")).step
    assert steps_at(HOME)[-1] == last
    assert_same(weights_of(HOME), weights_of("gpu/fed"))
    shutil.rmtree("gpu")

    (other,) = start(["serve", *own, "training.epochs=1", "training.lr=0.01", "run.root=gpu"])
    said = other.end()
    assert "training.lr was 0.002 and is 0.01" in " ".join(said.split())
    assert "Training completed (1 epochs, 23 steps" in said
    assert "at home: weights of step 23 in home/fed-home-2/" in loader.end()
    assert steps_at(HOME)[-1] == last
