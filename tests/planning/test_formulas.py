"""Memory and time of every strategy, from a profile with round numbers."""

from __future__ import annotations

import math

import pytest
from tests.planning.made_up import MB, WEIGHTS, profile

from distributed_training.planning.cluster import Cluster, Links
from distributed_training.planning.memory import MemoryModel
from distributed_training.planning.step_time import TimeModel
from distributed_training.planning.ways import BY_LABEL, WAYS, ways_for

P = sum(WEIGHTS)


def time_model(device: str = "cuda", **cluster: object) -> TimeModel:
    made = profile(device)
    settings = {"bucket_mb": 25.0, "powersgd_rank": 4.0}
    return TimeModel(made, Cluster(per_node=8, **cluster), MemoryModel(made), settings)  # type: ignore[arg-type]


def test_one_device_needs_what_was_measured() -> None:
    found = MemoryModel(profile()).predict(BY_LABEL["single"], 1, 16)

    assert found.total == pytest.approx(
        max(3 * P + 20 * MB + 16 * MB, 3 * P + 60 * MB + 16 * MB * 2 / 3, 4 * P + 5.33e6), rel=1e-3
    )
    assert found.weights == P
    assert found.optimizer == 2 * P


def test_between_measured_batches_memory_follows_the_line() -> None:
    model = MemoryModel(profile(activations=50 * MB))

    at = {batch: model.predict(BY_LABEL["single"], 1, batch).total for batch in (8, 12, 16)}

    assert at[12] == pytest.approx((at[8] + at[16]) / 2)


def test_memory_follows_the_line_though_gradients_come_in_another_order_with_another_batch() -> None:
    swapped = profile()
    timeline = swapped.times[1][8]["timeline"]
    timeline[0], timeline[1] = (1, timeline[0][1]), (2, timeline[1][1])

    found, expected = (MemoryModel(one).predict(BY_LABEL["single"], 1, 12).total for one in (swapped, profile()))

    assert found == pytest.approx(expected)
    assert found < MemoryModel(profile()).predict(BY_LABEL["single"], 1, 16).total


def test_ddp_keeps_all_gradients_while_activations_are_at_their_most() -> None:
    model = MemoryModel(profile(activations=50 * MB))

    single, ddp = (model.predict(BY_LABEL[name], 4, 16) for name in ("single", "ddp"))

    assert ddp.total == pytest.approx(4 * P + 20 * MB + 16 * 50 * MB), "buckets, the newest gradient, activations"
    assert single.total < ddp.total


def test_stages_divide_what_they_say() -> None:
    model = MemoryModel(profile())
    ranks = 8

    zero1, zero3 = (model.predict(BY_LABEL[name], ranks, 16) for name in ("zero1", "zero3"))

    assert zero1.weights == P
    assert zero1.optimizer == 2 * 40 * MB, "whole parameters: the rank with the largest"
    assert zero3.weights == pytest.approx(P / ranks)
    assert zero3.optimizer == pytest.approx(2 * P / ranks)
    totals = [model.predict(BY_LABEL[name], ranks, 16).total for name in ("ddp", "zero1", "zero3")]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_has_a_bucket_and_what_travels_of_it_when_the_backward_pass_is_over(stage: int) -> None:
    made = profile("cpu", activations=1000.0)

    found = MemoryModel(made).predict(BY_LABEL[f"deepspeed {stage}"], 4, 16)

    assert (found.weights, found.optimizer) == (P + P / 4, 2 * P / 4)
    assert found.gradients + found.gathered == 2 * P
    assert found.activations < 1 * MB, "those of the backward pass are gone"


def test_deepspeed_keeps_gradients_beside_many_activations() -> None:
    made = profile("cpu", activations=50 * MB)

    first = MemoryModel(made).predict(BY_LABEL["deepspeed 1"], 4, 16)

    assert first.activations == pytest.approx(16 * 50 * MB)
    assert first.gradients == 20 * MB, "the first gradient; the bucket is not written to yet"


def test_accumulation_saves_activations_but_keeps_gradients() -> None:
    model = MemoryModel(profile(activations=100 * MB))

    whole, parts = (model.predict(BY_LABEL["single"], 1, 16, n) for n in (1, 2))

    assert parts.activations == pytest.approx(8 * 100 * MB)
    assert parts.gradients == P + 20 * MB
    assert parts.total < whole.total


def test_time_of_one_device_is_what_was_measured() -> None:
    step = time_model().predict(BY_LABEL["single"], 1, 16)

    assert step.whole == pytest.approx(16 * 3e-3 + 1e-3)
    assert step.sent == 0


