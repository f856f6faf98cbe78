"""Exact resume: a run that was interrupted anywhere ends in the same bits as one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.examples import (
    Losses,
    NoisyImages,
    StopAt,
    assert_same_weights,
    config,
    events,
    image_model,
    loader,
    model,
)
from torch import nn
from torch.utils.data import DataLoader

from distributed_training.checkpoint import find_checkpoint, read_state
from distributed_training.data import Loader, Plan
from distributed_training.data.base import Batch, BatchSource, ToldToStop
from distributed_training.data.torch_dataset import as_dataset
from distributed_training.training import Trainer

Setup = Callable[[], tuple[nn.Module, Any, dict[str, Any]]]


def plain() -> tuple[nn.Module, Any, dict[str, Any]]:
    return model(), loader(), {}


def dropout_and_parts() -> tuple[nn.Module, Any, dict[str, Any]]:
    return model(dropout=0.4), loader(), {"training__gradient_accumulation": 3, "training__optimizer": "sgd"}


def half() -> tuple[nn.Module, Any, dict[str, Any]]:
    return model(dropout=0.4), loader(), {"training__precision": "bf16", "training__gradient_clip": 0.5}


def scaled() -> tuple[nn.Module, Any, dict[str, Any]]:
    return model(), loader(), {"training__precision": "fp16"}


def random_dataset() -> tuple[nn.Module, Any, dict[str, Any]]:
    return (
        image_model(),
        DataLoader(NoisyImages(), batch_size=4, shuffle=True),
        {"data__augment": {"flip": True, "crop": 1}},
    )


def workers() -> tuple[nn.Module, Any, dict[str, Any]]:
    return (
        image_model(),
        DataLoader(NoisyImages(), batch_size=4, shuffle=True, num_workers=2),
        {"data__augment": {"flip": True}},
    )


SETUPS: dict[str, Setup] = {s.__name__: s for s in (plain, dropout_and_parts, half, scaled, random_dataset, workers)}


def train(
    setup: Setup, run_dir: str, *callbacks: Any, resume: str | None = None, **changes: Any
) -> tuple[Trainer, Any]:
    torch.manual_seed(int(time.time() * 1000) % 1000)  # what was drawn before must not matter
    net, given, settings = setup()
    own = Trainer(net, config=config(**{**settings, **changes}), callbacks=callbacks, run_dir=run_dir)
    return own, own.train(given, loader(16) if isinstance(net[0], nn.Linear) else None, epochs=3, resume=resume)


def logged(run_dir: str) -> dict[int, float]:
    """The training loss of each step; of a step done twice the later one."""
    return {e["step"]: e["train_loss"] for e in events(Path(run_dir), "metrics") if "train_loss" in e}


@pytest.mark.parametrize("name", SETUPS)
def test_a_run_interrupted_twice_ends_in_the_same_bits(in_tmp: Path, name: str) -> None:
    setup = SETUPS[name]
    whole, result = train(setup, "whole")
    steps = result.steps // 3
    for stop in (1, steps + 2):  # in the first epoch and in the middle of the second
        resume = None if stop == 1 else "auto"
        _, stopped = train(setup, "parts", StopAt(stop), resume=resume)
        assert (stopped.status, stopped.steps) == ("stopped early", stop)
    again, end = train(setup, "parts", resume="auto")
    assert (end.status, end.steps) == ("completed", result.steps)
    assert_same_weights(whole.model, again.model)
    assert logged("parts") == logged("whole")
    for key in ("val_loss", "val_accuracy"):
        assert end.metrics.get(key) == result.metrics.get(key)


@pytest.mark.parametrize("stop", [0, 5, 6, 7, 12, 17])
def test_a_stop_at_any_step_is_no_loss(in_tmp: Path, stop: int) -> None:
    """Before the first step, at the last step of an epoch, at the first of the next, at the very last but one."""
    whole, _ = train(plain, "whole")
    train(plain, "parts", StopAt(max(stop, 1)))
    again, result = train(plain, "parts", resume="auto")
    assert result.steps == 18
    assert_same_weights(whole.model, again.model)
    assert logged("parts") == logged("whole")


@pytest.mark.parametrize("crash", [5, 8, 14])
def test_a_crash_costs_only_the_steps_since_the_last_checkpoint(in_tmp: Path, crash: int) -> None:
    whole, _ = train(plain, "whole")
    with pytest.raises(RuntimeError, match="the lights went out"):
        train(plain, "parts", StopAt(crash, crash=True), checkpoint__every_steps=4)
    losses = Losses()
    again, _ = train(plain, "parts", losses, resume="auto", checkpoint__every_steps=4)
    assert min(losses.seen) == max(s for s in (4, 6, 8, 12) if s < crash or s == 4) + 1
    assert_same_weights(whole.model, again.model)
    assert logged("parts") == logged("whole")


def test_every_sample_is_used_once_an_epoch_by_the_ledger(in_tmp: Path) -> None:
    train(plain, "whole")
    with pytest.raises(RuntimeError):
        train(plain, "parts", StopAt(8, crash=True))
    train(plain, "parts", resume="auto")

    def counted(run: str) -> list[dict[str, Any]]:
        steps: dict[tuple[int, int], Any] = {}
        for line in map(json.loads, Path(run, "ledger.jsonl").read_text().splitlines()):
            if "resume" in line:
                at = (line["resume"]["epoch"], line["resume"]["step"])
                steps = {key: value for key, value in steps.items() if key < at}
            else:
                assert (line["epoch"], line["step"]) not in steps
                steps[line["epoch"], line["step"]] = line
        return list(steps.values())

    assert counted("parts") == counted("whole")
    assert [line["samples"] for line in counted("whole")] == [8, 8, 8, 8, 8, 4] * 3


def test_a_loss_logged_over_an_interruption_is_the_same(in_tmp: Path) -> None:
    train(plain, "whole", training__log_every=5)
    train(plain, "parts", StopAt(8), training__log_every=5)
    train(plain, "parts", resume="auto", training__log_every=5)
    assert logged("parts") == logged("whole")


def test_a_damaged_newest_checkpoint_costs_only_time(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = train(plain, "whole")
    train(plain, "parts", StopAt(9))
    newest = find_checkpoint(Path("parts")).path / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    again, _ = train(plain, "parts", resume="auto")
    assert "checkpoint passed over" in caplog.text
    assert_same_weights(whole.model, again.model)


def test_resume_on_another_number_of_workers(in_tmp: Path) -> None:
    whole, _ = train(random_dataset, "whole")
    train(random_dataset, "parts", StopAt(7))

    def more() -> tuple[nn.Module, Any, dict[str, Any]]:
        net, _, settings = random_dataset()
        return net, DataLoader(NoisyImages(), batch_size=4, shuffle=True, num_workers=1), settings

    again, _ = train(more, "parts", resume="auto")
    assert_same_weights(whole.model, again.model)


def test_background_saving_makes_no_difference(in_tmp: Path) -> None:
    one, _ = train(plain, "a", checkpoint__background=False)
    other, _ = train(plain, "b", checkpoint__background=True)
    assert_same_weights(one.model, other.model)
    first, second = (read_state(find_checkpoint(Path(run)).path) for run in "ab")
    assert first["cursor"] == second["cursor"] == {"epoch": 3, "step": 0, "global_step": 18}
    assert_same_weights(first["model"], second["model"])


def test_the_run_says_how_it_went(in_tmp: Path) -> None:
    train(plain, "run", StopAt(8))
    train(plain, "run", resume="auto")
    starts, ends = events(Path("run"), "start"), events(Path("run"), "finish")
    assert [start["resumed_from"] for start in starts] == [None, 8]
    assert [end["status"] for end in ends] == ["stopped early", "completed"]
    assert starts[0]["facts"]["strategy"] == "single"


SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever this process has inherited
from tests.training.examples import Callback, Losses, config, loader, model
from distributed_training.training import Trainer

class Slow(Callback):
    def on_step_end(self, trainer, step, loss):
        if trainer.cursor.global_step == 8 and sys.argv[1] != "on":
            sys.stdout.write("ready"); sys.stdout.flush()
            time.sleep(30 if sys.argv[1] == "stuck" else 0.3)

own = Trainer(model(dropout=0.3), config=config(), callbacks=[Slow()], run_dir="run")
result = own.train(loader(), epochs=4, resume="auto")
sys.stdout.write(f"{result.status}|{result.reason}|{result.steps}")
"""


