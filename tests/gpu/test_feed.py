"""A feed into a GPU: batches are copied ahead on a stream of their own, and the training is that of local data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.feed.conftest import StartLoader, _nursery, start_loader  # noqa: F401 (fixtures)
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.test_feed import QUICK, server_for
from tests.training.examples import assert_same_weights, config, trainer
from torch import Tensor, nn

from distributed_training.data import ArrayDataset, Plan
from distributed_training.data import Loader as LocalLoader
from distributed_training.data.ahead import copied_ahead
from distributed_training.data.base import Batch
from distributed_training.feed import BufferPool
from distributed_training.feed.shared import Arena, Segments
from distributed_training.feed.tensors import as_raw
from distributed_training.runtime.errors import DataError
from distributed_training.training import Callback, Trainer
from distributed_training.wire import pack_batch

CUDA = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))


@pytest.mark.parametrize("shared_memory", [False, True])
def test_weights_are_those_of_local_data(start_loader: StartLoader, in_tmp, shared_memory: bool) -> None:  # noqa: F811
    dataset, local, fed = make_dataset("arrays"), network(), network()
    with closing(trainer(local, training__device="cuda")) as alone:
        alone.train(LocalLoader(dataset, make_plan(dataset)), epochs=2)
    with server_for("arrays", epochs=2) as server, closing(trainer(fed, training__device="cuda")) as on_feed:
        start_loader(server.link(), shared_memory=shared_memory)
        on_feed.train(server.source(), epochs=2)
    assert_same_weights(fed, local)


def test_a_cache_and_a_transform_on_the_device(start_loader: StartLoader, in_tmp) -> None:  # noqa: F811
    def shifted(batch, *, rng):  # type: ignore[no-untyped-def]
        assert batch[0].device == CUDA
        return batch[0] + rng.uniform(-1, 1)[:, None], batch[1]

    def trained(source) -> nn.Module:  # type: ignore[no-untyped-def]
        net, settings = network(), config(training__device="cuda")
        with closing(Trainer(net, config=settings, run_dir=False, device_transform=shifted)) as trainer:
            trainer.train(source, epochs=3)
        return net

    dataset = make_dataset("arrays")
    local = trained(LocalLoader(dataset, make_plan(dataset)))
    with server_for("arrays", epochs=3, settings=replace(QUICK, cache="memory")) as server:
        start_loader(server.link(), shared_memory=False)
        assert_same_weights(trained(server.source()), local)
        assert server.figures().cached == 2 * server.hub.steps_per_epoch


def test_batches_arrive_on_the_device_with_their_labels_on_the_host(start_loader: StartLoader) -> None:  # noqa: F811
    dataset = make_dataset("large")
    local = LocalLoader(dataset, make_plan(dataset))
    with server_for("large", epochs=1) as server:
        assert server.pool.pinned
        start_loader(server.link(), "large", shared_memory=False)
        source = server.source()
        source.device = CUDA
        for (step, batch), (expected_step, expected) in zip(source.batches(0), local.batches(0)):
            assert step == expected_step
            for moved, right in zip(batch.data, expected.data):
                assert moved.device == CUDA
                assert torch.equal(moved.cpu(), right)
            assert batch.labels is not None
            assert torch.equal(batch.labels, expected.data[1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_training_from_a_feed_never_waits_for_the_gpu(start_loader: StartLoader, in_tmp) -> None:  # noqa: F811
    """torch raises on any synchronising call, once it is clear how steps run and until the last before the log."""

    class NoWaiting(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            if step == 6:
                torch.cuda.set_sync_debug_mode("error")
            if step == 50:
                torch.cuda.set_sync_debug_mode("default")

    with server_for("arrays", epochs=1) as server:
        start_loader(server.link(), shared_memory=False)
        fed = trainer(network(), NoWaiting(), training__device="cuda", training__log_every=1000)
        try:
            assert fed.train(server.source(), epochs=1).steps == server.source().steps_per_epoch
        finally:
            torch.cuda.set_sync_debug_mode("default")
            fed.close()


def test_memory_is_not_used_again_before_its_copy_is_done() -> None:
    """Copies of batches in reused memory, behind a stream that is busy: every one holds what was there at its turn."""
    pool = BufferPool(64 << 20, pinned=True)

    def batches() -> Iterator[tuple[int, Batch]]:
        for step in range(40):
            memory = np.frombuffer(pool.allocate(4 << 20), np.float32)
            memory[:] = step
            yield step, Batch(np.arange(4), (torch.from_numpy(memory),))
            del memory

    sums = []
    for step, batch in copied_ahead(batches(), CUDA, lambda: True):
        torch.cuda._sleep(20_000_000)  # the computing stream is far behind
        sums.append((step, batch.data[0].sum(), batch.data[0].numel()))
        del batch
    assert [float(total) for _, total, _ in sums] == [step * count for step, _, count in sums]


def test_shared_memory_is_pinned_and_not_used_again_before_its_copy_is_done() -> None:
    """A worker that writes into whatever slot is free, and a GPU that is far behind."""
    torch.zeros(1, device=CUDA)  # the process uses the GPU already
    arena, segments = Arena(64 << 20), Segments()
    sums = []
    for value in range(60):
        batch = pack_batch(0, 0, np.arange(3), torch.full((1 << 20,), value, dtype=torch.uint8), adapt=as_raw)
        while (place := arena.write([batch])) is None:  # until a copy is done
            segments._slots.look()
        memory = segments.locate(*place, batch.size)
        assert memory is not None
        there = torch.frombuffer(memory[64 : 64 + (1 << 20)], dtype=torch.uint8)
        assert there.is_pinned()
        torch.cuda._sleep(5_000_000)
        sums.append(there.to(CUDA, non_blocking=True).sum())
        del memory, there
    assert [int(total) for total in sums] == [value << 20 for value in range(60)]
    arena.close()
    segments.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_large_local_batches_are_copied_ahead(workers: int) -> None:
    """The very samples of the plan, whoever loads them, also after an epoch that was left in the middle."""
    images = np.random.default_rng(0).integers(0, 256, (96, 3, 160, 160), dtype=np.uint8)
    dataset, plan = ArrayDataset((images, np.arange(96) % 7)), Plan(96, 16, 3)
    loader = LocalLoader(dataset, plan, num_workers=workers, pin_memory=True, resident="off")
    loader.device = CUDA
    with closing(loader):
        for epoch, stop in ((0, 6), (1, 3), (2, 6)):
            for step, batch in itertools.islice(loader.batches(epoch), stop):
                torch.cuda._sleep(5_000_000)
                assert batch.data[0].is_cuda
                assert batch.labels is not None
                assert torch.equal(batch.data[0].cpu(), torch.from_numpy(images[batch.ids]))
                assert torch.equal(batch.data[1].cpu(), batch.labels)
                assert list(batch.ids) == list(plan.ids(epoch, step))


def test_an_error_in_place_of_a_batch_comes_at_its_turn() -> None:
    def batches() -> Iterator[tuple[int, Batch]]:
        for step in range(3):
            yield step, Batch(np.arange(2), (torch.zeros(2),))
        raise DataError("sample 7 cannot be loaded")

    copies = copied_ahead(batches(), CUDA, lambda: True)
    assert [next(copies)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="sample 7"):
        next(copies)
