"""Figures say in words what held training up."""

from __future__ import annotations

import pytest

from distributed_training.feed import Figures, source


def test_the_bottleneck_is_named() -> None:
    assert Figures().bottleneck() == "nothing was trained yet"
    assert Figures(seconds=100, steps=10, waited=1).bottleneck().startswith("the GPU")
    assert Figures(seconds=100, steps=10, waited=60, loading=190, loaders=2).bottleneck().startswith("loading")
    assert Figures(seconds=100, steps=10, waited=60, loading=20, loaders=2).bottleneck().startswith("the network")
    absent = Figures(seconds=100, steps=10, waited=60, alone=45, loading=20, loaders=2).bottleneck()
    assert absent.startswith("missing loaders: training waited in 60.0% of the time, for 45.0 s with none connected")


def test_figures_of_a_part_of_the_time() -> None:
    before = Figures(seconds=10, steps=5, samples=50, bytes=1_000_000, waited=1, loaders=2, queue=7)
    part = Figures(seconds=20, steps=25, samples=250, bytes=5_000_000, waited=6, loaders=3, queue=1).since(before)
    assert (part.steps, part.loaders, part.queue) == (20, 3, 1)
    assert (part.samples_per_second, part.megabytes_per_second, part.wait_share) == (20.0, 0.4, 0.5)
    assert part.as_metrics()["feed_wait_share"] == 0.5


def test_rates_are_those_of_a_tenth_of_a_second_however_often_training_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hub = [100.0], Counting()
    monkeypatch.setattr(source.time, "monotonic", lambda: clock[0])
    feed = source.FeedSource(hub)  # type: ignore[arg-type]
    hub.now = Figures(seconds=1, samples=100, loaders=1)
    first = feed.metrics()
    assert first["feed_samples_per_second"] == 100
    clock[0], hub.now = 100.05, Figures(seconds=1.05, samples=150, loaders=2)
    assert feed.metrics() == first
    clock[0], hub.now = 100.25, Figures(seconds=1.25, samples=200, loaders=2)
    later = feed.metrics()
    assert later["feed_samples_per_second"] == 400, "100 samples in the quarter of a second since the first"
    assert later["feed_loaders"] == 2


class Counting:
    now = Figures()

    def figures(self) -> Figures:
        return self.now
