"""The folder of checkpoints: what is kept, what is passed over, and what a background save reports."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.checkpoint import best_of, find_checkpoint, store
from distributed_training.checkpoint.files import STATE_FILE, UNFINISHED, CheckpointInfo, checkpoint_name
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.config import CheckpointConfig
from distributed_training.runtime.errors import CheckpointError

MakeStore = Callable[..., CheckpointStore]


@pytest.fixture(params=[True, False], ids=["background", "at once"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    def build(**settings: Any) -> CheckpointStore:
        return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(background=request.param, **settings))

    return build


def save(store: CheckpointStore, *steps: int, **metrics: float) -> None:
    for step in steps:
        store.save({"w": torch.full((100,), float(step))}, step=step, epoch=step, metrics=metrics)
        store.wait()


def steps_of(store: CheckpointStore) -> list[int]:
    return [info.step for info in store.all()]


def damage(store: CheckpointStore, step: int) -> None:
    file = store.folder / checkpoint_name(step) / STATE_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_state_comes_back(make: MakeStore) -> None:
    store = make()
    state = {"w": torch.arange(5), "nested": {1: (None, "x")}}
    store.prepare(state)
    store.save(state, step=3, epoch=1, metrics={"val_loss": 1.0})
    store.wait()
    info = store.newest_good()
    assert info is not None
    assert (info.step, info.epoch) == (3, 1)
    back = store.load(info)
    assert torch.equal(back["w"], torch.arange(5))
    assert back["nested"] == {1: (None, "x")}


def test_the_state_may_change_as_soon_as_save_returns(make: MakeStore) -> None:
    store, weight = make(keep=9), torch.zeros(200_000)
    for step in range(4):
        weight.fill_(step)
        store.save({"w": weight}, step=step, epoch=0, metrics={})
        weight.fill_(-1)
    store.wait()
    for info in store.all():
        assert torch.equal(store.load(info)["w"], torch.full((200_000,), float(info.step)))


def test_the_metrics_may_change_as_soon_as_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, go, write = CheckpointStore(tmp_path, CheckpointConfig()), threading.Event(), store.write_checkpoint

    def later(*args: Any, **kwargs: Any) -> CheckpointInfo:
        assert go.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(store, "write_checkpoint", later)
    metrics = {"val_loss": 1.0}
    slow.save({}, step=1, epoch=0, metrics=metrics)
    metrics["val_loss"] = 2.0
    go.set()
    slow.wait()
    assert slow.all()[0].metrics == {"val_loss": 1.0}


def test_the_newest_are_kept(make: MakeStore) -> None:
    store = make(keep=2)
    save(store, 1, 2, 3, 4)
    assert steps_of(store) == [3, 4]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 1)])
def test_the_best_is_kept_too(make: MakeStore, mode: str, best: int) -> None:
    store = make(keep=1, mode=mode)
    for step, value in [(1, 0.9), (2, 0.1), (3, 0.5), (4, 0.6)]:
        save(store, step, val_loss=value)
    assert steps_of(store) == [best, 4]
    found = store.best()
    assert found is not None
    assert found.step == best


def test_the_best_goes_when_it_is_not_wanted(make: MakeStore) -> None:
    store = make(keep=1, keep_best=False)
    for step, value in [(1, 0.1), (2, 0.9)]:
        save(store, step, val_loss=value)
    assert steps_of(store) == [2]


def test_the_best_is_one_with_a_finite_value() -> None:
    def info(step: int, **metrics: float) -> CheckpointInfo:
        return CheckpointInfo(Path(str(step)), step, 0, metrics)

    some = [info(1), info(2, loss=float("nan")), info(3, loss=-float("inf")), info(4, loss=5.0), info(5, loss=6.0)]
    best = best_of(some, "loss", "min")
    assert best is not None
    assert best.step == 4
    assert best_of(some[:3], "loss", "min") is None
    assert best_of([], "loss", "max") is None


def test_of_equals_the_first_is_best() -> None:
    both = [CheckpointInfo(Path("a"), 1, 0, {"loss": 1.0}), CheckpointInfo(Path("b"), 2, 0, {"loss": 1.0})]
    assert best_of(both, "loss", "min") == both[0]


def test_nothing_is_pruned_when_the_new_one_does_not_verify(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = make(keep=1)
    save(kept, 1)

    def bad(path: Path) -> None:
        raise CheckpointError(f"{path}: damaged")

    monkeypatch.setattr(store, "verify", bad)
    with pytest.raises(CheckpointError, match="damaged"):
        save(kept, 2)
    assert steps_of(kept) == [1, 2]


def test_a_damaged_later_one_does_not_push_out_good_ones(make: MakeStore) -> None:
    """After a resume from step 5, because 10 is damaged, step 7 must survive its own save."""
    store = make(keep=1, keep_best=False)
    save(store, 5)
    shutil.copytree(store.folder / checkpoint_name(5), store.folder / "kept aside")
    save(store, 10)
    (store.folder / "kept aside").rename(store.folder / checkpoint_name(5))
    damage(store, 10)
    save(store, 7)
    found = store.newest_good()
    assert found is not None
    assert found.step == 7


def test_what_a_crash_left_is_cleared_away(make: MakeStore) -> None:
    store = make()
    leftover = store.folder / f"{UNFINISHED}{checkpoint_name(1)}-99999"
    leftover.mkdir(parents=True)
    (leftover / STATE_FILE).write_bytes(b"half")
    save(store, 2)
    assert [path.name for path in store.folder.iterdir()] == [checkpoint_name(2)]


def test_damaged_ones_are_passed_over_with_a_warning(make: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    store = make(keep=3)
    save(store, 1, 2, 3)
    damage(store, 3)
    (store.folder / checkpoint_name(2) / "manifest.json").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        found = store.newest_good()
    assert found is not None
    assert found.step == 1
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 2
    assert checkpoint_name(3) in warnings[0]
    assert checkpoint_name(2) in warnings[1]
    assert steps_of(store) == [1, 3], "2 has no readable manifest"


def test_an_empty_or_missing_folder_has_no_checkpoint(make: MakeStore) -> None:
    store = make()
    assert store.newest_good() is None
    assert store.best() is None
    assert store.all() == []
    store.wait()


def test_committed_tells_each_checkpoint_once(make: MakeStore) -> None:
    store = make(keep=1)
    save(store, 1, 2)
    assert [info.step for info in store.committed()] == [1, 2]
    assert store.committed() == []


def test_an_error_is_raised_at_once_or_at_the_next_call(make: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = make()

    def full(*_: Any, **__: Any) -> CheckpointInfo:
        raise CheckpointError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_checkpoint", full)
        if failing._config.background:
            failing.save({}, step=1, epoch=0, metrics={})
            with pytest.raises(CheckpointError, match="no space"):
                failing.save({}, step=2, epoch=0, metrics={})
        else:
            with pytest.raises(CheckpointError, match="no space"):
                failing.save({}, step=1, epoch=0, metrics={})
    save(failing, 3)  # an error is raised once; then it goes on
    assert steps_of(failing) == [3]


def test_wait_raises_the_error_of_the_last_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = CheckpointStore(tmp_path, CheckpointConfig())

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(store, "verify", broken)
    failing.save({}, step=1, epoch=0, metrics={})
    with pytest.raises(OSError, match="input/output"):
        failing.wait()
    failing.wait()


def test_a_state_that_cannot_be_saved_is_refused_before_anything_is_written(make: MakeStore) -> None:
    store = make()
    with pytest.raises(CheckpointError, match="/bad"):
        store.save({"bad": object()}, step=1, epoch=0, metrics={})
    store.wait()
    assert store.all() == []


def test_a_disk_that_hangs_is_an_error_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = CheckpointStore(tmp_path, CheckpointConfig(), deadline=0.05)
    release, write = threading.Event(), store.write_checkpoint

    def slow(*args: Any, **kwargs: Any) -> CheckpointInfo:
        assert release.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(store, "write_checkpoint", slow)
    hanging.save({"w": torch.ones(3)}, step=1, epoch=0, metrics={})
    try:
        with pytest.raises(CheckpointError, match=r"still being written after 0\.05 s"):
            hanging.wait()
        with pytest.raises(CheckpointError, match="still being written"):
            hanging.save({"w": torch.zeros(3)}, step=2, epoch=0, metrics={})
    finally:
        release.set()
    hanging._deadline = 30
    hanging.wait()
    (found,) = hanging.all()
    assert torch.equal(hanging.load(found)["w"], torch.ones(3))


class TestFindCheckpoint:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        store = CheckpointStore(tmp_path / "run" / "checkpoints", CheckpointConfig(background=False))
        save(store, 1, 2)
        return tmp_path / "run"

    def test_a_run_means_its_newest(self, run: Path) -> None:
        assert find_checkpoint(run).step == 2

    def test_a_folder_of_checkpoints_means_its_newest(self, run: Path) -> None:
        assert find_checkpoint(run / "checkpoints").step == 2

    def test_a_checkpoint_means_itself(self, run: Path) -> None:
        assert find_checkpoint(run / "checkpoints" / checkpoint_name(1)).step == 1

    def test_a_damaged_newest_one_of_a_run_is_passed_over(self, run: Path, caplog: pytest.LogCaptureFixture) -> None:
        damage(CheckpointStore(run / "checkpoints", CheckpointConfig()), 2)
        assert find_checkpoint(run).step == 1
        assert "passed over" in caplog.text

    def test_a_damaged_one_that_was_named_is_an_error(self, run: Path) -> None:
        damage(CheckpointStore(run / "checkpoints", CheckpointConfig()), 2)
        with pytest.raises(CheckpointError, match="damaged"):
            find_checkpoint(run / "checkpoints" / checkpoint_name(2))

    @pytest.mark.parametrize("name", ["empty", "missing"])
    def test_nothing_is_an_error_with_the_path(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointError, match=f"{name}: no usable checkpoint"):
            find_checkpoint(tmp_path / name)


def test_buffers_are_not_made_beside_a_writer(tmp_path: Path) -> None:
    """It would be forgotten, and its pruning would meet the folder of the next save."""
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig())
    state = {"w": torch.zeros(100_000)}
    store.save(state, step=1, epoch=0, metrics={})
    writer = store._writer
    store.prepare(state)
    assert store._writer is writer
    store.save(state, step=2, epoch=0, metrics={})
    store.wait()
    assert steps_of(store) == [1, 2]
