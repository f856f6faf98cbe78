from __future__ import annotations

import gc
import multiprocessing
import os
from typing import Any

import pytest

from distributed_training.runtime import garbage
from distributed_training.runtime.forking import garbage_stays_here
from distributed_training.runtime.garbage import OldObjects


class Owner:
    """Garbage in a cycle, that may end only in the process that made it."""

    def __init__(self, ended: Any) -> None:
        self.me, self.pid, self.ended = self, os.getpid(), ended

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.ended.put("in the child")


def _collect(ended: Any) -> None:
    gc.collect()
    ended.put("over")
    ended.close()
    ended.join_thread()


def test_a_child_leaves_the_garbage_of_its_parent_alone() -> None:
    context = multiprocessing.get_context("fork")
    ended: Any = context.Queue()
    gc.disable()
    try:
        Owner(ended)
        process = context.Process(target=_collect, args=(ended,))
        with garbage_stays_here():
            process.start()
        assert ended.get(timeout=30) == "over"
        process.join(30)
        assert process.exitcode == 0
    finally:
        gc.enable()


def test_this_process_collects_it_afterwards() -> None:
    gone = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            gone.append(True)

    Cycle()
    with garbage_stays_here():
        pass
    gc.collect()
    assert gone == [True]


def test_objects_that_were_set_aside_before_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_SOON", 0.0)
    with OldObjects() as old:
        old.set_aside()
        kept = gc.get_freeze_count()
        with garbage_stays_here():
            pass
        assert gc.get_freeze_count() >= kept
