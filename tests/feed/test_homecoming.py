"""The files of a run on their way home: from a real server to a real loader process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.feed.conftest import StartLoader, until
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.runs import KEEP, PATTERN, RUN, Inbox, Pack, save, write_run
from tests.feed.watching_proxy import WatchingProxy

from distributed_training.checkpoint import read_state, verify
from distributed_training.checkpoint.files import MANIFEST_FILE, STATE_FILE
from distributed_training.feed import FeedServer, FeedSettings, PairingLink
from distributed_training.feed.homecoming.courier import Courier
from distributed_training.feed.homecoming.fetching import Fetching
from distributed_training.feed.homecoming.home import Home
from distributed_training.feed.homecoming.parcels import pack_checkpoint, pack_run
from distributed_training.feed.shared import host_id


@pytest.fixture
def server() -> Iterator[FeedServer]:
    with FeedServer(settings=FeedSettings(checkpoints_home="on")) as server:
        yield server


def comes_home(copy: Path, name: str, log: Any) -> Path:
    """The checkpoint at home, once it is there."""
    for _ in until(60):
        if (copy / "checkpoints" / name).is_dir():
            return copy / "checkpoints" / name
    raise AssertionError(f"{name} did not come: {log()}")


def test_a_cut_costs_only_what_was_cut_off(server: FeedServer, start_loader: StartLoader, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    checkpoint = save(run, 10, megabytes=8)
    size = (checkpoint / STATE_FILE).stat().st_size
    with WatchingProxy(server.port, cuts=(3 << 20, 6 << 20)) as proxy:
        loader = start_loader(PairingLink("127.0.0.1", proxy.port), workers=2, home=tmp_path / "home")
        server.courier.begin(run, RUN, KEEP)
        # Batches come as ever meanwhile: each step once, in order, with the samples of the plan.
        seen = [(step, batch.ids) for step, batch in server.source().batches(0)]
        plan = make_plan(make_dataset("arrays"))
        assert [step for step, _ in seen] == list(range(plan.steps_per_epoch))
        for step, ids in seen:
            np.testing.assert_array_equal(ids, plan.ids(0, step))
        came = comes_home(tmp_path / "home" / "copy", checkpoint.name, lambda: loader.log)
        verify(came)
        assert proxy.cut == 2
        assert proxy.passed < size + (2 << 20), "all of it was sent again"
    home = came.parents[1]
    assert (home / "ledger.jsonl").read_text() == '{"epoch": 0}\n', "up to the last whole line"
    assert (home / "id").read_text() == RUN
    assert torch.equal(read_state(came)["model"]["w"], read_state(checkpoint)["model"]["w"])


def test_a_changed_byte_is_found_and_the_file_sent_again(
    server: FeedServer, start_loader: StartLoader, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    with WatchingProxy(server.port, damage=PATTERN) as proxy:
        loader = start_loader(PairingLink("127.0.0.1", proxy.port), home=tmp_path / "home")
        checkpoint = save(run, 10, megabytes=2)
        server.courier.begin(run, RUN, KEEP)
        came = comes_home(tmp_path / "home" / "copy", checkpoint.name, lambda: loader.log)
        assert proxy.damaged == 1
    verify(came)
    assert "does not match the hash" in loader.log


def test_when_it_is_over_all_is_at_home(server: FeedServer, start_loader: StartLoader, tmp_path: Path) -> None:
    """The newest checkpoints as many as are kept, the best one, and the last lines."""
    run = write_run(tmp_path / "run")
    loader = start_loader(server.link(), home=tmp_path / "home")
    server.hub.wait_for_plan()
    save(run, 10, value=0.1)
    server.courier.begin(run, RUN, KEEP)
    home = tmp_path / "home" / "copy"
    comes_home(home, "step-0000000010", lambda: loader.log)
    for step in (20, 30, 40):
        save(run, step)
    with run.events_file.open("a") as events:
        events.write('{"event": "finish", "status": "completed"}\n')
    assert server.courier.finish()
    assert {path.name for path in (home / "checkpoints").iterdir()} >= {"step-0000000010", "step-0000000040"}
    assert (home / "events.jsonl").read_text() == run.events_file.read_text()
    assert Home(home.parent, "copy", KEEP, limit=1 << 30).kept() is None, "a run that is over is not gone on with"
    server.close()
    assert "exit code 0" in loader.wait()


def test_a_new_gpu_side_gets_what_was_kept(
    server: FeedServer, start_loader: StartLoader, tmp_path: Path, closed: Pack
) -> None:
    """Before any step is lent; a cut costs only what was cut off, and a changed byte is found."""
    run = write_run(tmp_path / "run")
    checkpoint = save(run, 10, megabytes=8)
    with Inbox(tmp_path / "home") as inbox:
        assert all(inbox.send(p).good for p in closed([*pack_run(run, RUN), *pack_checkpoint(checkpoint, RUN)]))
    size = (checkpoint / STATE_FILE).stat().st_size
    with WatchingProxy(server.port, to_server=True, cuts=(3 << 20, 6 << 20)) as proxy:
        start_loader(PairingLink("127.0.0.1", proxy.port), workers=2, home=tmp_path / "home")
        server.hub.wait_for_plan()
        fetching = Fetching(server.courier)
        brought = fetching.brought()
        assert brought is not None
        assert (brought.run, brought.step) == (RUN, 10)
        for file in (MANIFEST_FILE, STATE_FILE):
            came = fetching.fetch(brought, brought.path(file), tmp_path / "parts")
            assert came.read_bytes() == (checkpoint / file).read_bytes()
        ledger = fetching.fetch(brought, "ledger.jsonl", tmp_path / "parts")
        assert ledger.read_bytes() == b'{"epoch": 0}\n'
        assert proxy.cut == 2
        assert proxy.passed < size + (2 << 20), "all of it was sent again"
        assert len(list(server.source().batches(0))) == make_plan(make_dataset("arrays")).steps_per_epoch


def test_what_is_kept_is_damaged_on_its_way(
    server: FeedServer, start_loader: StartLoader, tmp_path: Path, closed: Pack
) -> None:
    run = write_run(tmp_path / "run")
    checkpoint = save(run, 10)
    with Inbox(tmp_path / "home") as inbox:
        assert all(inbox.send(p).good for p in closed([*pack_run(run, RUN), *pack_checkpoint(checkpoint, RUN)]))
    with WatchingProxy(server.port, to_server=True, damage=PATTERN) as proxy:
        start_loader(PairingLink("127.0.0.1", proxy.port), home=tmp_path / "home")
        server.hub.wait_for_plan()
        fetching = Fetching(server.courier)
        brought = fetching.brought()
        assert brought is not None
        came = fetching.fetch(brought, brought.path(STATE_FILE), tmp_path / "parts")
        assert came.read_bytes() == (checkpoint / STATE_FILE).read_bytes()
        assert proxy.damaged == 1


@pytest.mark.parametrize(
    ("choice", "facts", "wanted"),
    [
        ("auto", {"home": "here", "home_host": "another machine"}, True),
        ("auto", {"home": "here", "home_host": host_id()}, False),
        ("auto", {"home": "here", "home_host": host_id(), "home_always": True}, True),
        ("on", {"home": "here", "home_host": host_id()}, True),
        ("on", {"home": "elsewhere"}, False),
        ("on", {"home": 5}, False),
        ("on", {}, False),
        ("off", {"home": "here", "home_always": True}, False),
    ],
)
def test_who_gets_a_copy(choice: Any, facts: dict[str, Any], wanted: bool) -> None:
    assert Courier(choice, 1 << 30, 1.0).wants(facts) is wanted
    assert not Courier(choice, 1 << 30, 1.0).wants({**facts, "workers": 2}, ranks=2)
