"""The files of a run at their other end: what is not as promised is refused, and replaces nothing."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.feed.conftest import until
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.runs import RUN, Inbox, Pack, save, write_run

from distributed_training.checkpoint.files import MANIFEST_FILE, STATE_FILE
from distributed_training.feed import FeedServer, FeedSettings, LoaderSettings
from distributed_training.feed.homecoming.arriving import Arriving, DamagedError
from distributed_training.feed.homecoming.names import FileName, TransferError, read_name
from distributed_training.feed.homecoming.pace import SMALLEST, Pace
from distributed_training.feed.homecoming.parcels import CHUNK, Parcel, pack_checkpoint, pack_run
from distributed_training.feed.joining import join_server
from distributed_training.feed.planning import EpochPlan, facts_of
from distributed_training.wire import Chunk, Connection
from distributed_training.wire.messages import BlobDone, BlobOffer, BlobPull


@pytest.fixture
def server() -> Iterator[FeedServer]:
    with FeedServer(settings=FeedSettings(checkpoints_home="on")) as server:
        yield server


def test_what_is_not_as_promised_replaces_nothing(tmp_path: Path, closed: Pack) -> None:
    run = write_run(tmp_path / "run")
    good, bad = closed(pack_checkpoint(save(run, 10), RUN)), closed(pack_checkpoint(save(run, 20), RUN))
    with Inbox(tmp_path / "home") as inbox:
        assert all(inbox.send(parcel).good for parcel in [*closed(pack_run(run, RUN)), *good])
        assert not inbox.send(bad[0], change=1000).good
        assert not inbox.send(bad[1]).good, "a manifest without its tensors"
        kept = inbox.home.kept()
        assert kept is not None
        assert kept.checkpoint.step == 10
        assert [path.name for path in kept.run.checkpoints.iterdir()] == ["step-0000000010"]
        assert all(inbox.send(parcel).good for parcel in bad)
        kept = inbox.home.kept()
        assert kept is not None
        assert kept.checkpoint.step == 20


def forged(step: object, **changes: Any) -> bytes:
    """A manifest with a seal that fits."""
    files = {STATE_FILE: {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}}
    manifest = {"format": 1, "step": step, "epoch": 0, "metrics": {}, "files": files, "state": {}, **changes}
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": manifest}).encode()


@pytest.mark.parametrize(
    "manifest",
    [
        forged(10, files={"../../x": {"size": 3, "sha256": "0" * 64}}),
        forged(10, files={STATE_FILE: {"size": 3, "sha256": "../../" + "0" * 58}}),
        forged(10, files={STATE_FILE: {"size": "3", "sha256": "0" * 64}}),
        forged(11),
        forged("10"),
        forged(10, metrics={"val_loss": "low"}),
        forged(10)[:-1],
        b"[1]",
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, manifest: bytes) -> None:
    def parcel(file: str, data: bytes) -> Parcel:
        name = FileName(RUN, f"checkpoints/step-0000000010/{file}", "step-0000000010")
        return Parcel(name, io.BytesIO(data), len(data), hashlib.sha256(data).digest())

    with Inbox(tmp_path / "home") as inbox:
        assert inbox.send(parcel(STATE_FILE, b"abc")).good
        assert not inbox.send(parcel(MANIFEST_FILE, manifest)).good
        assert not list((tmp_path / "home" / "copy" / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        f"{RUN}/../config.yaml",
        f"{RUN}/checkpoints/step-0000000010/../../../x",
        f"{RUN}//etc/passwd",
        f"{RUN}/checkpoints/step-00000000１0/state.safetensors",
        f"{RUN}/config.yaml\n",
        f"{RUN.upper()}/config.yaml",
        f"{RUN}/ledger.jsonl/x",
    ],
)
def test_names_that_are_not_on_the_list_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TransferError):
        read_name(name)
    with Inbox(tmp_path) as inbox:
        inbox.receiver.hear(BlobOffer(1, name, 10, bytes(32)))
        answer = inbox.answer()
        assert isinstance(answer, BlobDone)
        assert not answer.good
    assert not list(tmp_path.iterdir())


def test_files_larger_than_allowed_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Inbox(tmp_path / "home", limit=1000) as inbox:
        state = f"{RUN}/checkpoints/step-0000000010/{STATE_FILE}"
        for name, size in ((state, 1001), (f"{RUN}/config.yaml", 17 << 20), (f"{RUN}/events.jsonl", 2**62)):
            inbox.receiver.hear(BlobOffer(1, name, size, bytes(32)))
            answer = inbox.answer()
            assert isinstance(answer, BlobDone)
            assert "feed.max_checkpoint_mb" in answer.text
    assert not (tmp_path / "home").exists()


def test_a_run_that_another_loader_keeps_is_left_to_it(tmp_path: Path, closed: Pack) -> None:
    run = write_run(tmp_path / "run")
    (config, *_) = closed(pack_run(run, RUN))
    with Inbox(tmp_path / "home") as first, Inbox(tmp_path / "home") as second:
        assert first.send(config).good
        refused = second.send(config)
        assert not refused.good
        assert "another loader" in refused.text


def test_another_run_gets_a_folder_of_its_own_and_the_same_one_again(tmp_path: Path, closed: Pack) -> None:
    run, other = write_run(tmp_path / "run"), "f" * 32
    with Inbox(tmp_path / "home") as inbox:
        for identity in (RUN, other, RUN):
            assert all(inbox.send(parcel).good for parcel in closed(pack_run(run, identity)))
    copies = {path.name: (path / "id").read_text() for path in (tmp_path / "home").iterdir()}
    assert copies == {"copy": RUN, "copy-2": other}


def test_lines_that_are_here_are_not_sent_again(tmp_path: Path, closed: Pack) -> None:
    run = write_run(tmp_path / "run")
    with Inbox(tmp_path / "home") as inbox:
        assert all(inbox.send(parcel).good for parcel in closed(pack_run(run, RUN)))
        before = run.events_file.stat().st_size
        with run.events_file.open("a") as events:
            events.write('{"event": "metrics"}\n')
        (longer,) = [parcel for parcel in closed(pack_run(run, RUN)) if parcel.name.path == "events.jsonl"]
        inbox.receiver.hear(BlobOffer(1, str(longer.name), longer.size, longer.digest))
        pull = inbox.answer()
        assert isinstance(pull, BlobPull)
        assert pull.position == before
        run.events_file.write_text('{"event": "another beginning"}\n' * 4)  # as no run does: all of it is sent then
        (other,) = [parcel for parcel in closed(pack_run(run, RUN)) if parcel.name.path == "events.jsonl"]
        inbox.receiver.hear(BlobOffer(2, str(other.name), other.size, other.digest))
        pull = inbox.answer()
        assert isinstance(pull, BlobPull)
        rest = other.read(pull.position, other.size)
        inbox.receiver.hear(Chunk(2, pull.position, memoryview(rest), None))
        again = inbox.answer()
        assert isinstance(again, BlobPull)
        assert again.position == 0
        inbox.receiver.hear(Chunk(2, 0, memoryview(other.read(0, other.size)), None))
        done = inbox.answer()
        assert isinstance(done, BlobDone)
        assert done.good


def break_rules(server: FeedServer, say: Callable[[Connection], None]) -> None:
    """Join as a worker that brings a checkpoint, say something, and see that the server ends the connection."""
    dataset = make_dataset("arrays")
    facts = {**facts_of(EpochPlan(make_plan(dataset))), "home": "here", "home_run": RUN, "home_step": 10}
    joined = join_server(server.link(), facts, dataset.fingerprint(), LoaderSettings())
    connection, channel, said = joined.connection, joined.channel, False
    try:
        for _ in until(30):
            if connection.sending.available and not said:
                said = True
                say(connection)
                channel.queue(connection.data_to_send())
            channel.flush()
            channel.wait(0.1)
            size = channel.receive_into(connection.get_buffer())
            if size == 0:
                return
            connection.buffer_updated(size or 0)
            list(connection.events())
        raise AssertionError("the server went on")
    finally:
        channel.close()


def test_a_worker_that_breaks_the_rules_is_cut_off(server: FeedServer, caplog: pytest.LogCaptureFixture) -> None:
    def offer(connection: Connection) -> None:
        for step in range(20):
            connection.send(BlobOffer(1, f"{RUN}/checkpoints/step-{step:010d}/{STATE_FILE}", 1, bytes(32)))

    with caplog.at_level(logging.WARNING):
        break_rules(server, lambda connection: connection.send_chunk(1, 0, b"x"))
        break_rules(server, lambda connection: connection.send(BlobOffer(1, "../x", 1, bytes(32))))
        break_rules(server, offer)
    for _ in until(30):
        if not server.courier.homes:
            break
    assert "nobody asked for" in caplog.text
    assert "'../x' is not taken" in caplog.text
    assert "more files than a run has" in caplog.text


NAMES = st.one_of(
    st.sampled_from([f"{RUN}/{path}" for path in ("config.yaml", "events.jsonl")]),
    st.sampled_from([f"{RUN}/checkpoints/step-0000000001/{file}" for file in (STATE_FILE, MANIFEST_FILE)]),
    st.text(max_size=30),
)
DIGESTS = st.binary(min_size=32, max_size=32)
EVENTS = st.one_of(
    st.builds(
        BlobOffer,
        st.integers(0, 3),
        NAMES,
        st.integers(0, 200) | st.just(2**63 - 1),
        st.binary(min_size=32, max_size=32),
    ),
    st.builds(Chunk, st.integers(0, 3), st.integers(0, 200), st.binary(max_size=200).map(memoryview), st.none()),
    st.builds(BlobPull, st.integers(0, 3), st.integers(0, 2**63 - 1)),
    st.builds(BlobDone, st.integers(0, 3), st.booleans(), st.text(max_size=20)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=12))
def test_whatever_a_peer_says_nothing_false_is_kept(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any]
) -> None:
    root = tmp_path_factory.mktemp("home")
    with Inbox(root / "below") as inbox:
        for event in events:
            inbox.receiver._handle(event, 0.0)
        assert inbox.home.kept() is None
    assert {path.name for path in root.iterdir()} <= {"below"}


def test_a_file_that_ends_in_the_middle_is_not_whole(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"abcdef").digest()
    first = Arriving(tmp_path, 6, digest)
    first.write(0, b"abc")
    with pytest.raises(TransferError):
        first.write(0, b"abc")
    first.close()
    second = Arriving(tmp_path, 6, digest)
    assert second.position == 3
    second.write(3, b"def")
    assert second.finish().read_bytes() == b"abcdef"
    third = Arriving(tmp_path / "other", 6, digest)
    third.write(0, b"abcdeg")
    with pytest.raises(DamagedError):
        third.finish()
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(("rate", "delay"), [(2.5e6, 0.1), (2.5e6, 0.6), (0.3e6, 0.05), (100e6, 0.05), (1e9, 0.0002)])
def test_as_much_is_on_its_way_as_fills_the_link(rate: float, delay: float) -> None:
    """A simulated link: credit takes `delay` to come back as chunks."""
    pace, now, free, sent, waited = Pace(), 0.0, 0.0, 0, 0.0
    grants, coming, half = deque([(delay, pace.grant(0.0) or 0)]), deque[float](), 0.0
    chunks = int(min(20 * rate, 4e9)) // CHUNK
    for number in range(chunks):
        while not coming:
            when, allowed = grants.popleft()
            while sent + CHUNK <= allowed:
                free = max(free, when) + CHUNK / rate
                waited = max(waited, free - when)
                coming.append(free)
                sent += CHUNK
        now = coming.popleft()
        pace.arrived(CHUNK, now)
        if (limit := pace.grant(now)) is not None:
            grants.append((now + delay, limit))
        half = now if number == chunks // 2 else half
    reached = chunks / 2 * CHUNK / (now - half)
    assert reached > 0.9 * min(rate, (8 << 20) / delay)
    assert waited < 0.25 + 2 * SMALLEST / rate, "a lease would wait so long behind it"
