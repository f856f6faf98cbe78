from __future__ import annotations

import gc
import weakref

import torch
from tests.training.examples import loader, model, trainer

from distributed_training import Callback, Trainer
from distributed_training.runtime.garbage import old_objects_set_aside


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_what_becomes_garbage_meanwhile_is_found_at_once_if_new_else_at_the_end() -> None:
    old = Cycle()
    was_old = weakref.ref(old)
    with old_objects_set_aside():
        new = Cycle()
        was_new = weakref.ref(new)
        del old, new
        gc.collect()
        assert was_new() is None
        assert was_old() is not None
    gc.collect()
    assert was_old() is None
    assert not gc.get_freeze_count()


def test_what_the_user_has_set_aside_is_left_there() -> None:
    gc.freeze()
    try:
        with old_objects_set_aside():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_a_training_is_not_held_up_by_a_search_through_all_objects() -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.looked_at: list[int] = []

        def on_step_end(self, trainer: Trainer, step: int, loss: torch.Tensor) -> None:
            self.looked_at.append(len(gc.get_objects()))

    before = len(gc.get_objects())
    counts = Counts()
    trainer(model(), counts).train(loader(), epochs=1)
    assert max(counts.looked_at) < before / 4
    assert not gc.get_freeze_count()
