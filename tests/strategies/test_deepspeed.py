"""DeepSpeed: the contract in every ZeRO stage, whole trainings, and what its JSON file may and may not say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.strategy import same
from tests.forked_ranks import RankServer
from tests.launching import run_ranks
from torch import nn

from distributed_training.checkpoint import read_state
from distributed_training.config import StrategyConfig
from distributed_training.runtime.errors import ConfigError, MissingDependencyError
from distributed_training.runtime.world import World
from distributed_training.strategies import Place, StepSettings, make_strategy
from distributed_training.strategies.deepspeed_settings import Combined, combine, is_lossy, read_file

CPU = torch.device("cpu")
CASES = [
    pytest.param({"zero_stage": 0}, 2, id="stage-0"),
    pytest.param({"zero_stage": 1}, 2, id="stage-1"),
    pytest.param({"zero_stage": 2}, 3, id="stage-2"),
    pytest.param({"zero_stage": 3}, 2, id="stage-3"),
    pytest.param({"zero_stage": 2, "cpu_offload": True}, 2, id="stage-2-offload"),
    pytest.param({"zero_stage": 3, "cpu_offload": True}, 2, id="stage-3-offload"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("options", "ranks"), CASES)
def test_the_contract(rank_server: RankServer, options: dict[str, object], ranks: int) -> None:
    contract = "tests/strategies/ranks/contract_deepspeed.py"
    rank_server.check(ranks, [contract], measured=True, OPTIONS=json.dumps(options))


@pytest.mark.timeout(300)
def test_precision_files_state_and_odd_models(rank_server: RankServer) -> None:
    rank_server.check(2, ["tests/strategies/ranks/cases_deepspeed.py"], measured=True)


TRAIN = ["-m", "distributed_training", "train", "run.progress=off", "training.gradient_clip=1.0", "run.deadline=60"]
DEEPSPEED = [*TRAIN, "strategy=deepspeed", "strategy.zero_stage=3", "training.gradient_accumulation=2"]


@pytest.mark.timeout(300)
def test_a_whole_training_is_that_of_one_device_also_when_it_is_resumed(
    rank_server: RankServer, tmp_path: Path
) -> None:
    def train(*arguments: str) -> None:
        words = [*DEEPSPEED, "training.epochs=2", *arguments]
        rank_server.start(2, words, PWD=str(tmp_path)).succeed()

    run_ranks(2, [*DEEPSPEED, "training.epochs=2", "run.name=whole"], cwd=tmp_path)
    train("run.name=broken", "run.stop_after_steps=30")
    train("checkpoint.resume=runs/broken")
    words = [*TRAIN, "strategy=single", "training.epochs=2", "run.name=alone"]
    rank_server.start_alone(words, PWD=str(tmp_path)).succeed()
    alone, whole, resumed = (
        read_state(max((tmp_path / "runs" / name / "checkpoints").glob("step-*")))
        for name in ("alone", "whole", "broken")
    )
    assert whole["metrics"]["val_loss"] == pytest.approx(alone["metrics"]["val_loss"], rel=1e-5)
    assert whole["metrics"]["val_accuracy"] == alone["metrics"]["val_accuracy"]
    assert same(resumed["model"], whole["model"])
    assert same(resumed["optimizer"], whole["optimizer"])
    assert resumed["metrics"]["val_loss"] == whole["metrics"]["val_loss"]


# What the file says, and what it is told against.


@pytest.fixture
def combined(tmp_path: Path) -> Callable[..., Combined]:
    """Combine a file with settings of ours."""

    def make(
        file: dict[str, Any] | None = None,
        strategy: dict[str, Any] | None = None,
        ranks: int = 2,
        batch_size: int = 64,
        gradient_accumulation: int = 1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **settings: Any,
    ) -> Combined:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(file or {}))
        config = StrategyConfig(name="deepspeed", deepspeed_config=str(path), **(strategy or {}))
        world = World(0, ranks, master="127.0.0.1")
        place = Place(CPU, world, config, 30, batch_size, gradient_accumulation)
        parameters = nn.Linear(4, 4).parameters()
        return combine(read_file(str(path)), place, StepSettings(**settings), optimizer(parameters, lr=0.01))

    return make


def test_without_a_file_it_is_stage_2_without_clipping(combined: Callable[..., Combined]) -> None:
    told = combined()
    assert told.stage == told.json["zero_optimization"]["stage"] == 2
    assert told.json["gradient_clipping"] == 0.0  # DeepSpeed would clip at 1 if it were told nothing
    assert told.clip is None
    assert (told.precision, told.own_precision) == ("fp32", False)
    assert told.json["train_micro_batch_size_per_gpu"] == 32
    assert told.json["gradient_accumulation_steps"] == 1
    assert "train_batch_size" not in told.json


def test_a_batch_that_ranks_do_not_divide_is_no_problem(combined: Callable[..., Combined]) -> None:
    assert combined(ranks=3, batch_size=64).json["train_micro_batch_size_per_gpu"] == 22


def test_auto_is_what_the_config_says(combined: Callable[..., Combined]) -> None:
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "offload_optimizer": {"device": "auto"}},
    }
    told = combined(file, {"zero_stage": 3}, gradient_clip=0.5, precision="bf16", gradient_accumulation=4)
    assert (told.stage, told.clip, told.precision, told.own_precision) == (3, 0.5, "bf16", True)
    assert told.json["bf16"] == {"enabled": True}
    assert told.json["fp16"] == {"enabled": False, "loss_scale": 0}
    assert told.json["gradient_clipping"] == 0.5
    assert "optimizer" not in told.json  # the training's own is given to DeepSpeed
    assert "auto" not in json.dumps(told.json)


def test_what_only_the_file_says_is_passed_on(combined: Callable[..., Combined]) -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 123, "overlap_comm": False}
    told = combined({"gradient_clipping": 2.0, "steps_per_print": 7, "zero_optimization": zero})
    assert (told.stage, told.clip) == (3, 2.0)
    assert told.json["steps_per_print"] == 7
    assert zero.items() <= told.json["zero_optimization"].items()


def test_values_that_agree_are_fine(combined: Callable[..., Combined]) -> None:
    file = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "optimizer": {"type": "adamw", "params": {"lr": 0.01, "betas": [0.9, 0.999]}},
        "zero_optimization": {"stage": 1},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    told = combined(file, {"zero_stage": 1}, gradient_clip=1.0, gradient_accumulation=4, precision="bf16")
    assert (told.stage, told.precision, told.own_precision) == (1, "bf16", False)
    assert told.json["torch_autocast"] == file["torch_autocast"]


CONFLICTS: list[Any] = [
    ({"train_batch_size": 32}, {}, r"train_batch_size=32 in .*ds\.json.*training\.batch_size=64"),
    ({"train_micro_batch_size_per_gpu": 4}, {}, r"train_micro_batch_size_per_gpu=4 .*training\.batch_size=64 over 2"),
    ({"gradient_accumulation_steps": 2}, {}, r"gradient_accumulation_steps=2 .*training\.gradient_accumulation=1"),
    ({"gradient_clipping": 1.0}, {"gradient_clip": 0.5}, r"gradient_clipping=1\.0 .*training\.gradient_clip=0\.5"),
    ({"fp16": {"enabled": True}}, {"precision": "bf16"}, r"fp16\.enabled=true .*training\.precision=bf16"),
    ({"bf16": {"enabled": True}}, {"precision": "fp32"}, r"bf16\.enabled=true .*training\.precision=fp32"),
    ({"bfloat16": {"enabled": True}}, {"precision": "fp32"}, r"bf16\.enabled=true .*training\.precision=fp32"),
    ({"bf16": {"enabled": False}}, {"precision": "bf16"}, r"bf16\.enabled=false .*training\.precision=bf16"),
    (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"precision": "bf16"},
        r"torch_autocast\.enabled=true .*training\.precision=bf16",
    ),
    (
        {"zero_optimization": {"stage": 2}},
        {"strategy": {"zero_stage": 3}},
        r"zero_optimization\.stage=2 .*strategy\.zero_stage=3",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
        {"strategy": {"cpu_offload": True}},
        r'offload_optimizer\.device="none" .*strategy\.cpu_offload=true',
    ),
    ({"optimizer": {"type": "Lamb"}}, {}, r'optimizer\.type="Lamb" .*AdamW \(training\.optimizer\)'),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}, {}, r"optimizer\.params\.lr=0\.5 .*has lr=0\.01"),
    ({"optimizer": {"type": "AdamW", "params": {"warp": 9}}}, {}, r"optimizer\.params\.warp=9 .*takes no warp"),
    ({"scheduler": {"type": "WarmupLR"}}, {}, r"scheduler=.*WarmupLR.*training\.schedule; leave it out"),
    ({"sequence_parallel_size": 2}, {}, r"sequence_parallel_size=2 cannot .*samples of its own; use 1"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, r'"nvme" cannot be used.*checkpoints'),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, r"bf16 and fp16 are both enabled"),
    ({"zero_optimization": {"stage": 4}}, {}, r"stage=4 must be 0, 1, 2 or 3"),
    ({"zero_optimization": 2}, {}, r"zero_optimization must be an object, not 2"),
    ({"gradient_clipping": "much"}, {}, r"gradient_clipping='much' must be a number"),
    (
        {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
        {"precision": "bf16"},
        r"bf16\.enabled=true.*stage 0",
    ),
    ({"zero_optimization": {"stage": 0}}, {"strategy": {"cpu_offload": True}}, r"cpu_offload=true needs ZeRO"),
]


@pytest.mark.parametrize(("file", "ours", "message"), CONFLICTS)
def test_contradictions_are_refused_with_both_values_and_places(
    combined: Callable[..., Combined], file: dict[str, Any], ours: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        combined(file, **ours)


def test_a_precision_that_is_left_open_is_the_files(combined: Callable[..., Combined]) -> None:
    told = combined({"bf16": {"enabled": True}}, precision="auto")
    assert (told.precision, told.own_precision) == ("bf16", True)


def test_offload_means_the_optimizer_and_in_stage_3_the_parameters(combined: Callable[..., Combined]) -> None:
    offload = {"cpu_offload": True}
    second = combined(strategy={**offload, "zero_stage": 2}).json["zero_optimization"]
    third = combined(strategy={**offload, "zero_stage": 3}).json["zero_optimization"]
    assert second["offload_optimizer"] == third["offload_optimizer"] == third["offload_param"] == {"device": "cpu"}
    assert "offload_param" not in second


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no such file"),
        (b"{", r"is no valid JSON"),
        (b"[1]", r"must hold a JSON object, not a list"),
        (b'{"a": 1, "a": 2}', r"a is there twice"),
        (b"\xff\xfe", r"cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"strategy\.deepspeed_config=.*ds\.json.*{message}"):
        make_strategy(Place(CPU, config=StrategyConfig(name="deepspeed", deepspeed_config=str(path))))


@pytest.mark.parametrize(
    ("file", "lossy"),
    [
        ({}, False),
        ({"communication_data_type": "fp32"}, False),
        ({"communication_data_type": "bf16"}, True),
        ({"zero_optimization": {"zero_quantized_weights": True}}, True),
    ],
)
def test_it_knows_whether_something_is_rounded_on_the_way(file: dict[str, Any], lossy: bool) -> None:
    assert is_lossy(file) is lossy


def test_the_extra_is_named_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependencyError, match=r"distributed-training\[deepspeed\]"):
        make_strategy(Place(CPU, config=StrategyConfig(name="deepspeed")))
