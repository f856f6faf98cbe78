"""Batches from real loader processes over real sockets are those of a local loader, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch
from tests.contract.batch_source import BatchSourceContract
from tests.feed.conftest import StartLoader
from tests.feed.datasets import make_dataset, make_plan

from distributed_training.data import Batch, BatchSource
from distributed_training.data import Loader as LocalLoader
from distributed_training.data.base import Share
from distributed_training.data.nested import tensors_in
from distributed_training.feed import FeedServer, FeedSettings, FeedSource
from distributed_training.runtime.errors import DataError

QUICK = FeedSettings(deadline=30.0, absence=30.0, lease=5.0, shortest_lease=0.3, silence=6.0, authentication=2.0)


def fingerprint(batches: Any) -> list[Any]:
    """Everything that training sees of some batches."""
    seen = []
    for step, batch in batches:
        tensors = [(t.dtype, tuple(t.shape), hash_of(t)) for t in tensors_in(batch.data)]
        rest = batch.data["name"] if isinstance(batch.data, dict) else None
        seen.append((step, batch.ids.tolist(), type(batch.data).__name__, tensors, rest))
    return seen


def hash_of(tensor: torch.Tensor) -> str:
    """A hash of the bits."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def local(name: str, epoch: int = 0, start: int = 0) -> list[Any]:
    """What a local loader gives."""
    dataset = make_dataset(name)
    return fingerprint(LocalLoader(dataset, make_plan(dataset)).batches(epoch, start))


def server_for(name: str, **options: Any) -> FeedServer:
    """A server that expects this dataset."""
    dataset = make_dataset(name)
    options.setdefault("settings", QUICK)
    return FeedServer(make_plan(dataset), dataset=dataset.fingerprint(), **options)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
