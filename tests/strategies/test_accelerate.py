"""Accelerate alone in one process, what it is told and refuses, and whole trainings under `accelerate launch`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.strategy import (
    OPTIMIZERS,
    Factory,
    StrategyContract,
    assert_weights,
    batch,
    make_model,
    reference,
    train_step,
)
from tests.forked_ranks import RankServer
from tests.launching import environment
from torch import nn

from distributed_training.config import StrategyConfig
from distributed_training.runtime.accelerate_launch import LauncherChoice, read_launcher_choice
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, StepSettings, make_strategy
from distributed_training.strategies.auto import choose_strategy

pytest.importorskip("accelerate")  # CI installs it

CPU = torch.device("cpu")


def place(**options: Any) -> Place:
    return Place(CPU, config=StrategyConfig(name="accelerate", **options), deadline=30)


class TestAlone(StrategyContract):
    @pytest.fixture
    def strategy_factory(self) -> Factory:
        return lambda: make_strategy(place())


@pytest.fixture
def strategy() -> Iterator[Any]:
    made = make_strategy(place())
    yield made
    made.teardown()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_leaves_the_model_as_it_was(strategy: Any, precision: str) -> None:
    model = make_model()
    forward = strategy.setup(model, OPTIMIZERS["sgd"](model), StepSettings(precision=precision))
    assert strategy.accelerator.mixed_precision == precision
    for step in range(3):
        assert not train_step(strategy, forward, batch(step)).skipped
    assert_weights(strategy, reference("sgd", 3)[0], tolerance=2e-2)
    assert ("scaler" in strategy.state()) == (precision == "fp16")
    strategy.teardown()
    assert "autocast" not in repr(model.forward)
    assert model(batch(0)[0]).dtype == torch.float32


def test_the_accelerator_is_there_for_users(strategy: Any, tmp_path: Path) -> None:
    """What a script for Accelerate does by hand: gather, unwrap, its own trackers, which the end closes."""
    pytest.importorskip("tensorboard")
    from accelerate.tracking import TensorBoardTracker

    model = make_model()
    forward = strategy.setup(model, OPTIMIZERS["sgd"](model), StepSettings())
    accelerator = strategy.accelerator
    assert accelerator.gather_for_metrics(torch.arange(3)).tolist() == [0, 1, 2]
    assert accelerator._models == [forward]
    accelerator.log_with = [TensorBoardTracker("mine", logging_dir=tmp_path)]
    accelerator.init_trackers("mine")
    accelerator.log({"value": 0.5}, step=3)
    strategy.teardown()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = EventAccumulator(str(tmp_path / "mine")).Reload().Scalars("value")
    assert [(event.step, event.value) for event in scalars] == [(3, 0.5)]


LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, LauncherChoice()),
        (LAUNCHED, LauncherChoice()),
        ({**LAUNCHED, "ACCELERATE_USE_FSDP": "true"}, LauncherChoice(plugin="fsdp", fsdp_version=1)),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "NO_WRAP"},
            LauncherChoice(plugin="fsdp", fsdp_wraps=True),
        ),
        (
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            },
            LauncherChoice(precision="bf16", plugin="deepspeed", zero_stage=3),
        ),
        (
            {
                **DEEPSPEED,
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": "my.json",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
            },
            LauncherChoice(plugin="deepspeed", deepspeed_config="my.json", accumulation=4, compiler="inductor"),
        ),
        (
            {**LAUNCHED, "ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"},
            LauncherChoice(cpu=True, lost_ranks=True),
        ),
        (
            {"FSDP_ACTIVATION_CHECKPOINTING": "true", "ACCELERATE_GRADIENT_CLIPPING": "auto"},
            LauncherChoice(others=("FSDP_ACTIVATION_CHECKPOINTING=true",)),
        ),
    ],
)
def test_the_choice_of_the_launcher_is_read(variables: dict[str, str], expected: LauncherChoice) -> None:
    assert read_launcher_choice(variables) == expected


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        (
            {"ACCELERATE_USE_FSDP": "true"},
            {"plugin": "deepspeed"},
            r"--use_fsdp, but strategy\.plugin=deepspeed",
        ),
        (DEEPSPEED, {"zero_stage": 1}, r"--zero_stage 3, but strategy\.zero_stage=1"),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            {},
            r"--gradient_accumulation_steps 4, but training\.gradient_accumulation=1",
        ),
        ({"ACCELERATE_GRADIENT_CLIPPING": "1.0"}, {}, r"ACCELERATE_GRADIENT_CLIPPING=1\.0.*training\.gradient_clip"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "--use_megatron_lm: only fsdp and deepspeed"),
    ],
)
def test_a_launcher_that_contradicts_the_config_is_refused_with_both_values(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: dict[str, Any], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        make_strategy(place(**options))


def test_the_launchers_cpu_contradicts_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(ConfigError, match="--cpu, but the device is cuda"):
        make_strategy(Place(torch.device("cuda"), config=StrategyConfig(name="accelerate")))


@pytest.mark.parametrize(
    ("variables", "settings", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, r"--mixed_precision bf16, but training\.precision=fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {"precision": "auto"}, r"fp8, but training\.precision=auto"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, r"--dynamo_backend inductor, but training\.compile=false"),
    ],
)
def test_settings_that_contradict_the_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], settings: dict[str, Any], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = make_strategy(place())
    with pytest.raises(ConfigError, match=message):
        made.setup(make_model(), None, StepSettings(**settings))
    made.teardown()


def test_a_precision_left_open_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    made: Any = make_strategy(place())
    made.setup(make_model(), None, StepSettings(precision="auto"))
    assert made.accelerator.mixed_precision == "bf16"
    made.teardown()


def test_auto_means_accelerate_under_its_launcher() -> None:
    world = read_world(LAUNCHED)
    assert (world.launcher, world.size) == ("accelerate", 1)
    assert choose_strategy(Place(CPU, world)) == "accelerate"


def test_one_process_where_several_were_asked_for_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    make_strategy(place()).teardown()
    assert "starts one process, whatever --num_processes says" in caplog.text


class Blocks(nn.Module):
    """Blocks that are large enough to be gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1024, 1024)