def test_gradients_are_hidden_behind_the_backward_pass_but_for_the_last_bucket() -> None:
    fast = time_model(intra_bandwidth=100e9, intra_latency=1e-9).predict(BY_LABEL["ddp"], 8, 16)

    last = 2 * 7 / 8 * 40 * MB / 100e9
    assert fast.waited == pytest.approx(last, rel=1e-3)
    assert fast.talked == pytest.approx(2 * 7 / 8 * P / 100e9, rel=1e-3)
    assert fast.sent == pytest.approx(2 * 7 / 8 * P)


def test_a_slow_network_is_waited_for() -> None:
    slow = time_model(bandwidth=1e9, latency=1e-9)
    ddp = slow.predict(BY_LABEL["ddp"], 64, 16)
    halved, thin = (slow.predict(BY_LABEL[name], 64, 16) for name in ("ddp+bf16", "ddp+powersgd"))

    backward = 32e-3
    assert ddp.waited == pytest.approx(0.3 * backward + 2 * 63 / 64 * P / 1e9 - backward, rel=1e-2)
    assert halved.sent == pytest.approx(ddp.sent / 2)
    assert thin.sent < ddp.sent / 100
    assert ddp.whole > halved.whole > thin.whole


def test_nothing_is_hidden_where_cores_are_shared() -> None:
    step = time_model(overlap=0.0, intra_bandwidth=100e9).predict(BY_LABEL["ddp"], 8, 16)

    assert step.waited == pytest.approx(step.talked)


def test_stage_3_sends_half_as_much_again_and_updates_a_part() -> None:
    model = time_model(intra_bandwidth=100e9)
    ddp, zero3 = (model.predict(BY_LABEL[name], 8, 16) for name in ("ddp", "zero3"))

    assert zero3.sent == pytest.approx(1.5 * ddp.sent)
    assert ddp.compute - zero3.compute == pytest.approx(5e-4 * 7 / 8)


def test_ranks_agree_by_a_number_that_takes_as_long_as_a_message() -> None:
    slow, fast = (time_model("cpu", intra_latency=latency) for latency in (1e-2, 1e-9))

    def more(label: str) -> float:
        way = BY_LABEL[label]
        return slow.predict(way, 2, 16).waited - fast.predict(way, 2, 16).waited

    message = 2 * 1e-2  # round the ring of two and back
    assert more("ddp") == pytest.approx(more("accelerate") + message, rel=0.01), "of its own update only ddp asks"
    assert more("deepspeed 2") == pytest.approx(message + 1e-2 + 2 * message), "sum, gather; overflow, norm"


def test_ranks_wait_for_the_slowest_more_often_where_they_meet_more_often() -> None:
    late = {}
    for label in ("ddp", "zero2"):
        calm, uneven = time_model("cpu"), time_model("cpu")
        uneven._profile.jitter = {1: 0.1}
        way = BY_LABEL[label]
        more = uneven.predict(way, 2, 16).whole - calm.predict(way, 2, 16).whole
        late[label] = more / calm.predict(way, 2, 16).compute

    assert late["ddp"] == pytest.approx(0.1 * 0.589, rel=0.01), "the larger of two is 0.59 sigma above their mean"
    assert late["zero2"] == pytest.approx(late["ddp"] * math.sqrt(6)), "three units, forward and backward"


def test_a_library_that_is_never_idle_slows_the_computation() -> None:
    times = {"all_reduce": [(1e3, 1e-3), (1e8, 1e-1)]}
    links = {"gloo": Links(2, times), "horovod": Links(2, times, slowdown=1.25)}
    model = time_model("cpu", links=links)

    ddp, horovod = (model.predict(BY_LABEL[name], 2, 16) for name in ("ddp", "horovod"))

    assert horovod.compute == pytest.approx(1.25 * ddp.compute)
    assert horovod.rest == pytest.approx(1.25 * ddp.rest)


def test_horovod_sends_what_is_ready_whenever_its_thread_looks() -> None:
    times = {"all_reduce": [(1e3, 2e-3), (1e8, 1.02e-1)]}  # 2 ms, and a second for a GB
    links = {"horovod": Links(2, times, overlap=0.0, message=5e-4)}
    model, way = time_model("cpu", links=links), BY_LABEL["horovod"]

    apart = model.predict(way, 2, 16)
    model._profile.times[1][16]["ready"] = [(2, 0.3), (1, 0.301), (0, 1.0)]
    together = model.predict(way, 2, 16)

    # Three messages, the last 1.5 ms of waiting for the thread behind nothing; then two.
    assert apart.talked == pytest.approx(P / 1e9 + 3 * 5e-4, rel=1e-3)
    assert apart.waited == pytest.approx(apart.talked + 1.5e-3, rel=1e-3)
    assert together.talked == pytest.approx(P / 1e9 + 2 * 5e-4, rel=1e-3)
    assert together.sent == apart.sent == pytest.approx(P)


