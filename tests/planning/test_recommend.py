"""Which strategy is taken, why, and what makes fit what does not."""

from __future__ import annotations

import pytest
from tests.planning.made_up import profile

from distributed_training.config import Config
from distributed_training.config.errors import ConfigError
from distributed_training.planning import planner
from distributed_training.planning.cluster import Cluster
from distributed_training.planning.planner import PlanOptions, make_plan
from distributed_training.planning.predictions import Advice, Plan, Prediction
from distributed_training.planning.profile import Profile
from distributed_training.planning.report import markdown, to_dict


def planned(
    gpus: tuple[int, ...], memory: float = 80e9, bandwidth: float = 50e9, price: float | None = None, **settings: object
) -> tuple[planner._Planning, list[Prediction], Config, Profile, Cluster]:
    made = profile(activations=50e6)
    config = Config().replace(**{"training.batch_size": 16, **settings})
    cluster = Cluster(per_node=8, device_memory=memory, bandwidth=bandwidth, price=price)
    planning = planner._Planning(config, PlanOptions(gpus=gpus, price=price), made, cluster)
    rows = [planning.predict(way, n) for n in gpus for way in planning.ways(n)]
    return planning, rows, config, made, cluster


def advice(gpus: int, **options: object) -> Advice:
    planning, rows, *_ = planned((gpus,), **options)  # type: ignore[arg-type]
    return planning.advise(rows)


def test_ddp_where_it_fits() -> None:
    found = advice(8)

    assert found.label == "ddp"
    assert found.settings == "strategy=ddp"
    assert found.remedies == []


def test_what_does_not_fit_is_named_with_the_setting_that_helps() -> None:
    found = advice(2, memory=0.72e9)  # 400 MB of state under ddp, and 400 MB of activations

    assert found.label in ("zero2", "zero3")
    assert any(
        line.startswith("ddp on 2 needs") and "training.gradient_accumulation=2" in line for line in found.remedies
    )


def test_nothing_fits() -> None:
    found = advice(2, memory=0.01e9)

    assert found.label is None
    assert "nothing" in found.reasons[0]
    assert any("strategy.cpu_offload=true" in line for line in found.remedies)


def test_rounding_is_offered_but_not_chosen_unless_the_config_asks_for_it() -> None:
    slow = {"bandwidth": 1e8}

    assert advice(16, **slow).label == "ddp"
    assert any("rounds gradients: strategy=ddp strategy.compression=powersgd" in r for r in advice(16, **slow).reasons)
    named = {"strategy.name": "ddp", "strategy.compression": "powersgd"}
    assert advice(16, **slow, **named).label == "ddp+powersgd"


def test_more_ranks_than_samples_is_said() -> None:
    assert any("raise training.batch_size to 64" in reason for reason in advice(64).reasons)


def test_the_report_has_every_row_and_costs() -> None:
    planning, rows, _, made, cluster = planned((1, 8), price=2.0)
    advised = [planning.advise([row for row in rows if row.ranks == n]) for n in (1, 8)]
    plan = Plan(
        "Made", "dtrain plan", made.model, cluster, ["x"], rows, advised, planning.curves(), [], 16, 30, "strong"
    )

    text, values = markdown(plan), to_dict(plan)

    assert "| cost of an epoch | of 30 epochs |" in text
    assert all(f"| {row.way.label}" in text for row in rows)
    single = values["predictions"][0]
    assert single["strategy"] == "single"
    assert single["efficiency"] == pytest.approx(1.0)
    hours = 63 * single["step"]["total"] / 3600  # 1,000 samples by 16
    assert single["cost_per_epoch"] == pytest.approx(2.0 * hours)
    weak = next(curve for curve in values["curves"] if curve["kind"] == "weak")
    assert weak["points"][-1][0] == 1024


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlanOptions(strategies=("zero4",)), "--strategies zero4: unknown; did you mean zero"),
        (PlanOptions(scaling="sideways"), "--scaling sideways"),
        (PlanOptions(gpus=(0,)), "--gpus"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(options: PlanOptions, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan(Config(), options)