@pytest.mark.parametrize("name", ["arrays", "samples", "large", "views"])
def test_two_workers_bring_what_a_local_loader_reads(start_loader: StartLoader, name: str, shared: bool) -> None:
    with server_for(name, epochs=2) as server:
        loader = start_loader(server.link(), name, workers=2, shared_memory=shared)
        source = server.source()
        for epoch in range(2):
            assert fingerprint(source.batches(epoch)) == local(name, epoch)
        assert server.figures().shared == (server.figures().loaders if shared else 0)
    assert "exit code 0" in loader.wait()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_frames_that_grow_disturb_nothing(
    start_loader: StartLoader, shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with server_for("many", epochs=2) as server:
        start_loader(server.link(), "many", shared_memory=shared)
        for epoch in range(2):
            assert fingerprint(server.source().batches(epoch)) == local("many", epoch)
        assert "is gone" not in caplog.text


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_samples_that_are_alike_only_within_a_step_arrive_too(start_loader: StartLoader, shared: bool) -> None:
    with server_for("stepwise", epochs=1) as server:
        loader = start_loader(server.link(), "stepwise", shared_memory=shared)
        assert fingerprint(server.source().batches(0)) == local("stepwise")
    assert "exit code 0" in loader.wait()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sockets"])
def test_samples_whose_memory_is_used_again_after_a_batch_are_what_they_were(
    start_loader: StartLoader, shared: bool
) -> None:
    with server_for("used again", epochs=2) as server:
        loader = start_loader(server.link(), "used again", shared_memory=shared)
        for epoch in range(2):
            for _, batch in server.source().batches(epoch):
                row, label, array = batch.data
                assert label.tolist() == batch.ids.tolist()
                assert torch.equal(row, label[:, None].expand(-1, 300).float())
                assert torch.equal(array, -label[:, None].expand(-1, 5))
    assert "exit code 0" in loader.wait()


@pytest.mark.parametrize("shared", [True, False], ids=["gather in shared memory", "send"])
@pytest.mark.parametrize("name", ["long views", "many", "wide", "large"])
def test_what_other_threads_help_to_bring_is_the_same(start_loader: StartLoader, name: str, shared: bool) -> None:
    epochs = 3  # both ways take turns meanwhile
    with server_for(name, epochs=epochs) as server:
        loader = start_loader(server.link(), name, shared_memory=shared, spare_cores=1)
        for epoch in range(epochs):
            assert fingerprint(server.source().batches(epoch)) == local(name, epoch)
    assert "exit code 0" in loader.wait()


@pytest.mark.parametrize("name", ["long views", "many", "wide", "large"])
def test_what_is_sent_aside_is_the_same(start_loader: StartLoader, name: str) -> None:
    with server_for(name, epochs=2) as server:
        loader = start_loader(server.link(), name, shared_memory=False, aside=True)
        worker, most = psutil.Process(loader.workers(1)[0]), 0
        for epoch in range(2):
            batches = []
            for batch in server.source().batches(epoch):
                batches.append(batch)
                with suppress(psutil.NoSuchProcess):  # it leaves when all is sent
                    most = max(most, worker.num_threads())
            assert fingerprint(batches) == local(name, epoch)
        assert most >= 3, "the thread that loads, the connection's, and one of the C library"
    assert "exit code 0" in loader.wait()


class _Closing(FeedSource):
    """A source that takes its server with it."""

    def __init__(self, server: FeedServer) -> None:
        super().__init__(server.hub)
        self.server = server

    def close(self) -> None:
        self.server.close()


class TestContract(BatchSourceContract):
    @pytest.fixture
    def source_factory(self, start_loader: StartLoader) -> Iterator[Callable[[], BatchSource]]:
        made = []

        def make() -> BatchSource:
            server = server_for("arrays")
            start_loader(server.link())
            made.append(_Closing(server))
            return made[-1]

        yield make
        for source in made:
            source.close()


def test_a_server_without_a_plan_takes_that_of_the_first_loader(start_loader: StartLoader) -> None:
    with FeedServer(settings=QUICK) as server:
        start_loader(server.link())
        source = server.source()
        dataset = make_dataset("arrays")
        assert source.describe() == {**make_plan(dataset).describe(), "dataset": dataset.fingerprint()}
        assert fingerprint(source.batches(0, 40)) == local("arrays", 0, 40)


def test_each_rank_gets_its_own_rows(start_loader: StartLoader) -> None:
    dataset = make_dataset("arrays")
    plan = make_plan(dataset)
    for rank in range(3):
        with server_for("arrays") as server:
            source = server.source()
            source.share = Share(rank, 3)
            start_loader(server.link())
            here = LocalLoader(dataset, plan)
            here.share = Share(rank, 3)
            assert _described(source.batches(1, 58)) == _described(here.batches(1, 58))


def test_one_loader_feeds_the_ranks_of_a_job(start_loader: StartLoader) -> None:
    dataset = make_dataset("arrays")
    with server_for("arrays") as first, server_for("arrays") as second:
        start_loader([first.link(), second.link()], workers=2)
        sources = [first.source(), second.source()]
        for rank, source in enumerate(sources):
            source.share = Share(rank, 2)
        for rank, source in enumerate(sources):
            here = LocalLoader(dataset, make_plan(dataset))
            here.share = Share(rank, 2)
            assert _described(source.batches(0)) == _described(here.batches(0))


def test_compressed_batches_are_the_same_batches(start_loader: StartLoader) -> None:
    with server_for("plain") as server:
        start_loader(server.link(), "plain", shared_memory=False, compression="always")
        seen = list(server.source().batches(0))
        assert fingerprint(seen) == local("plain")
        assert 0 < server.figures().bytes < sum(t.nbytes for _, b in seen for t in tensors_in(b.data)) / 4


def _described(batches: Iterator[tuple[int, Batch]]) -> list[Any]:
    every = list(batches)
    sizes = [(b.rows, b.size, b.step_size, b.padding, b.step_ids.tolist()) for _, b in every if b.step_ids is not None]
    return [fingerprint(every), sizes]


def test_what_is_kept_is_never_overwritten(start_loader: StartLoader) -> None:
    with server_for("arrays", settings=FeedSettings(memory=1 << 20, deadline=30.0)) as server:
        start_loader(server.link(), shared_memory=False)
        kept = list(server.source().batches(0))  # all of an epoch, though memory is used again
        assert fingerprint(kept) == local("arrays")


def test_memory_stays_within_its_bound_when_training_is_slow(start_loader: StartLoader) -> None:
    settings = FeedSettings(memory=8 << 20, deadline=30.0)
    dataset = make_dataset("large")  # a batch of 16 takes 1 MiB
    with FeedServer(make_plan(dataset), dataset=dataset.fingerprint(), epochs=3, settings=settings) as server:
        start_loader(server.link(), "large", workers=2, shared_memory=False)
        most = 0
        for epoch in range(3):
            for _ in server.source().batches(epoch):
                most = max(most, server.hub.memory_held, server.pool.used_bytes)
        assert 1 << 20 < most <= 8 << 20
        assert server.pool.free_bytes <= 8 << 20


def test_a_batch_that_never_fits_is_an_error_that_says_so(start_loader: StartLoader) -> None:
    with server_for("large", settings=FeedSettings(memory=2 << 20, deadline=30.0)) as server:
        start_loader(server.link(), "large", shared_memory=False)
        with pytest.raises(DataError, match="raise its memory to at least"):
            list(server.source().batches(0))
