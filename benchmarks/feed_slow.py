"""A feed over a long and narrow link: the part `slow` of `benchmarks/feed.py`.

A proxy (tests/feed/slow_link.py) carries 20 Mbit/s each way and takes 50 ms for each, so 100 ms there and back. For
batches of several sizes, and for one and several workers, how much of the link's rate arrives as batches: from the
first batch on, the time it takes to fill the link included.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tests.feed.slow_link import SlowLink

from distributed_training.bench.transport.base import process
from distributed_training.data import ArrayDataset, Dataset, Plan
from distributed_training.feed import FeedServer, Loader, LoaderSettings

RATE, ROUND_TRIP = 2.5e6, 0.1  # bytes a second, seconds
TARGET = 0.9
SIZES = {"26 KB": 400, "393 KB": 6_144, "1.5 MB": 24_000}  # bytes of a sample, of which a batch has 64
WORKERS = (1, 4)
SECONDS = 20.0


@contextmanager
def fed(dataset: Dataset, plan: Plan, workers: int, compression: str = "off") -> Iterator[tuple[FeedServer, SlowLink]]:
    """A server whose loader, in another process, reaches it through the slow link."""
    reading, writing = os.pipe()

    def load() -> None:
        os.close(writing)
        settings = LoaderSettings(shared_memory=False, compression=compression)  # type: ignore[arg-type]
        Loader(dataset, plan, os.read(reading, 1000).decode(), workers=workers, settings=settings).run()

    with (
        process(load),
        FeedServer(plan, dataset=dataset.fingerprint(), epochs=10**6) as server,
        SlowLink(server.port, RATE, ROUND_TRIP) as link,
    ):
        os.write(writing, str(replace(server.link(), port=link.port)).encode())
        yield server, link
    os.close(reading)
    os.close(writing)


def carried(dataset: Dataset, plan: Plan, workers: int, seconds: float, compression: str = "off") -> dict[str, float]:
    """What arrives in so many seconds from the first batch on."""
    size = plan.batch_size * (dataset.sample_bytes or 0)
    with fed(dataset, plan, workers, compression) as (server, link):
        source = server.source()
        batches, began, before = 0, 0.0, 0
        for epoch in range(10**6):
            for _ in source.batches(epoch):
                now = time.perf_counter()
                if not began:
                    began, before = now, link.there.carried
                    continue
                batches += 1
                if now - began > seconds:
                    rate, figures = batches * size / (now - began), server.figures()
                    return {
                        "MB/s": rate / 1e6,
                        "of the link's rate": rate / RATE,
                        "bytes carried, of its rate": (link.there.carried - before) / (now - began) / RATE,
                        "steps ahead": figures.horizon,
                        "came twice": figures.duplicates,
                    }
    raise AssertionError("the epochs are over")


def over_slow_link(rounds: int) -> dict[str, Any]:
    """Each size with each number of workers, the worst of the rounds; then what compression makes of zeros."""
    found: dict[str, Any] = {}
    for name, width in SIZES.items():
        samples = max(640, min(8192, 2**26 // width))
        numbers = np.random.default_rng(0).integers(0, 256, (samples, width), dtype=np.uint8)
        dataset, plan = ArrayDataset(numbers, name=name), Plan(samples, 64, 0)
        for workers in WORKERS:
            runs = [carried(dataset, plan, workers, SECONDS) for _ in range(rounds)]
            found[f"{name}, {workers} workers"] = min(runs, key=lambda run: run["of the link's rate"])
    text = np.random.default_rng(0).integers(0, 8, (2048, 6_144), dtype=np.uint8)  # 3 bits of 8 say something
    found["393 KB of 3 bits in 8, compression=auto"] = carried(
        ArrayDataset(text, name="compressible"), Plan(2048, 64, 0), 1, SECONDS, "auto"
    )
    return found