def test_blocks_are_gathered_one_by_one_if_all_of_their_kind_can_be() -> None:
    from distributed_training.strategies.accelerate_fsdp import _blocks

    assert _blocks(Blocks()) == ["Block"]
    assert _blocks(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 2))) == []  # a small one among them


LAUNCH = ["-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1", "--main_process_port=0"]
LAUNCH += ["--dynamo_backend=no", "--mixed_precision=no"]
SAY = "import json, os; json.dump(dict(os.environ), open('said-' + os.environ['RANK'], 'w'))"


def launch(folder: Path, *options: str) -> str:
    """`accelerate launch OPTIONS` with two processes on the CPU, to its end."""
    done = subprocess.run(
        [sys.executable, *LAUNCH, *options],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=folder,
        env=environment(TMPDIR=str(folder)),
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def told_by_launcher(rank_server: RankServer, folder: Path, *options: str) -> dict[str, str]:
    """The variables that `accelerate launch OPTIONS` gives to ranks: real ones that do nothing but keep them."""
    (folder / "say.py").write_text(SAY)
    rank_server.start_alone([*LAUNCH, *options, "say.py"], PWD=str(folder), TMPDIR=str(folder)).succeed()
    said = json.loads((folder / "said-1").read_text())
    return {name: value for name, value in said.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


TRAIN = ["-m", "distributed_training", "train"]
SETTINGS = [
    "data.dataset=digits",
    "training.batch_size=61",
    "training.schedule=constant",
    "training.warmup_epochs=0",
    "training.gradient_clip=0.5",
    "training.gradient_accumulation=3",
    "training.device=cpu",
    "run.progress=off",
]


def validation_losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["val_loss"] for event in events if event["event"] == "metrics" and "val_loss" in event]


@pytest.mark.timeout(600)
def test_one_run_goes_through_all_plugins_of_accelerate_launch_as_on_one_device(
    rank_server: RankServer, in_tmp: Path
) -> None:
    alone = [*TRAIN, *SETTINGS, "strategy=single", "training.epochs=3", "run.name=alone"]
    rank_server.start_alone(alone, PWD=str(in_tmp)).succeed()
    said = launch(in_tmp, "--multi_gpu", *TRAIN, *SETTINGS, "training.epochs=1", "run.name=many")
    assert "strategy accelerate: accelerate started 2 processes" in said
    again = [*TRAIN, "--resume", "runs/many"]
    for epochs, options in ((2, ["--use_fsdp"]), (3, ["--use_deepspeed", "--zero_stage=3"])):
        own = told_by_launcher(rank_server, in_tmp, *options)
        assert ("ACCELERATE_USE_FSDP" in own, "ACCELERATE_USE_DEEPSPEED" in own) == (epochs == 2, epochs == 3)
        rank_server.start(2, [*again, f"training.epochs={epochs}"], PWD=str(in_tmp), **own).succeed()
    expected = validation_losses(in_tmp / "runs" / "alone")
    assert len(expected) == 3
    assert validation_losses(in_tmp / "runs" / "many") == pytest.approx(expected, rel=1e-5)
