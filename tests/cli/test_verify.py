"""`dtrain verify` and `dtrain audit` as a person types them, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launching import environment

from distributed_training import strategies

CONFIG = """
model: {name: mlp, args: {hidden: [16]}}
training: {batch_size: 13, lr: 0.01, schedule: constant, warmup_epochs: 0, gradient_clip: 1.0, epochs: 5}
data: {dataset: synthetic, args: {samples: 60, shape: [8], classes: 3}}
"""
SCRIPT = """
import os, sys, torch
from distributed_training import Trainer

torch.manual_seed(0 if "--seeded" in sys.argv else int.from_bytes(os.urandom(4), "big"))
if os.environ.get("DTRAIN_STRATEGY__NAME") == "dp":
    raise RuntimeError("the lights went out")
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
x = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
if "--train" in sys.argv:
    Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1)).train((x, x[:, :3].argmax(1)), epochs=3)
"""


@pytest.mark.timeout(300)
def test_the_same_training_passes_and_what_is_lossy_is_measured(
    dtrain: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("config.yaml").write_text(CONFIG)
    monkeypatch.setitem(strategies._NEEDS, "horovod", strategies.Needs("no_such_library", "horovod"))
    files = ("--json", "verify.json", "--markdown", "verify.md")
    outcome = dtrain("verify", "config.yaml", "--strategies", "ddp, ddp+fp16,horovod", "--steps", "6", *files)
    assert outcome.code == 0, outcome.err + outcome.out
    found = json.loads(Path("verify.json").read_text())
    assert (found["passed"], found["judged_steps"]) == (True, 6)
    yardstick, ddp, fp16, horovod = found["strategies"]
    assert (yardstick["result"], yardstick["world_size"]) == ("yardstick", 1)
    assert (ddp["result"], ddp["world_size"], ddp["same_batches"]) == ("pass", 2, True)
    assert 0 < ddp["weights"] < 1e-6
    assert ddp["loss"] < 1e-6
    assert (fp16["result"], fp16["same_batches"]) == ("lossy", True)
    assert fp16["weights"] > 1e-5
    assert horovod["result"] == "not installed"
    assert horovod["notes"] == ["pip install 'distributed-training[horovod]'"]
    assert Path("verify.md").read_text() == outcome.out
    assert "| ddp+fp16 " in outcome.out
    assert not Path("runs").exists()


@pytest.mark.timeout(300)
def test_another_training_fails_with_its_step_tensor_and_likely_cause(dtrain: Callable) -> None:
    Path("train.py").write_text(SCRIPT)
    options = ("--strategies", "ddp,dp", "--steps", "4", "--json", "verify.json", "--folder", "kept")
    outcome = dtrain("verify", *options, "--", "train.py", "--seeded", "--train")
    assert outcome.code == 1, outcome.err
    _, ddp, dp = json.loads(Path("verify.json").read_text())["strategies"]
    assert (ddp["result"], ddp["first_step"], ddp["same_batches"]) == ("FAIL", 1, True)
    assert ddp["where"]
    assert "strategy.sync_batchnorm=true" in ddp["notes"][0]
    assert "the model has batch norm" in outcome.out
    assert dp["result"] == "FAIL"
    assert dp["notes"] == ["exit code 1, at 0 of 4 steps"]
    assert "dp: RuntimeError: the lights went out" in outcome.err
    assert "the lights went out" in Path("kept/1-dp/output.txt").read_text()
    assert dtrain("verify", *options).err.endswith("kept: not empty; give --folder a new folder\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeded"], "no training was recorded; a program's Trainer must"),
        (["--train"], "start from different weights, so there is nothing to compare; seed"),
        (["--train", "--crash"], "reference run, strategy=single, failed: exit code 1"),
    ],
)
def test_a_program_that_cannot_be_compared(dtrain: Callable, words: list[str], said: str) -> None:
    crash = "\nif '--crash' in sys.argv: raise RuntimeError('oh')\n"
    Path("train.py").write_text(SCRIPT + crash)
    outcome = dtrain("verify", "--strategies", "ddp", "--steps", "2", "--", "train.py", *words)
    assert outcome.code == 1
    assert said in outcome.err


def test_a_run_has_a_deadline(dtrain: Callable) -> None:
    Path("slow.py").write_text("import time; time.sleep(60)")
    outcome = dtrain("verify", "--strategies", "ddp", "--timeout", "1", "--", "slow.py")
    assert outcome.code == 1
    assert "not done after 1 s (--timeout)" in outcome.err


def test_an_unknown_strategy_is_refused(dtrain: Callable) -> None:
    outcome = dtrain("verify", "--strategies", "ddq")
    assert outcome.code == 2
    assert "did you mean ddp?" in outcome.err


KILLED = """
import os, signal, sys
from distributed_training import Callback
from distributed_training.config import load_config
from distributed_training.training.job import build_job