class TestSignals:
    def start(self, how: str) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.Popen(
            [sys.executable, "-c", SLOW, how],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def signal_when_ready(self, process: subprocess.Popen[str], *numbers: signal.Signals) -> tuple[int, str]:
        with process:
            assert process.stdout is not None
            assert process.stdout.read(5) == "ready"
            time.sleep(0.1)  # until it sleeps: Python sees a signal that comes right before only when it has slept
            for number in numbers:
                process.send_signal(number)
                time.sleep(1.0)  # two that come at once count as one
            out, _ = process.communicate(timeout=60)
        return process.returncode, out

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_one_signal_saves_and_the_next_run_goes_on_in_the_same_bits(
        self, in_tmp: Path, number: signal.Signals
    ) -> None:
        code, out = self.signal_when_ready(self.start("slow"), number)
        assert code == 0
        assert out == f"interrupted|{number.name} received|8"
        assert events(Path("run"), "finish")[0]["status"] == "interrupted"
        again = Trainer(model(dropout=0.3), config=config(), run_dir="run")
        assert again.train(loader(), epochs=4, resume="auto").steps == 24
        whole = Trainer(model(dropout=0.3), config=config(), run_dir="whole")
        whole.train(loader(), epochs=4)
        assert_same_weights(whole.model, again.model)
        assert logged("run") == logged("whole")

    def test_a_second_ctrl_c_ends_at_once(self, in_tmp: Path) -> None:
        began = time.monotonic()
        code, _ = self.signal_when_ready(self.start("stuck"), signal.SIGINT, signal.SIGINT)
        assert code in (1, -signal.SIGINT, 130)
        assert time.monotonic() - began < 25
        assert events(Path("run"), "finish")[0]["status"] == "failed"

    def test_a_second_sigterm_ends_at_once(self, in_tmp: Path) -> None:
        code, _ = self.signal_when_ready(self.start("stuck"), signal.SIGTERM, signal.SIGTERM)
        assert code == -signal.SIGTERM


def test_signals_have_their_handlers_back_afterwards() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Trainer(model(), config=config(), run_dir=False).train(loader(), epochs=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_in_this_process_stops_at_the_next_step() -> None:
    class Kill(Losses):
        def on_step_end(self, trainer: Trainer, step: int, loss: Any) -> None:
            super().on_step_end(trainer, step, loss)
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    losses = Kill()
    result = Trainer(model(), config=config(), callbacks=[losses], run_dir=False).train(loader(), epochs=2)
    assert (result.status, result.reason, result.steps) == ("interrupted", "SIGTERM received", 3)


def test_a_signal_while_held_out_samples_are_waited_for(in_tmp: Path) -> None:
    class Waits(BatchSource):
        """Brings held-out samples, unless nobody does and it is told to stop."""

        def __init__(self, absent_in: int | None = None) -> None:
            dataset = as_dataset(loader().dataset)
            self.inner, self.absent_in, self.read = Loader(dataset, Plan(len(dataset), 4, shuffle=False)), absent_in, 0

        @property
        def steps_per_epoch(self) -> int:
            return self.inner.steps_per_epoch

        def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[int, Batch]]:
            self.read += 1
            if self.read == self.absent_in:
                os.kill(os.getpid(), signal.SIGTERM)
                raise ToldToStop
            yield from Loader(as_dataset(self.inner.dataset), Plan(len(self.inner.dataset), 4, shuffle=False)).batches(
                0
            )

    undisturbed = Trainer(model(), config=config(), run_dir="whole")
    whole = undisturbed.train(loader(), Waits(), epochs=4)
    stopped = Trainer(model(), config=config(), run_dir="parts").train(loader(), Waits(absent_in=2), epochs=4)
    assert (stopped.status, stopped.reason) == ("interrupted", "SIGTERM received")
    again = Trainer(model(), config=config(), run_dir="parts")
    result = again.train(loader(), Waits(), epochs=4, resume="auto")
    assert (result.status, result.steps) == ("completed", whole.steps)
    assert result.metrics["val_loss"] == whole.metrics["val_loss"]
    assert_same_weights(again.model, undisturbed.model)
    assert [e["epoch"] for e in events(Path("parts"), "metrics") if "val_loss" in e] == [
        e["epoch"] for e in events(Path("whole"), "metrics") if "val_loss" in e
    ]
