"""Random schedules: every step leaves exactly once and in order, whoever brings it, goes, or is late."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.feed.sequencer import Grant, Sequencer

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "leave", "want", "grant", "bring", "bring", "run", "late", "release", "take", "seek", "evict"]
        ),
        st.integers(0, 3),
        st.integers(0, 1000),
    ),
    max_size=120,
)


class World:
    """A sequencer, some workers, and a clock that moves as told."""

    def __init__(self, steps: int, epochs: int, horizon: int) -> None:
        self.sequencer: Sequencer[tuple[int, int]] = Sequencer(steps, lease=10.0, shortest_lease=1.0)
        self.steps, self.epochs, self.now = steps, epochs, 0.0
        self.sequencer.horizon = horizon
        self.sequencer.seek(0, 0, epochs)
        self.held: dict[str, list[tuple[int, int, int]]] = {}
        self.runs: dict[int, int] = {}  # steps that came as part of a run: the first step of it
        self.position = 0

    def do(self, action: str, who: int, number: int) -> None:
        """One step of a schedule; those that make no sense now do nothing."""
        sequencer, name = self.sequencer, f"worker {who}"
        self.now += 0.01
        if action == "join" and name not in self.held:
            sequencer.join(name, self.now)
            self.held[name] = []
        elif action == "late":
            self.now += number / 20
        elif action == "take":
            self.take(1 + number % 5)
        elif action == "seek":
            at = self.position if number % 3 else number % (self.steps * self.epochs)
            sequencer.seek(*divmod(at, self.steps), self.epochs)
            self.position = at
        elif action == "evict":
            sequencer.evict()
        elif name in self.held:
            self._worker(action, name, number)

    def _worker(self, action: str, name: str, number: int) -> None:
        sequencer, held = self.sequencer, self.held[name]
        if action == "leave":
            sequencer.leave(name)
            del self.held[name]
        elif action == "want":
            sequencer.want(name, 1 + number % 8)
        elif action == "grant":
            grant = sequencer.grant(name, self.now)
            if grant is not None:
                self.check(grant)
                held += [(grant.lease, grant.epoch, step) for step in range(grant.first, grant.last)]
        elif action == "bring" and held:
            _, epoch, step = held.pop(number % len(held))
            sequencer.arrived(name, epoch, step, (epoch, step), self.now)
        elif action == "run" and held:
            self._bring_run(name, number)
        elif action == "release" and held:
            lease, _, step = held.pop()
            sequencer.released(name, lease, step)

    def _bring_run(self, name: str, number: int) -> None:
        """Neighbouring steps of a lease in one piece, an item for all."""
        held = self.held[name]
        at = number % len(held)
        run = [entry for k, entry in enumerate(held[at : at + 4]) if entry == (*held[at][:2], held[at][2] + k)]
        del held[at : at + len(run)]
        _, epoch, first = run[0]
        first_index, before = epoch * self.steps + first, self.sequencer.depth
        new = self.sequencer.arrived(name, epoch, first, (epoch, first), self.now, len(run))
        assert self.sequencer.depth == before + new
        self.runs |= {first_index + k: first_index for k in range(len(run))}

    def check(self, grant: Grant) -> None:
        """A lease is within one epoch and the horizon."""
        first = grant.epoch * self.steps + grant.first
        assert 0 <= grant.first < grant.last <= self.steps
        assert self.position <= first
        assert first + grant.last - grant.first <= self.position + self.sequencer.horizon
        assert grant.seconds > 0

    def take(self, most: int) -> None:
        """Everything that leaves is the next step, and holds what was brought for it."""
        for index, item in self.sequencer.take(most):
            assert index == self.position
            assert item in (divmod(index, self.steps), divmod(self.runs.get(index, -1), self.steps))
            self.position += 1

    def finish(self) -> None:
        """One honest worker brings all that is missing; those that keep their leases for ever do not stop it."""
        self.sequencer.join("honest", self.now)
        for _ in range(50 * self.steps * self.epochs):
            self.now += 1.0
            self.sequencer.want("honest", 4)
            while (grant := self.sequencer.grant("honest", self.now)) is not None:
                for step in range(grant.first, grant.last):
                    self.sequencer.arrived("honest", grant.epoch, step, (grant.epoch, step), self.now)
            self.take(10)
            if self.position == self.steps * self.epochs:
                return
        raise AssertionError(f"stuck at {self.position} of {self.steps * self.epochs}")


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, steps=st.integers(1, 9), epochs=st.integers(1, 3), horizon=st.integers(1, 12))
def test_every_step_leaves_once_and_in_order(
    actions: list[tuple[str, int, int]], steps: int, epochs: int, horizon: int
) -> None:
    world = World(steps, epochs, horizon)
    for action, who, number in actions:
        world.do(action, who, number)
    world.finish()


def test_of_two_arrivals_the_first_counts() -> None:
    sequencer: Sequencer[str] = Sequencer(4)
    sequencer.seek(0, 0, 1)
    for name in ("a", "b"):
        sequencer.join(name, 0.0)
    assert sequencer.arrived("a", 0, 0, "from a", 0.0)
    assert not sequencer.arrived("b", 0, 0, "from b", 0.0)
    assert sequencer.take(9) == [(0, "from a")]
    assert not sequencer.arrived("b", 0, 0, "too late", 0.0)
    assert sequencer.duplicates == 2


def test_of_a_run_those_steps_count_that_are_needed() -> None:
    sequencer: Sequencer[str] = Sequencer(8)
    sequencer.seek(0, 0, 1)
    sequencer.horizon = 8
    for name in ("a", "b"):
        sequencer.join(name, 0.0)
    assert sequencer.arrived("a", 0, 0, "one", 0.0) == 1
    assert sequencer.take(9) == [(0, "one")]
    assert sequencer.arrived("a", 0, 3, "four", 0.0) == 1
    assert sequencer.arrived("b", 0, 0, "run", 0.0, 5) == 3
    assert sequencer.duplicates == 2
    assert sequencer.take(9) == [(1, "run"), (2, "run"), (3, "four"), (4, "run")]


def test_a_late_lease_goes_to_another_and_is_taken_back_when_that_brings_it() -> None:
    sequencer: Sequencer[str] = Sequencer(1, lease=5.0)
    sequencer.seek(0, 0, 1)
    for name in ("slow", "quick"):
        sequencer.join(name, 0.0)
        sequencer.want(name, 1)
    slow = sequencer.grant("slow", 0.0)
    assert slow is not None
    assert sequencer.grant("quick", 4.9) is None
    assert sequencer.grant("quick", 5.0) is not None
    assert sequencer.reissued == 1
    sequencer.arrived("quick", 0, 0, "batch", 6.0)
    assert sequencer.cancelled() == [("slow", slow.lease)]


def test_a_worker_that_was_late_gets_nothing_until_it_shows_that_it_lives() -> None:
    sequencer: Sequencer[str] = Sequencer(10, lease=1.0)
    sequencer.horizon = 10
    sequencer.seek(0, 0, 1)
    for name in ("slow", "quick"):
        sequencer.join(name, 0.0)
        sequencer.want(name, 9)
    assert sequencer.grant("slow", 0.0) is not None
    assert sequencer.grant("quick", 1.0) is not None
    assert sequencer.grant("slow", 1.0) is None
    sequencer.want("slow", 1)
    assert sequencer.grant("slow", 1.0) is not None


def test_a_quick_worker_gets_more_than_a_slow_one() -> None:
    sequencer: Sequencer[str] = Sequencer(1000)
    sequencer.horizon = 40
    sequencer.seek(0, 0, 1)
    held: dict[str, int] = {"slow": 0, "quick": 0}
    for name in held:
        sequencer.join(name, 0.0)
        sequencer.want(name, 1000)
    now, loaded = 0.0, dict(held)
    leases: dict[str, list[int]] = {"slow": [], "quick": []}
    for tick in range(400):
        now += 0.05
        for name in held:
            while (grant := sequencer.grant(name, now)) is not None:
                leases[name] += range(grant.first, grant.last)
            if leases[name] and (name == "quick" or tick % 4 == 0):
                sequencer.arrived(name, 0, leases[name].pop(0), name, now)
                loaded[name] += 1
        sequencer.take(100)
    assert loaded["quick"] > 2 * loaded["slow"] > 0


def test_steps_are_lent_together_to_a_worker_that_has_each_done_before_the_next_is_asked_for() -> None:
    sequencer: Sequencer[int] = Sequencer(10_000)
    sequencer.horizon = 90
    sequencer.seek(0, 0, 1)
    sequencer.join("worker", 0.0)
    sequencer.want("worker", 1000)
    now, lengths = 0.0, []
    for _ in range(40):
        while (grant := sequencer.grant("worker", now)) is not None:
            for step in range(grant.first, grant.last):
                now += 0.0005
                sequencer.arrived("worker", 0, step, step, now)
            lengths.append(grant.last - grant.first)
            sequencer.want("worker", lengths[-1])
        now += 0.01  # training computes
        sequencer.take(40)
    assert max(lengths) == 30  # a third of the horizon
    assert lengths.count(1) < 15  # until its speed was known


def test_short_leases_are_not_followed_by_short_ones_for_ever() -> None:
    sequencer: Sequencer[int] = Sequencer(100_000, lease=10.0, shortest_lease=1.0)
    sequencer.seek(0, 0, 1)
    sequencer.join("worker", 0.0)
    sequencer.want("worker", 512)
    sequencer.horizon, now = 4, 0.0  # as at the beginning of a training: leases of a step or two
    leases: deque[Grant] = deque()
    lengths = []
    for _ in range(300):
        while (grant := sequencer.grant("worker", now)) is not None:
            leases.append(grant)
        begun = leases.popleft()
        lengths.append(begun.last - begun.first)
        sequencer.want("worker", lengths[-1])  # as a worker asks: for as many as it begins
        for step in range(begun.first, begun.last):
            now += 0.0001
            sequencer.arrived("worker", 0, step, step, now)
        sequencer.take(1000)
        sequencer.horizon = min(4096, sequencer.horizon * 2)
    assert lengths[0] == 1
    assert set(lengths[-30:]) == {256}


def test_the_last_steps_are_lent_though_they_are_no_whole_lease() -> None:
    sequencer: Sequencer[int] = Sequencer(1000, lease=10.0, shortest_lease=1.0)
    sequencer.seek(0, 0, 1)
    sequencer.join("worker", 0.0)
    sequencer.want("worker", 10_000)
    sequencer.horizon, now, taken = 400, 0.0, 0
    while taken < 1000:
        if sequencer.worth_asking():
            while (grant := sequencer.grant("worker", now)) is not None:
                for step in range(grant.first, grant.last):
                    now += 0.0001
                    sequencer.arrived("worker", 0, step, step, now)
        assert sequencer.ready, f"nobody was asked for step {sequencer.position}"
        taken += len(sequencer.take(7))


def test_workers_are_asked_for_whole_leases_while_enough_is_ready() -> None:
    sequencer: Sequencer[int] = Sequencer(100_000, lease=10.0, shortest_lease=1.0)
    sequencer.seek(0, 0, 1)
    sequencer.join("worker", 0.0)
    sequencer.want("worker", 100_000)
    sequencer.horizon, now, lengths = 180, 0.0, []
    for _ in range(1000):
        if sequencer.worth_asking():
            while (grant := sequencer.grant("worker", now)) is not None:
                lengths.append(grant.last - grant.first)
                for step in range(grant.first, grant.last):
                    now += 0.0001
                    sequencer.arrived("worker", 0, step, step, now)
        sequencer.take(20)
    assert set(lengths[-20:]) == {60}