def test_a_message_costs_what_was_measured_though_larger_ones_were_quicker_by_chance() -> None:
    times = {"all_reduce": [(1e3, 4e-3), (1e8, 1e-3)]}
    model = time_model("cpu", links={"horovod": Links(2, times, overlap=0.0, message=5e-4)})

    assert model.predict(BY_LABEL["horovod"], 2, 16).talked >= 3 * 5e-4


def test_deepspeed_takes_what_its_one_rank_took_longer() -> None:
    model = time_model("cpu")
    assumed = {label: model.predict(BY_LABEL[label], 2, 16).copies for label in ("deepspeed 1", "deepspeed 3")}

    model._profile.own = {"deepspeed 2": 0.02, "deepspeed 3": 0.07}

    found = {label: model.predict(BY_LABEL[label], 2, 16).copies for label in ("deepspeed 1", "deepspeed 3", "ddp")}
    assert assumed["deepspeed 3"] == pytest.approx(assumed["deepspeed 1"] * 4 / 3), "passes over the weights"
    assert found["deepspeed 1"] == pytest.approx(0.02), "as its stage 2"
    assert found["deepspeed 3"] == pytest.approx(0.07)
    assert found["ddp"] < 0.02


def test_a_backend_that_was_not_measured_is_taken_to_be_like_the_one_that_was() -> None:
    times = {"all_reduce": [(1e3, 1e-3), (1e8, 1e-1)]}
    model = time_model("cpu", links={"gloo": Links(2, times)})

    mpi, ddp = (model.predict(BY_LABEL[name], 2, 16) for name in ("mpi", "ddp"))

    assert mpi.talked == pytest.approx(ddp.talked)


def test_half_precision_takes_what_was_measured_with_its_rounding() -> None:
    times = {"all_reduce": [(1e3, 1e-3), (1e8, 1e-1)]}
    slow = {**times, "all_reduce_bf16": [(1e3, 1e-3), (1e8, 1.0)]}
    plain, measured = (
        time_model("cpu", links={"gloo": Links(2, found, overlap=0.0)}).predict(BY_LABEL["ddp+bf16"], 2, 16)
        for found in (times, slow)
    )

    assert measured.talked > 5 * plain.talked
    assert measured.copies == pytest.approx(plain.copies / 2), "its own passes are in what was measured"


def test_on_a_cpu_nothing_of_divided_weights_is_hidden() -> None:
    step = time_model("cpu", intra_bandwidth=1e9, intra_latency=1e-9).predict(BY_LABEL["zero3"], 2, 16)

    # P and 80 MB of units gathered, P divided; half of each goes over the link.
    assert step.talked == pytest.approx((P + 80 * MB + P) / 2 / 1e9, rel=1e-3)
    assert step.waited == step.talked


def test_deepspeed_3_sends_each_small_parameter_by_itself() -> None:
    made = time_model("cpu", intra_latency=1e-3, intra_bandwidth=1e15)
    before = made.predict(BY_LABEL["deepspeed 3"], 2, 16).talked
    made._bytes = [*WEIGHTS, *[400.0] * 10]

    assert made.predict(BY_LABEL["deepspeed 3"], 2, 16).talked == pytest.approx(before + 10 * 1e-3, rel=1e-3)


@pytest.mark.parametrize("way", [way for way in WAYS if way.family != "single"], ids=lambda way: way.label)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_strategy_has_both_predictions(way: object, device: str) -> None:
    made = profile(device)

    memory = MemoryModel(made).predict(way, 8, 16)  # type: ignore[arg-type]
    step = time_model(device).predict(way, 8, 16)  # type: ignore[arg-type]

    assert 0.9 * P / 8 < memory.total < 10 * P
    assert step.whole > 0
    assert step.waited <= step.talked + 0.01  # Horovod's cycle


def test_dp_is_for_the_gpus_of_one_machine() -> None:
    assert "dp" in [way.label for way in ways_for(8, "cuda", 8)]
    assert "dp" not in [way.label for way in ways_for(16, "cuda", 8)]
    assert "dp" not in [way.label for way in ways_for(2, "cpu", 8)]
    assert [way.label for way in ways_for(1, "cuda", 8)] == ["single"]
