"""How fast probes came is computed from their numbers, and how much may come follows how fast they come."""

from __future__ import annotations

import itertools

import pytest

from distributed_training.feed.doctor.probing import ProbeMeter, rate_of
from distributed_training.wire import Probe
from distributed_training.wire.messages import ProbeReport


def arrive(meter: ProbeMeter, number: int, size: int, now: float) -> ProbeReport | None:
    return meter.arrived(Probe(number, size, None), now)


def test_a_slice_is_over_when_the_number_changes() -> None:
    meter = ProbeMeter(1 << 30)
    assert arrive(meter, 0, 100, 10.0) is None  # nobody knows when it set out: it does not count
    assert arrive(meter, 0, 300, 11.0) is None
    assert arrive(meter, 1, 500, 12.0) == ProbeReport(0, 300, 1.0)
    assert arrive(meter, 1, 500, 13.0) is None
    assert arrive(meter, 2, 0, 20.0) == ProbeReport(1, 1000, 2.0)  # an empty one ends them
    assert arrive(meter, 3, 100, 50.0) is None  # the pause between does not count
    assert arrive(meter, 4, 100, 51.0) == ProbeReport(3, 0, 0.0)


def test_a_window_grows_while_bytes_come_quickly_and_never_beyond_what_was_agreed() -> None:
    meter, limits, now = ProbeMeter(40 << 20), [], 0.0
    while (limit := meter.credit(now)) is not None:
        limits.append(limit)
        assert meter.credit(now) is None
        arrive(meter, 0, meter.outstanding, now)
        now += 0.01
    steps = [after - before for before, after in itertools.pairwise(limits)]
    assert limits[0] == 256 << 10
    assert steps[:4] == [(512 << 10) * 2**n for n in range(4)]
    assert limits[-1] == 40 << 20
    assert meter.outstanding == 0


def test_a_window_on_a_slow_link_stays_small() -> None:
    meter = ProbeMeter(1 << 30)
    for second in range(20):
        limit = meter.credit(float(second))
        assert limit == (second + 1) * (256 << 10)
        arrive(meter, 0, meter.outstanding, float(second))


def test_the_rate_is_that_of_the_second_half() -> None:
    slices = [ProbeReport(n, size, 0.5) for n, size in enumerate([1, 2, 3, 100, 120, 110])]
    assert rate_of(slices) == pytest.approx(220)
    assert rate_of([ProbeReport(0, 0, 0.0), ProbeReport(1, 50, 0.5)]) == pytest.approx(100)
    assert rate_of([]) == 0
