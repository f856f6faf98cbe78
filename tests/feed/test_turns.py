"""Clients take turns on the model: fair, within the bound on memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from distributed_training.data.base import Batch
from distributed_training.feed.credit import Window
from distributed_training.feed.settings import MEBI, FeedSettings
from distributed_training.feed.turns import Turn, Turns, Waiting
from distributed_training.runtime.errors import DataError
from distributed_training.wire import Reason, pack_batch


class Seat:
    """A connection that only counts how often it is woken."""

    def __init__(self, name: str) -> None:
        self.name, self.window, self.woken = name, Window(), 0

    def wake(self) -> None:
        self.woken += 1


def a_service(memory: int = 64 * MEBI) -> Turns:
    return Turns("validation", FeedSettings(memory=memory), lambda facts: None)


def join(turns: Turns, name: str) -> Waiting:
    client = turns.join(Seat(name))
    assert client is not None
    return client


def bring(turns: Turns, client: Waiting, size: int, batches: int = 1) -> None:
    """Batches of a client arrive."""
    client.seat.window.granted = max(client.seat.window.granted, client.seat.window.received + size * batches)
    arrived = [Turn(client, None, step, Batch(np.arange(1), None), size) for step in range(batches)]
    turns.received(client, client.seat.window.received + size * batches, arrived)


def served(turns: Turns, number: int) -> list[str]:
    """Whose turns come next; each is answered at once."""
    names = []
    for _ in range(number):
        turn = turns.take(0.0)
        assert turn is not None
        names.append(turn.client.seat.name)
        turns.answered(turn, pack_batch(0, turn.step, np.arange(0), {"x": 1}))
    return names


def test_the_model_is_shared_by_bytes_not_by_number_of_batches() -> None:
    turns = a_service()
    large, small = join(turns, "large"), join(turns, "small")
    bring(turns, large, 8000, 20)
    bring(turns, small, 1000, 200)
    counts = Counter(served(turns, 90))
    assert counts == {"large": 10, "small": 80}


def test_who_was_idle_has_saved_nothing_up() -> None:
    turns = a_service()
    one, other = join(turns, "one"), join(turns, "other")
    bring(turns, one, 1000, 100)
    assert served(turns, 50) == ["one"] * 50
    bring(turns, other, 1000, 100)
    assert Counter(served(turns, 20)) == {"one": 10, "other": 10}


def test_a_client_that_does_not_fetch_its_results_gets_no_turns() -> None:
    turns = a_service()
    lazy, other = join(turns, "lazy"), join(turns, "other")
    bring(turns, lazy, 100, 5000)
    bring(turns, other, 100, 10)
    names = served(turns, 1034)
    assert names.count("other") == 10
    assert turns.take(0.0) is None
    taken, too_large = turns.results(lazy, 10**9, 2000)
    assert (len(taken), too_large) == (1024, 0)
    assert served(turns, 1) == ["lazy"]


def test_memory_of_those_who_leave_or_fail_is_free_again() -> None:
    turns = a_service()
    gone, failing = join(turns, "gone"), join(turns, "failing")
    bring(turns, gone, 1000, 5)
    turn = turns.take(0.0)
    assert turn is not None
    turns.leave(gone.seat, content=False)
    turns.answered(turn, pack_batch(0, 0, np.arange(0), {"x": 1}))  # computed for nobody
    bring(turns, failing, 1000, 5)
    turn = turns.take(0.0)
    assert turn is not None
    turns.failed(turn, Reason.CONFIG, "cannot be")
    assert failing.failed == (Reason.CONFIG, "cannot be")
    assert failing.held == 0
    turns.leave(failing.seat, content=False)
    assert turns.memory_held == 0
    assert turns.figures().tasks == 0


def test_credit_ends_where_a_client_fills_its_part_of_the_memory() -> None:
    turns = a_service(16 * MEBI)
    greedy, other = join(turns, "greedy"), join(turns, "other")
    bring(turns, greedy, MEBI, 4)  # its part of the half that waiting batches have
    assert turns.credit(greedy) is None
    assert turns.credit(other) is not None
    served(turns, 1)
    assert turns.credit(greedy) is not None
    assert turns.memory_held <= 16 * MEBI
    turns.blocked(other, 5 * MEBI)
    with pytest.raises(DataError, match="raise its memory to at least 20 MiB"):
        turns.credit(other)


def test_a_stopped_service_takes_nobody() -> None:
    turns = a_service()
    turns.stop()
    assert turns.join(Seat("late")) is None
    assert turns.take(5.0) is None
