"""What people see of a feed."""

from __future__ import annotations

import pytest

from distributed_training.feed.figures import Figures
from distributed_training.feed.loader import LoaderFigures
from distributed_training.split.screen import LoaderScreen, summary

LOADED = LoaderFigures(workers=0, connected=0, batches=100, bytes=5_000_000, loading=1e6, restarts=0, epoch=1, step=7)


def test_the_end_says_what_was_the_bottleneck() -> None:
    figures = Figures(seconds=10, steps=100, samples=6400, bytes=10**8, waited=5, loading=19, loaders=2, reissued=3)
    feed, bottleneck, faults = summary(figures)
    assert "6,400 samples at 640/s, 10.0 MB/s; training waited 50.0% of the time" in feed
    assert "loading: " in bottleneck
    assert "start more loader workers" in bottleneck
    assert "3 steps were lent again" in faults


@pytest.mark.parametrize("kind", ["plain", "bar", "off"])
def test_a_loader_shows_what_it_does(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    screen = LoaderScreen(kind, steps=20, samples=64, workers=2, epochs=3)
    screen(LOADED)
    screen.close(LOADED)
    said = capsys.readouterr().err
    if kind == "off":
        assert said == ""
    else:
        assert "loaded 100 batches, 5.0 MB in" in said
        assert "2 workers spent 100% of it on loading; more of them" in said
