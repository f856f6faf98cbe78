"""This project: loader workers in another process, batches in plan order."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from distributed_training.bench.transport.base import Case, Run, Take, process

if TYPE_CHECKING:
    from distributed_training.data import Dataset, Plan
    from distributed_training.feed import FeedServer

NEEDS = ["distributed_training"]


@contextmanager
def fed(dataset: Dataset, plan: Plan, workers: int, *, shared: bool = True, tls: bool = False) -> Iterator[FeedServer]:
    """A server whose loader is a fork of this process, which forks its workers. Nothing may have started threads here.

    `shared`: batches may go through shared memory, as they do between processes of one machine. `tls`: they are
    encrypted, as they are between machines.
    """
    from distributed_training.feed import FeedServer, Loader, LoaderSettings
    from distributed_training.feed.pairing import new_token
    from distributed_training.feed.tls import make_certificate

    reading, writing = os.pipe()

    def load() -> None:
        os.close(writing)
        link = os.read(reading, 1000).decode()
        Loader(dataset, plan, link, workers=workers, settings=LoaderSettings(shared_memory=shared)).run()

    proof: dict[str, Any] = {"token": new_token(), "certificate": make_certificate()} if tls else {}
    with process(load), FeedServer(plan, dataset=dataset.fingerprint(), epochs=10**6, **proof) as server:
        os.write(writing, str(server.link()).encode())
        yield server
    os.close(reading)
    os.close(writing)


def feed(dataset: Any, case: Case, take: Take, *, shared: bool, tls: bool = False) -> None:
    """Take what one loader worker sends."""
    from distributed_training.data import Plan

    with fed(dataset, Plan(case.samples, case.rows, 0), 1, shared=shared, tls=tls) as server:
        source = server.source()
        for epoch in range(10**6):
            for _, batch in source.batches(epoch):
                if not take(*batch.data):
                    return


def run(case: Case, take: Take, *, shared: bool = False, tls: bool = False) -> None:
    """Samples in arrays."""
    from distributed_training.data import ArrayDataset

    feed(ArrayDataset(case.arrays()), case, take, shared=shared, tls=tls)


WAYS: dict[str, Run] = {
    "ours, TCP": run,
    "ours, TLS": functools.partial(run, tls=True),
    "ours, shared memory": functools.partial(run, shared=True),
}
