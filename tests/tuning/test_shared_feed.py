"""One feed for all trials: the very batches that a trial would load for itself, each sample preprocessed once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.launching import coverage_variables

from distributed_training.config import Config
from distributed_training.data import Splits
from distributed_training.data.base import Share
from distributed_training.data.nested import tensors_in
from distributed_training.data.plan import Plan
from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.training.job import build_job, load_data, make_loader
from distributed_training.tuning.shared_feed import SharedData, SharedFeed
from distributed_training.tuning.shared_feed.shelves import ABSENT, ALONE, WORKING, Shelf

SAMPLES, HELD_OUT = 240, 60
BAD, DEADLY = 17, 200
"""Samples that raise, and that kill whoever loads them."""
MODULE = """
import os, signal

def count():
    end = os.open("calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(end, b".")
    os.close(end)

def plain(sample):
    count()
    image, label = sample
    return image * 2 + 1, label

def noisy(sample, rng):
    count()
    image, label = sample
    return image + float(rng.normal()), label

def sometimes(sample):
    import torch
    count()
    image, label = sample
    if label == 3:
        image += torch.rand(())  # in place, as people do
    return image, label

def bad(sample):
    from distributed_training.data.randomness import claimed_generators
    image, label = sample
    if image.flatten().tolist() == BAD:
        raise ValueError("a bad sample")
    if image.flatten().tolist() == DEADLY and claimed_generators() is not None:  # in a worker, not in a trial
        os.kill(os.getpid(), signal.SIGKILL)
    return image, label

BAD = DEADLY = None
"""


def settings(preprocess: str, **changes: Any) -> Config:
    values = {
        "data.dataset": "synthetic",
        "data.args": {"samples": SAMPLES + HELD_OUT, "shape": [1, 4, 4]},
        "data.preprocess": f"shared_samples:{preprocess}",
        "tuning.share_feed": "on",
        "tuning.feed_workers": 2,
        "run.deadline": 60.0,
        "training.device": "cpu",
        "run.progress": "off",
    }
    return Config().replace(**{**values, **changes})


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the user's module is."""
    path = tmp_path_factory.mktemp("shared")
    config = settings("plain", **{"data.preprocess": None})
    first = load_data(config).train.fetch(np.arange(SAMPLES))[0].flatten(1).tolist()
    module = MODULE.replace("BAD = DEADLY = None", f"BAD, DEADLY = {first[BAD]!r}, {first[DEADLY]!r}")
    (path / "shared_samples.py").write_text(module, encoding="utf-8")
    return path


@contextmanager
def standing(preprocess: str) -> Iterator[SharedFeed]:
    """A feed with all its processes, whose lines count for the coverage."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in coverage_variables(True).items():
                patch.setenv(name, value)
            feed = stack.enter_context(SharedFeed(settings(preprocess)))
        end = time.monotonic() + 30
        while len(children_of(feed)) < 2:
            assert time.monotonic() < end, "the workers do not start"
            time.sleep(0.01)
        yield feed


@pytest.fixture(scope="module")
def plain_feed(folder: Path) -> Iterator[SharedFeed]:
    with inside(folder), standing("plain") as feed:
        yield feed


@pytest.fixture(scope="module")
def noisy_feed(folder: Path) -> Iterator[SharedFeed]:
    with inside(folder), standing("noisy") as feed:
        yield feed


@pytest.fixture
def here(folder: Path) -> Iterator[Path]:
    with inside(folder):
        (folder / "calls").unlink(missing_ok=True)
        yield folder


def calls() -> int:
    return Path("calls").stat().st_size if Path("calls").exists() else 0


def epoch_of(splits: Splits, config: Config, epoch: int, **options: Any) -> list[tuple[int, list[int], list[bytes]]]:
    """The batches of an epoch, to the last bit."""
    loader = make_loader(splits.train, config, training=True)
    loader.share = options.pop("share", Share())
    try:
        return [
            (step, batch.ids.tolist(), [t.numpy().tobytes() for t in tensors_in(batch.data)])
            for step, batch in loader.batches(epoch, **options)
        ]
    finally:
        loader.close()


def children_of(feed: SharedFeed) -> list[psutil.Process]:
    assert feed._process is not None
    return psutil.Process(feed._process.pid).children(recursive=True)


def test_samples_that_draw_nothing_are_preprocessed_once_for_all_trials(plain_feed: SharedFeed, here: Path) -> None:
    config = settings("plain")
    others = [
        (config, 0, {}),
        (config.replace(**{"training.batch_size": 7, "training.seed": 5}), 3, {}),
        (config.replace(**{"training.batch_size": 100}), 1, {"start": 1}),
        (config.replace(**{"data.num_workers": 2}), 1, {}),
        (config, 1, {"share": Share(1, 2)}),
    ]
    got = []
    for trial, epoch, options in others:
        with SharedData(plain_feed.name, trial) as data:
            assert data.splits is not None
            got.append(epoch_of(data.splits, trial, epoch, **options))
            validation = data.splits.validation
            assert validation is not None
            held_out = validation.fetch(np.arange(HELD_OUT))
            assert data.splits.train.loaded_here == validation.loaded_here == 0  # type: ignore[attr-defined]
    assert calls() == SAMPLES + HELD_OUT
    own = load_data(config)
    assert got == [epoch_of(own, trial, epoch, **options) for trial, epoch, options in others]
    assert own.validation is not None
    assert own.validation.fingerprint() == validation.fingerprint()
    assert own.train.fingerprint() == data.splits.train.fingerprint()
    for mine, theirs in zip(tensors_in(own.validation.fetch(np.arange(HELD_OUT))), tensors_in(held_out)):
        assert torch.equal(mine, theirs)


def test_random_samples_are_shared_by_trials_of_one_seed(noisy_feed: SharedFeed, here: Path) -> None:
    config = settings("noisy", **{"training.seed": 100})
    other, seeded = config.replace(**{"training.batch_size": 16}), config.replace(**{"training.seed": 101})
    with SharedData(noisy_feed.name, config) as one, SharedData(noisy_feed.name, other) as two:
        assert one.splits is not None
        assert two.splits is not None
        got = [epoch_of(one.splits, config, epoch) for epoch in range(2)]
        assert calls() == 2 * SAMPLES
        again = [epoch_of(two.splits, other, epoch) for epoch in range(2)]
        assert calls() == 2 * SAMPLES  # a trial of another batch size that comes later pays nothing
        third = epoch_of(one.splits, seeded, 0)
        assert calls() == 3 * SAMPLES
    own = load_data(config)
    assert got == [epoch_of(own, config, epoch) for epoch in range(2)]
    assert again == [epoch_of(own, other, epoch) for epoch in range(2)]
    assert third == epoch_of(own, seeded, 0)


def test_too_little_memory_costs_time_and_nothing_else(here: Path) -> None:
    args = {"samples": 150, "shape": [1, 64, 128]}  # 32 KiB a sample: some 25 of them fit
    config = settings("sometimes", **{"data.args": args, "tuning.feed_memory_mb": 1})
    own = load_data(config)
    with SharedFeed(config) as feed, SharedData(feed.name, config) as one, SharedData(feed.name, config) as two:
        assert one.splits is not None
        assert two.splits is not None
        for epoch in range(2):
            assert epoch_of(one.splits, config, epoch) == epoch_of(own, config, epoch)
            assert epoch_of(two.splits, config, epoch) == epoch_of(own, config, epoch)


def test_what_cannot_be_loaded_is_left_to_the_trials(here: Path) -> None:
    config = settings("bad")
    own = load_data(config)
    with pytest.raises(DataError) as alone:
        epoch_of(own, config, 0)
    with SharedFeed(config) as feed, SharedData(feed.name, config) as data:
        assert data.splits is not None
        train: Any = data.splits.train
        with pytest.raises(DataError, match="a bad sample") as shared:
            epoch_of(data.splits, config, 0)
        assert str(shared.value) == str(alone.value)
        rest = np.array([sample for sample in range(SAMPLES) if sample != BAD])
        images, labels = train.fetch(rest)  # although workers die of one of them
        assert train.loaded_here <= 64 + 2  # the batch that failed, the deadly one, one that another worker had
        mine = own.train.fetch(rest)
        assert torch.equal(images, mine[0])
        assert torch.equal(labels, mine[1])


def read_and_wait(name: str, config: Config, ready: Any) -> None:
    with SharedData(name, config) as data:
        assert data.splits is not None
        for step, _ in make_loader(data.splits.train, config, training=True).batches(0):
            if step == 1:
                ready.set()
                time.sleep(600)


def test_a_killed_trial_changes_nothing_for_others_and_nothing_is_left(noisy_feed: SharedFeed, here: Path) -> None:
    config = settings("noisy", **{"training.seed": 200})
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    trial = context.Process(target=read_and_wait, args=(noisy_feed.name, config, ready))
    trial.start()
    assert ready.wait(60)
    trial.kill()
    trial.join(30)
    with SharedData(noisy_feed.name, config) as data:
        assert data.splits is not None
        assert epoch_of(data.splits, config, 0) == epoch_of(load_data(config), config, 0)
    end = time.monotonic() + 30
    while left := [path for path in Path("/dev/shm").iterdir() if "dtrain" in path.name]:
        assert time.monotonic() < end, left  # a test of the MPI backend beside this one has a name there for a moment
        time.sleep(0.05)


def test_a_training_from_the_shared_feed_ends_with_the_same_weights(noisy_feed: SharedFeed, here: Path) -> None:
    config = settings("noisy", **{"training.epochs": 2, "model.args": {"hidden": [8]}})
    weights = []
    for name in (None, noisy_feed.name):
        with SharedData(name, config) as data, build_job(config, run_dir=False, data=data.splits) as job:
            job.train()
            weights.append({key: value.clone() for key, value in job.trainer.model.state_dict().items()})
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_killed_workers_and_a_killed_service_change_nothing(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "distributed_training")  # commands run in this process may have set another
    config = settings("noisy")
    own = load_data(config)
    expected = [epoch_of(own, config, epoch) for epoch in range(4)]
    with SharedFeed(config) as feed, SharedData(feed.name, config) as data:
        assert data.splits is not None
        assert epoch_of(data.splits, config, 0) == expected[0]
        for worker in children_of(feed):
            worker.kill()
        assert epoch_of(data.splits, config, 1) == expected[1]
        assert not caplog.records
        loader = make_loader(data.splits.train, config, training=True)
        seen = []
        for step, batch in loader.batches(2):
            if step == 1:
                assert feed._process is not None
                os.kill(feed._process.pid, signal.SIGKILL)
                psutil.Process(feed._process.pid).wait(30)
            seen.append((step, batch.ids.tolist(), [t.numpy().tobytes() for t in tensors_in(batch.data)]))
        assert seen == expected[2]
        assert epoch_of(data.splits, config, 3) == expected[3]
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "loads its samples for itself" in caplog.text


def test_who_gets_a_feed(plain_feed: SharedFeed, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SharedFeed(Config()) as feed:
        assert feed.name is None  # the digits lie in memory
    with SharedFeed(settings("plain", **{"tuning.share_feed": "off"})) as feed:
        assert feed.name is None
    Path("ragged.py").write_text(
        "import torch\nclass Ragged:\n    def __len__(self): return 50\n"
        "    def __getitem__(self, n): return b'x' * (n + 1), n\n",
        encoding="utf-8",
    )
    ragged = settings("plain", **{"data.dataset": "ragged:Ragged", "data.args": {}, "data.preprocess": None})
    with pytest.raises(ConfigError, match=r"share_feed=on.*fixed size"), SharedFeed(ragged):
        pass
    changed = settings("plain", **{"data.validation_fraction": 0.5})
    with SharedData(plain_feed.name, changed) as data:
        assert data.splits is None  # the search changes the data itself
    assert "other than that of the search" in caplog.text


def test_what_lasts_stays_and_what_all_have_had_makes_room() -> None:
    shelf = Shelf(samples=32, slots=16)
    none = np.empty(0, np.int32)

    def load(ids: list[int], key: int, *, drew: bool) -> np.ndarray:
        wanted = np.array(ids)
        slots = shelf.allocate(len(ids), none)
        shelf.begin(wanted[: len(slots)])
        shelf.finish(wanted[: len(slots)], slots, key, drew=drew)
        return slots

    assert len(load([0, 1, 2, 3], 7, drew=False)) == 4
    assert (shelf.find(np.arange(4), 99) >= 0).all()  # the same under every key
    shelf.read("a", 7)
    shelf.read("b", 7)
    assert len(load(list(range(4, 16)), 7, drew=True)) == 12
    assert (shelf.find(np.arange(4, 16), 8) == ABSENT).all()
    assert len(load([20], 7, drew=True)) == 0  # nobody is done with any
    shelf.note(np.array([4, 5]), 7)
    assert len(load([20], 7, drew=True)) == 0  # one of two readers is
    shelf.note(np.array([4, 5]), 7)
    held = shelf.find(np.array([5]), 7)
    assert len(shelf.allocate(4, held)) == 1  # but 5 is being read just now
    assert shelf.find(np.array([4, 5]), 7).tolist() == [ABSENT, held[0]]
    shelf.unread("a", 7)
    shelf.unread("b", 7)
    assert len(shelf.allocate(16, none)) == 11  # a key without readers goes; what lasts does not
    assert (shelf.find(np.arange(4), 7) >= 0).all()
    shelf.begin(np.array([30, 31]))
    assert (shelf.find(np.array([30, 31]), 7) == WORKING).all()
    shelf.fail(np.array([30]), forever=True)
    shelf.fail(np.array([31]), forever=False)
    assert shelf.find(np.array([30, 31]), 7).tolist() == [ALONE, ABSENT]


def test_a_part_of_the_room_is_kept_from_what_lasts() -> None:
    shelf = Shelf(samples=100, slots=16)
    ids = np.arange(16)
    shelf.finish(ids[:14], shelf.allocate(14, np.empty(0, np.int32)), 1, drew=False)
    shelf.finish(ids[14:], shelf.allocate(2, np.empty(0, np.int32)), 1, drew=False)
    assert shelf.lasting == 14
    assert (shelf.find(ids, 1) >= 0).all()
    assert (shelf.find(ids[14:], 2) == ABSENT).all()


def test_a_plan_reads_shares_in_the_order_of_its_steps() -> None:
    from distributed_training.tuning.shared_feed.guests import Guest, Reader

    plan, shelf = Plan(50, 8, seed=3), Shelf(50, 50)
    peer: Any = None
    for rank in range(2):
        reader = Reader(Guest(peer, "t"), "train", plan, Share(rank, 2), 1, 2)
        wanted = []
        while len(ids := reader.next_absent(shelf, 5)):
            wanted += ids.tolist()
            shelf.begin(ids)
        steps = [plan.ids(1, step) for step in range(2, plan.steps_per_epoch)]
        assert wanted == np.concatenate([ids[Share(rank, 2).rows(len(ids))] for ids in steps]).tolist()