class Kill(Callback):
    def on_step_end(self, trainer, step, loss):
        if trainer.cursor.global_step == 9:
            trainer._session.loop.ledger.flush()  # the ledger is ahead of the checkpoint
            os.kill(os.getpid(), signal.SIGKILL)

with build_job(load_config(None, sys.argv[1:])) as job:
    job.trainer.callbacks.append(Kill())
    job.train()
"""
SHORT = (
    "training.epochs=3",
    "training.batch_size=16",
    "checkpoint.every_steps=3",
    "run.name=short",
    "run.progress=off",
)
SMALL = ("data.dataset=synthetic", "data.args={samples: 100, shape: [8], classes: 3}", "model.args.hidden=[8]")


def test_an_audit_proves_a_run_that_was_killed_and_finds_every_change(dtrain: Callable) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, *SHORT, *SMALL], timeout=120, env=environment())
    assert killed.returncode == -9
    ledger = Path("runs/short/ledger.jsonl")
    assert len(ledger.read_text().splitlines()) == 9
    outcome = dtrain("audit", "runs/short")
    assert (outcome.code, outcome.err) == (0, "")
    assert "epoch 1 is not complete: 4 of 5 steps" in outcome.out
    assert dtrain("train", *SHORT, *SMALL, "--resume", "auto").code == 0
    outcome = dtrain("audit", "runs/short")
    assert outcome.code == 0
    assert "as planned, 1 resume\n" in outcome.out
    assert "3 complete epochs: each of 80 samples exactly once in each" in outcome.out

    lines = ledger.read_text().splitlines(keepends=True)
    resume = next(n for n, line in enumerate(lines) if "resume" in line)
    changes = {
        "step 2 of epoch 0 used other samples": [*lines[:2], lines[2].replace('ids":"', 'ids":"0'), *lines[3:]],
        "step 3 of epoch 0 is missing": [*lines[:3], *lines[4:]],
        "step 4 of epoch 2 is missing, though the run was completed": lines[:-1],
        "step 1 of epoch 0 is there twice": [*lines[:2], *lines[1:]],
        "is there twice, with no resume between": [*lines[:resume], *lines[resume + 1 :]],
    }
    for said, changed in changes.items():
        ledger.write_text("".join(changed))
        outcome = dtrain("audit", "runs/short")
        assert outcome.code == 1, said
        assert said in outcome.out


def test_an_audit_of_a_run_whose_data_was_given_in_python(dtrain: Callable) -> None:
    import torch

    from distributed_training import Trainer

    data = (torch.randn(100, 4), torch.randint(0, 2, (100,)))
    Trainer(torch.nn.Linear(4, 2), run_dir="planned").train(data, epochs=2)
    assert dtrain("audit", "planned").code == 0
    Trainer(torch.nn.Linear(4, 2), run_dir="stream").train([data], epochs=1)
    outcome = dtrain("audit", "stream")
    assert outcome.code == 4
    assert "without sample ids" in outcome.err
    Path("planned/ledger.jsonl").unlink()
    assert "there is no ledger.jsonl" in dtrain("audit", "planned").err
