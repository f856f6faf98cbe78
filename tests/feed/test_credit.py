"""Credit never adds up to more than the bound, and whoever needs some gets it in the end."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from distributed_training.data.plan import PLAN_VERSION, Plan
from distributed_training.feed.credit import Credit, Window
from distributed_training.feed.homecoming.courier import Courier
from distributed_training.feed.hub import Hub
from distributed_training.feed.planning import EpochPlan, facts_of
from distributed_training.feed.settings import FeedSettings
from distributed_training.feed.worker_session import WorkerGuest
from distributed_training.runtime.errors import DataError
from distributed_training.wire.messages import Blocked, Join
from distributed_training.wire.messages import Credit as CreditMessage

MIB = 1 << 20


def test_the_bound_holds_whatever_comes_and_everyone_gets_on() -> None:
    chance = random.Random(5)
    credit = Credit(16 * MIB)
    windows = [Window() for _ in range(5)]
    for window in windows:
        credit.join(window)
    brought = dict.fromkeys(windows, 0)
    for _ in range(3000):
        window = chance.choice(windows)
        size = chance.choice([1000, 300_000, MIB, 3 * MIB])
        if size > window.promised:
            window.blocked = size
        credit.grant(window)
        assert credit.held <= 16 * MIB
        if size <= window.promised and credit.waiting < 6 * MIB:
            credit.arrived(window, window.received + size)
            credit.waiting += size
            brought[window] += 1
        credit.waiting = max(0, credit.waiting - chance.choice([0, 2 * MIB]))
    assert min(brought.values()) > 50


def test_a_long_link_gets_a_large_window() -> None:
    credit, near, far = Credit(1024 * MIB), Window(), Window()
    for window, delay in ((near, 0.0001), (far, 0.1)):
        credit.join(window)
        window.measured(100 * MIB, 1.0)
        window.answered(delay)
        credit.grant(window)
    assert near.promised == MIB
    assert far.promised == 20 * MIB


def test_what_a_connection_was_promised_is_free_when_it_leaves() -> None:
    credit, one, other = Credit(8 * MIB), Window(), Window()
    for window in (one, other):
        credit.join(window)
        window.blocked = 2 * MIB
    assert credit.grant(one) == 2 * MIB
    assert credit.grant(other) is None  # there is room for one large batch at a time
    credit.leave(one)
    assert credit.grant(other) == 2 * MIB


@pytest.mark.parametrize("dropped", [True, False])
def test_room_for_a_large_batch_that_is_not_sent_any_more_is_for_others(dropped: bool) -> None:
    credit, one, other = Credit(8 * MIB), Window(), Window()
    for window in (one, other):
        credit.join(window)
        credit.blocked(window, 2 * MIB)
    assert credit.grant(one) == 2 * MIB
    if dropped:
        credit.blocked(one, 0)
    else:
        credit.arrived(one, 1000)  # another lease's batch came in its place
    assert credit.grant(other) == 2 * MIB


def test_a_batch_that_came_before_is_not_the_one_that_waits() -> None:
    """The worker says that it waits right behind a batch, and both are heard of together."""
    hub = Hub(FeedSettings(memory=8 * MIB), Plan(100, 10, 0), "data", 1)
    connection = SimpleNamespace(receiving=SimpleNamespace(received=0))
    session: Any = SimpleNamespace(name="worker", window=Window(), wake=lambda: None, connection=connection)
    guest = WorkerGuest(session, hub, Courier("off", 0, 1.0))
    facts = facts_of(EpochPlan(Plan(100, 10, 0)))
    assert hub.admit(guest, Join("worker", "1", "data", PLAN_VERSION, facts, (), "", 2**30)) is None
    hub.orders(guest)
    connection.receiving.received = 900_000
    guest.hear(Blocked(800_000))
    guest.heard()
    assert guest.window.blocked == 800_000
    assert any(isinstance(order, CreditMessage) for order in hub.orders(guest))


def test_a_batch_larger_than_the_bound_allows_is_an_error() -> None:
    credit, window = Credit(8 * MIB), Window()
    credit.join(window)
    window.blocked = 3 * MIB
    with pytest.raises(DataError, match="raise its memory to at least 12 MiB"):
        credit.grant(window)
