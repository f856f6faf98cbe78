"""The watch over other ranks: its store, its marks and its words. What it does to real jobs is in test_failures.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.launching import environment, stand_still

from distributed_training.runtime.hang_report import Standing, describe, lines_of, telling_lines
from distributed_training.runtime.timed_store import StoreLost, StoreSilent, TimedStore

STORE = """
import sys
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def kept() -> Iterator[tuple[subprocess.Popen[str], TimedStore]]:
    """(process that keeps a store, a connection to it)."""
    process = subprocess.Popen(
        [sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    store = TimedStore(client, 1.0, ("127.0.0.1", port))
    yield process, store
    process.kill()
    process.communicate()
    store.close()


class TestTimedStore:
    def test_values_come_back_and_a_store_that_stands_still_or_goes_is_told_apart(
        self, kept: tuple[subprocess.Popen[str], TimedStore], capfd: pytest.CaptureFixture[str]
    ) -> None:
        process, store = kept
        store.set("a", "1")
        assert store.get("a") == "1"
        assert store.get("b") is None
        assert not store.has("a", "b")
        assert [store.count("n"), store.count("n")] == [1, 2]
        assert [store.set_first("first", "x"), store.set_first("first", "y")] == ["x", "x"]
        assert store.wait_for(["a", "first"], 5)
        assert not store.wait_for(["never"], 0.2)
        stand_still(process.pid)
        with pytest.raises(StoreSilent, match=r"no answer within 0\.3 s"):
            store.has("a", within=0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert store.get("a", within=30) == "1"
        process.kill()
        process.wait()
        for call in (lambda: store.has("a"), lambda: store.set("a", "2")):
            with pytest.raises(StoreLost) as error:
                call()
            assert not isinstance(error.value, StoreSilent)
        assert "TCPStore" not in capfd.readouterr().err  # torch would fill the screen


PEACE = """
import time
from contextlib import suppress
from datetime import timedelta
import torch.distributed as dist
from distributed_training.runtime.watch import Watch
from distributed_training.runtime.world import World

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
watches = [
    Watch(World(rank=rank, size=2, master="127.0.0.1", port=store.port), 0.8, dist.PrefixStore("x", store.clone()))
    for rank in range(2)
]
for watch in watches:
    with suppress(ValueError), watch.waiting("something that fails"):
        raise ValueError
    watch.begin("many parts")
for _ in range(8):  # longer than the deadline in all, but no part is
    time.sleep(0.2)
    for watch in watches:
        watch.begin("many parts")
for watch in watches:
    with watch.waiting("a part of it"):
        pass
    watch.end()
time.sleep(2)  # nobody waits: no limit
watches[FIRST].close()
time.sleep(2)  # the other may go on alone
watches[1 - FIRST].close()
watches[0].close()
print("peace")
"""


@pytest.mark.parametrize("first", [0, 1])
def test_no_alarm_where_nobody_waits_too_long(first: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEACE.replace("FIRST", str(first))],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "peace\n", "")


def stands(number: int, operation: str, line: str, waits: bool = True) -> Standing:
    return {"number": number, "operation": operation, "waits": waits, "lines": [line, "main.py:1 in main: run()"]}


ALARM = {"kind": "hung", "reason": "no progress for 5 s (run.deadline)", "number": 7, "operation": "a barrier"}
LOST = {**ALARM, "kind": "lost", "reason": "a connection to another rank broke"}
HERE, BEHIND = stands(7, "a barrier", "x.py:3 in f: wait()"), stands(6, "a sum", "y.py:9 in g: sleep()", waits=False)


class TestReport:
    @pytest.mark.parametrize(
        ("alarm", "where", "left", "expected"),
        [
            (ALARM, {0: HERE, 1: BEHIND}, set(), "in a barrier: rank 1 (host, process 5) has not arrived"),
            (ALARM, {0: HERE, 1: None}, set(), "rank 1 (host, process 5) does not answer: stopped"),
            (ALARM, {0: HERE, 1: None}, {1}, "rank 1 (host, process 5) has ended, but others still wait"),
            (ALARM, {0: HERE, 1: HERE}, set(), "all ranks wait"),
            (LOST, {0: HERE, 1: None}, set(), "rank 1 (host, process 5) is gone: killed"),
            (LOST, {0: HERE, 1: BEHIND}, set(), "all ranks answer, so the network between them broke"),
        ],
    )
    def test_who_is_missing(self, alarm: Any, where: Any, left: set[int], expected: str) -> None:
        assert expected in describe(alarm, where, {1: "host, process 5"}, left).splitlines()[0]

    def test_where_everybody_stands(self) -> None:
        text = describe(ALARM, {0: HERE, 1: BEHIND, 2: HERE}, {}, set())
        assert text.splitlines()[1:] == [
            "  ranks 0, 2 are waiting in a barrier, at x.py:3 in f: wait()",
            "      called from main.py:1 in main: run()",
            "  rank 1 is past a sum, at y.py:9 in g: sleep()",
            "      called from main.py:1 in main: run()",
            "see docs/troubleshooting.md#a-rank-hangs-or-never-arrives",
        ]

    def test_many_ranks_are_a_few_lines(self) -> None:
        text = describe(ALARM, {rank: HERE if rank else BEHIND for rank in range(512)}, {}, set())
        assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 503 more are waiting" in text
        assert len(text) < 2000

    def test_lines_are_those_of_the_user(self) -> None:
        import threading

        assert "test_lines_are_those_of_the_user" in lines_of(threading.get_ident())[1]
        assert lines_of(-1) == []
        inner = traceback.FrameSummary("/usr/lib/python3/site-packages/torch/x.py", 1, "wait", line="work.wait()")
        own = traceback.FrameSummary("/home/me/train.py", 2, "main", line="train()")
        assert telling_lines([own, inner]) == ["x.py:1 in wait: work.wait()", "train.py:2 in main: train()"]
