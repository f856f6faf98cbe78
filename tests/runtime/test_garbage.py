from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.training.examples import loader, model, trainer

from distributed_training import Callback, Trainer
from distributed_training.runtime import garbage
from distributed_training.runtime.garbage import OldObjects


class Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_SOON", 0.0)


@pytest.mark.usefixtures("at_once")
def test_garbage_is_found_before_and_after_and_that_of_new_objects_meanwhile() -> None:
    was_garbage, old = weakref.ref(Cycle()), Cycle()
    was_old = weakref.ref(old)
    with OldObjects() as objects:
        objects.set_aside()
        assert was_garbage() is None
        new = Cycle()
        was_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert was_new() is None
        assert was_old() is not None
    gc.collect()
    assert was_old() is None
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("at_once")
def test_what_the_user_has_set_aside_is_left_there() -> None:
    gc.freeze()
    try:
        with OldObjects() as objects:
            objects.set_aside()
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_nothing_is_done_for_what_is_over_soon() -> None:
    with OldObjects() as objects:
        objects.set_aside()
        assert not gc.get_freeze_count()


@pytest.mark.usefixtures("at_once")
def test_nothing_is_done_before_and_after() -> None:
    objects = OldObjects()
    objects.set_aside()
    with objects:
        pass
    objects.set_aside()
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("at_once")
def test_a_training_is_not_held_up_by_a_search_through_all_objects() -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.looked_at: list[int] = []

        def on_train_start(self, trainer: Trainer) -> None:
            trainer.log({"before": 1.0})

        def on_train_end(self, trainer: Trainer, status: str) -> None:
            trainer.log({"after": 1.0})

        def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
            self.looked_at.append(len(gc.get_objects()))

    counts = Counts()
    trainer(model(), counts).train(loader(), epochs=2)
    assert counts.looked_at[-1] < counts.looked_at[0] / 4
    assert not gc.get_freeze_count()
