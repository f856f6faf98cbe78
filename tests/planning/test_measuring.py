"""What is said where a model cannot be measured, and what copies beside each other make of their figures."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from distributed_training.config import Config
from distributed_training.planning import model_facts
from distributed_training.planning.measuring import Laboratory, jitter_of, middle_of, read_links, slowest
from distributed_training.planning.profile import BACKWARD_OVER, UPDATE
from distributed_training.planning.ways import BY_LABEL, chosen_way
from distributed_training.runtime.errors import BenchError, OutOfMemoryError
from distributed_training.verify.running import Outcome


def test_a_model_too_large_even_for_one_sample_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    monkeypatch.setattr(model_facts, "_room", lambda device: 11e6)  # gradients and two averages are 12 MB

    with pytest.raises(OutOfMemoryError, match="even with one sample a step; plan on a machine with more memory"):
        model_facts.check_room(model, optimizer, torch.device("cpu"))

    monkeypatch.setattr(model_facts, "_room", lambda device: 13e6)
    model_facts.check_room(model, optimizer, torch.device("cpu"))


def test_a_measurement_that_was_killed_is_told_from_one_that_failed(tmp_path: Path) -> None:
    lab = Laboratory(Config(), tmp_path, 1, 10.0, lambda line: None)

    assert isinstance(lab._failed(Outcome("exit code -9", []), 8), OutOfMemoryError)
    failed = lab._failed(Outcome("exit code 3", ["error: no such label"]), 8)
    assert isinstance(failed, BenchError)
    assert "no such label" in str(failed)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_ranks_that_are_compared_train_as_the_config_says(tmp_path: Path, accumulation: int) -> None:
    changes = {"training.gradient_accumulation": accumulation, "training.gradient_clip": 0.5, "training.batch_size": 16}
    lab = Laboratory(Config().replace(**changes), tmp_path, 1, 10.0, lambda line: None)

    task = lab.rank_task(BY_LABEL["ddp+powersgd"], 16, 5)

    config = Config.from_dict(task.config)
    assert {name: getattr(config.training, name.split(".")[1]) for name in changes} == changes
    assert (config.strategy.name, config.strategy.compression, task.batches) == ("ddp", "powersgd", [16])


def test_what_a_library_adds_is_measured_without_accumulation(tmp_path: Path) -> None:
    lab = Laboratory(Config().replace(**{"training.gradient_accumulation": 4}), tmp_path, 1, 10.0, lambda line: None)

    task = lab.rank_task(BY_LABEL["deepspeed 3"], 8, 5, accumulation=1)

    assert Config.from_dict(task.config).training.gradient_accumulation == 1


def test_of_copies_beside_each_other_the_slowest_counts() -> None:
    copies = [
        {"8": {"step": s, "spread": 1 / s, "had_core": s / 4, "parts": {"forward": s}, "timeline": []}}
        for s in (1.0, 3.0, 2.0)
    ]

    merged = slowest(copies)

    assert merged[8]["step"] == 3.0
    assert merged[8]["parts"] == {"forward": 3.0}
    assert merged[8]["spread"] == 1.0
    assert merged[8]["had_core"] == pytest.approx(0.25), "of the one that was disturbed most"


def test_of_several_launches_the_middle_of_each_number_counts() -> None:
    launches = [
        {
            "backend": "horovod",
            "ranks": 2,
            "slowdown": s,
            "overlap": 0.0,
            "message": m,
            "times": {"all_reduce": [(8, t), (9, 2 * t)]},
        }
        for s, m, t in [(1.1, 3e-3, 1.0), (1.3, 1e-3, 5.0), (1.2, 2e-3, 3.0)]
    ]

    links = read_links(middle_of(launches), BY_LABEL["horovod"])

    assert (links.slowdown, links.message, links.ranks, links.backend) == (1.2, 2e-3, 2, "horovod")
    assert links.times == {"all_reduce": [(8.0, 3.0), (9.0, 6.0)]}


def test_jitter_is_from_step_to_step_and_no_drift() -> None:
    generator = random.Random(1)
    noisy = [10 + generator.gauss(0.0, 0.5) for _ in range(4000)]
    drifting = [10 + i / 1000 + generator.gauss(0.0, 0.05) for i in range(4000)]
    disturbed = [10.0, 10.0, 30.0, 10.0, 10.0, 10.0]

    assert jitter_of([noisy]) == pytest.approx(0.05, rel=0.1)
    assert jitter_of([drifting]) == pytest.approx(0.05 / 12, rel=0.1)
    assert jitter_of([disturbed, disturbed]) == 0.0
    assert jitter_of([[1.0]]) == 0.0


def test_how_mpi_talks_is_found_by_the_name_of_its_way() -> None:
    found = {
        "ranks": 2,
        "backend": "dtrain_mpi",
        "overlap": 0.5,
        "slowdown": 1.0,
        "times": {"all_reduce": [[8, 1e-6], [80, 1e-5]]},
    }

    mpi, ddp = read_links(found, BY_LABEL["mpi"]), read_links({**found, "backend": "gloo"}, BY_LABEL["ddp"])

    assert (mpi.backend, ddp.backend) == ("mpi", "gloo")
    assert mpi.times["all_reduce"] == [(8.0, 1e-6), (80.0, 1e-5)]
    assert mpi.message is None
    assert read_links({**found, "message": 1e-3}, BY_LABEL["horovod"]).message == 1e-3


def test_memory_of_a_batch_does_not_depend_on_those_measured_before_it(tmp_path: Path) -> None:
    settings = {"model.args": {"hidden": [512] * 6}, "training.device": "cpu"}
    lab = Laboratory(Config().replace(**settings), tmp_path, 1, 120.0, lambda line: None, seconds=0.1)

    profile = lab.profile({1: [512, 1024]})

    small, large = (profile.times[1][size] for size in (512, 1024))
    weights = profile.gradient_bytes
    assert small["step"] > 0
    assert large["step"] > 0
    for found in (small, large):
        assert [number for number, _ in found["timeline"]][-3:] == [BACKWARD_OVER, UPDATE, UPDATE]
        after = found["timeline"][-1][1]  # the update is done: weights and two averages
        assert 2.9 * weights < after < 3.5 * weights, "memory that was kept while time was measured counts"
    assert large["peak"] > small["peak"]


def test_the_way_that_a_config_names() -> None:
    def named(**settings: object) -> str | None:
        way = chosen_way(Config().replace(**{f"strategy.{key}": value for key, value in settings.items()}))
        return way.label if way is not None else None

    assert named(name="ddp") == "ddp"
    assert named(name="ddp", compression="powersgd") == "ddp+powersgd"
    assert named(name="deepspeed") == "deepspeed 2"
    assert named(name="deepspeed", zero_stage=3) == "deepspeed 3"
    assert named(name="fsdp") == "zero3"
    assert named(name="auto") is None
    assert BY_LABEL["deepspeed 3"].words == "strategy=deepspeed strategy.zero_stage=3"
