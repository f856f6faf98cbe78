"""Over a long and narrow link: windows that fill it, a measured rate, and compression where that helps."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import pytest
from tests.feed.conftest import StartLoader
from tests.feed.slow_link import SlowLink
from tests.feed.test_feed import fingerprint, local, server_for
from tests.launching import need

from distributed_training.data.nested import tensors_in
from distributed_training.feed.compression import CODECS
from distributed_training.feed.credit import Credit, Window
from distributed_training.feed.link_rate import LinkRate
from distributed_training.feed.sequencer import Sequencer

MIB = 1 << 20


class Sender:
    """One end of a simulated link: sends frames as credit allows; the credit takes its time to come."""

    def __init__(self, frame: int) -> None:
        self.frame, self.limit, self.sent, self.window, self.asked = frame, 0, 0, Window(), False


def simulate(rate: float, round_trip: float, frame: int, senders: int, seconds: float) -> float:
    """Part of the link's rate that frames get through, after a tenth of the time."""
    credit, free, arrived, order = Credit(1024 * MIB), 0.0, 0.0, itertools.count()
    events: list[tuple[float, int, str, Sender, float]] = []
    every = [Sender(frame) for _ in range(senders)]
    for sender in every:
        credit.join(sender.window)
        sender.window.answered(round_trip)
        heapq.heappush(events, (0.0, next(order), "grant", sender, 0.0))
    while events and events[0][0] < seconds:
        now, _, what, sender, number = heapq.heappop(events)
        if what == "arrive":
            sender.window.measured(frame, number)
            credit.arrived(sender.window, sender.window.received + frame)
            arrived += frame if now > seconds / 10 else 0
        if what == "credit":
            sender.limit = int(number)
            while sender.sent + frame <= sender.limit:
                begin = max(now, free)
                free = begin + frame / rate
                sender.sent += frame
                heapq.heappush(events, (free + round_trip / 2, next(order), "arrive", sender, frame / rate))
            if frame > sender.limit - sender.sent and not sender.asked:
                sender.asked = True
                heapq.heappush(events, (max(now, free) + round_trip / 2, next(order), "blocked", sender, 0.0))
            continue
        if what == "blocked":
            sender.window.blocked, sender.asked = frame, False
        if (limit := credit.grant(sender.window)) is not None:
            heapq.heappush(events, (now + round_trip / 2, next(order), "credit", sender, float(limit)))
    return arrived / (0.9 * seconds) / rate


@pytest.mark.parametrize("senders", [1, 4])
@pytest.mark.parametrize(
    ("rate", "round_trip", "frame"),
    [(2.5e6, 0.1, 26_000), (2.5e6, 0.1, 1_500_000), (2.5e6, 0.6, 400_000), (125e6, 0.1, 400_000)],
)
def test_credit_fills_the_link(rate: float, round_trip: float, frame: int, senders: int) -> None:
    assert simulate(rate, round_trip, frame, senders, 60.0) > 0.95


def test_a_step_that_is_coming_is_not_lent_to_others() -> None:
    sequencer: Sequencer[str] = Sequencer(10, lease=10.0, shortest_lease=2.0)
    sequencer.seek(0, 0, 1)
    coming = {"slow"}
    sequencer.arriving = coming.__contains__
    for name in ("slow", "other"):
        sequencer.join(name, 0.0)
        sequencer.want(name, 10)
    first = sequencer.grant("slow", 0.0)
    assert first is not None
    while (grant := sequencer.grant("other", 0.0)) is not None:
        for step in range(grant.first, grant.last):
            sequencer.arrived("other", 0, step, "item", 0.0)
    for now in (11.0, 20.0, 39.0):
        assert sequencer.grant("other", now) is None
    coming.clear()  # nothing more is heard of it
    again = sequencer.grant("other", 45.0)
    assert again is not None
    assert (again.first, again.last) == (first.first, first.last)


def test_the_rate_of_a_link_is_that_of_what_waits_for_it() -> None:
    link, now, sent = LinkRate(), 0.0, 0
    link.note(now, sent := sent + 3 * MIB, True)  # what the buffer of the socket took at once
    assert link.rate is None
    for _ in range(50):
        now += 0.1
        link.note(now, sent := sent + 250_000, True)
    assert link.rate == pytest.approx(2.5e6)
    link.note(now + 0.001, sent, False)
    for _ in range(20):  # nothing waits, and more goes: so it is faster than that
        now += 0.5
        link.note(now, sent := sent + 5_000_000, False)
    assert link.rate == pytest.approx(10e6, rel=0.1)
    for _ in range(10):
        now += 0.5
        link.note(now, sent := sent + 100, False)
    assert link.rate == pytest.approx(10e6, rel=0.1)  # that little is sent says nothing


def test_batches_are_compressed_where_that_makes_a_slow_link_faster(start_loader: StartLoader) -> None:
    need("lz4 or zstandard: pip install -e '.[feed]'", bool(CODECS))
    with server_for("plain", epochs=6) as server, SlowLink(server.port, 1e6, 0.02) as link:
        start_loader(replace(server.link(), port=link.port), "plain", shared_memory=False)
        source, size = server.source(), 0
        for epoch in range(6):  # what is sent before anything is known of the link goes as it is
            seen = list(source.batches(epoch))
            assert fingerprint(seen) == local("plain", epoch)
            size += sum(t.nbytes for _, b in seen for t in tensors_in(b.data))
        assert server.figures().bytes < 0.8 * size
