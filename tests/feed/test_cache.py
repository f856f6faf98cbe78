"""With an epoch cache the batches are the same, and later epochs need no transfer."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.feed.conftest import StartLoader, until
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.test_feed import QUICK, fingerprint, local, server_for
from tests.feed.test_training import Killing, local_training, network
from tests.training.examples import assert_same_weights, trainer

from distributed_training.data import Loader as LocalLoader
from distributed_training.data.base import Batch, Share
from distributed_training.data.plan import Plan
from distributed_training.feed import FeedServer, FeedSettings
from distributed_training.feed.cache import EpochCache
from distributed_training.feed.cache_store import files_for
from distributed_training.feed.columns import Unkept, cut_rows, put_together, take_apart
from distributed_training.feed.planning import EpochPlan
from distributed_training.feed.sequencer import Sequencer
from distributed_training.runtime.errors import ConfigError

MEMORY = replace(QUICK, cache="memory")


def plain(size: int) -> memoryview:
    return memoryview(bytearray(size))


@pytest.mark.parametrize("name", ["arrays", "encoded"])
def test_later_epochs_need_no_transfer_and_no_loader(start_loader: StartLoader, name: str) -> None:
    with server_for(name, epochs=3, settings=MEMORY) as server:
        loader = start_loader(server.link(), name, workers=2)
        source = server.source()
        assert whole(source.batches(0)) == whole_local(name, 0)
        came = server.figures().bytes
        loader.kill()
        for _ in until(20):
            if not server.figures().loaders:
                break
        for epoch in (1, 2):
            assert whole(source.batches(epoch)) == whole_local(name, epoch)
        figures = server.figures()
        assert figures.bytes == came
        assert figures.cached == 2 * source.steps_per_epoch
        assert figures.samples == 3 * source.plan.samples


def whole(batches: Any) -> list[Any]:
    """Everything that training sees, encoded samples too."""
    every = list(batches)
    return [fingerprint(every), [b.data["image"] for _, b in every if isinstance(b.data, dict)]]


def whole_local(name: str, epoch: int) -> list[Any]:
    dataset = make_dataset(name)
    return whole(LocalLoader(dataset, make_plan(dataset)).batches(epoch))


def test_weights_are_those_of_local_data_though_workers_die(start_loader: StartLoader) -> None:
    net = network()
    with server_for("arrays", epochs=2, settings=MEMORY) as server:
        loader = start_loader(server.link(), workers=2)
        trainer(net, Killing(loader)).train(server.source(), epochs=2)
        assert server.figures().cached == server.hub.steps_per_epoch
    assert_same_weights(net, local_training())


def test_each_rank_keeps_whole_steps(start_loader: StartLoader) -> None:
    dataset = make_dataset("arrays")
    with server_for("arrays", epochs=2, settings=MEMORY) as server:
        source = server.source()
        source.share = Share(1, 3)
        start_loader(server.link())
        here = LocalLoader(dataset, make_plan(dataset))
        here.share = Share(1, 3)
        for epoch in range(2):
            assert _described(source.batches(epoch)) == _described(here.batches(epoch))
        assert server.figures().cached == source.steps_per_epoch


def _described(batches: Any) -> list[Any]:
    every: list[tuple[int, Batch]] = list(batches)
    return [fingerprint(every), [(b.size, b.step_size, b.padding) for _, b in every]]


def test_a_cache_on_disk_is_there_after_a_restart_and_what_is_damaged_comes_anew(
    start_loader: StartLoader, tmp_path: Path
) -> None:
    disk = replace(QUICK, cache="disk", cache_folder=tmp_path / "cache")
    with server_for("encoded", epochs=1, settings=disk) as server:
        start_loader(server.link(), "encoded")
        first = whole(server.source().batches(0))
        with server_for("encoded", settings=disk) as other:
            start_loader(other.link(), "encoded")
            with pytest.raises(ConfigError, match="another run uses"):
                list(other.source().batches(0))
    files = sorted((tmp_path / "cache").glob("rank-0/*/train/*.bin"))
    assert len(files) == 2  # the images and the names
    content = bytearray(files[0].read_bytes())
    content[10] ^= 1
    files[0].write_bytes(content)

    with server_for("encoded", epochs=1, settings=disk) as server:
        start_loader(server.link(), "encoded")
        source = server.source()
        assert whole(source.batches(0)) == first == whole_local("encoded", 0)
        figures = server.figures()
        assert figures.cached == figures.steps - 1  # but for the step of the damaged sample
    with server_for("arrays", epochs=1, settings=disk) as server:  # another dataset takes the place
        start_loader(server.link())
        assert fingerprint(server.source().batches(0)) == local("arrays")
    assert not files[0].exists()


def test_random_samples_are_refused(start_loader: StartLoader) -> None:
    with server_for("samples", settings=MEMORY) as server:
        loader = start_loader(server.link(), "samples")
        with pytest.raises(ConfigError, match=r"have a random part.*on the GPU side.*or set feed.cache=off"):
            list(server.source().batches(0))
        assert "have a random part" in loader.wait()


def test_what_does_not_fit_is_said_and_changes_nothing(
    start_loader: StartLoader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with server_for("large", epochs=2, settings=replace(MEMORY, cache_bytes=8 << 20)) as server:
        start_loader(server.link(), "large")
        source = server.source()
        for epoch in range(2):
            assert fingerprint(source.batches(epoch)) == local("large", epoch)
        assert server.figures().cached == 0
    assert "shuffled ones are of use only if all of them fit; set feed.cache_mb to 33" in caplog.text


def test_without_a_shuffle_a_part_is_of_use() -> None:
    plan = Plan(40, 4, shuffle=False)
    cache = EpochCache(EpochPlan(plan), 10 * 24)
    for step in range(10):
        ids = plan.ids(0, step)
        ones = torch.ones(4, 1, 8, dtype=torch.int8)
        cache.keep(step, 1, ids, (torch.from_numpy(ids.copy()), torch.from_numpy(ids * 1.5), ones))
        assert not cache.holds(0, step, Share())  # before the hub knows of the batch
        cache.publish(0, step)
    held = [step for step in range(10) if cache.holds(1, step, Share())]
    assert held == [0, 1]
    assert not cache.filling
    batch = cache.batch(1, 1, Share(1, 2), plain)
    assert batch.ids.tolist() == [6, 7]
    assert batch.data[1].tolist() == [9.0, 10.5]
    assert batch.data[2].shape == (2, 1, 8)


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(6.0).view(2, 3).to(torch.bfloat16),
        (np.arange(4, dtype=np.uint16).reshape(2, 2), [torch.zeros(2, dtype=torch.bool)]),
        {"x": torch.ones(2, 2, dtype=torch.complex64), 3: ["a", "b\u00e9"], "raw": (b"", b"12")},
    ],
)
def test_samples_come_back_as_they_were(data: Any) -> None:
    cache = EpochCache(EpochPlan(Plan(2, 2, shuffle=False)), 1000)
    cache.keep(0, 1, np.arange(2), data)
    cache.publish(0, 0)
    again = cache.batch(0, 0, Share(), plain).data
    assert take_apart(again, 2)[0] == take_apart(data, 2)[0]
    for one, other in zip(take_apart(again, 2)[1], take_apart(data, 2)[1]):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else np.array_equal(one, other)
        assert same


@pytest.mark.parametrize("data", [{"scale": 2.0}, (torch.zeros(3), torch.zeros(())), [torch.zeros(2)]])
def test_what_is_no_row_of_a_sample_is_not_kept(data: Any) -> None:
    with pytest.raises(Unkept):
        take_apart(data, 3)


def test_leaves_are_put_back_in_their_places() -> None:
    shape, leaves = take_apart({"a": [torch.zeros(2), (["x", "y"],)]}, 2)
    assert put_together(shape, iter(leaves)) == {"a": [leaves[0], (["x", "y"],)]}
    assert cut_rows({"a": ["x", "y"], "b": 3}, slice(1, 2), 2) == {"a": ["y"], "b": 3}


def test_batches_of_differing_shape_end_it(caplog: pytest.LogCaptureFixture) -> None:
    cache = EpochCache(EpochPlan(Plan(4, 2, shuffle=False)), 1000)
    cache.keep(0, 1, np.arange(2), torch.zeros(2, 3))
    cache.publish(0, 0)
    cache.keep(1, 1, np.arange(2, 4), torch.zeros(2, 4))
    assert not cache.filling
    assert cache.holds(5, 0, Share())  # what is here stays: somebody may have been promised it
    assert "differ in the shape" in caplog.text


def test_a_full_disk_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = EpochCache(EpochPlan(Plan(4, 2, shuffle=False)), 1000, files_for(tmp_path, "0" * 32, 0))
    cache.keep(0, 1, np.arange(2), torch.zeros(2, 3))
    cache.publish(0, 0)
    monkeypatch.setattr(os, "pwrite", full)
    cache.keep(1, 1, np.arange(2, 4), torch.zeros(2, 3))
    assert not cache.filling
    assert cache.holds(0, 0, Share())
    assert "the disk does not take it (No space left on device)" in caplog.text
    cache.close()


def test_steps_that_are_here_are_never_lent() -> None:
    sequencer: Sequencer[str] = Sequencer(10)
    here = {2, 3, 5}
    sequencer.have = lambda index: index in here
    sequencer.horizon, sequencer.one_epoch = 100, True
    sequencer.seek(0, 0, 3)
    sequencer.join("a", 0.0)
    sequencer.want("a", 100)
    lent = []
    while (grant := sequencer.grant("a", 0.0)) is not None:
        lent += [(grant.epoch, step) for step in range(grant.first, grant.last)]
    assert lent == [(0, step) for step in (0, 1, 4, 6, 7, 8, 9)]  # nor are those of the next epoch
    for _, step in lent:
        sequencer.arrived("a", 0, step, f"item {step}", 1.0)
    taken = [sequencer.take(100) for _ in range(4)]
    assert [[index for index, _ in some] for some in taken] == [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
    assert {index for some in taken for index, item in some if item is None} == here


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="needs a cache_folder"):
        FeedSettings(cache="disk")
    with FeedServer(settings=MEMORY) as server:
        assert server.hub.keeping.cache is None  # nothing is known of the data yet
