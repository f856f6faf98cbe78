"""Whatever happens to loaders and connections, training sees the batches of an undisturbed run."""

from __future__ import annotations

import functools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks import feed_faults
from tests.feed.conftest import StartLoader, until
from tests.feed.test_feed import QUICK, fingerprint, local, server_for
from tests.launching import stand_still
from torch import Tensor

from distributed_training.feed import FeedServer, FeedSettings
from distributed_training.runtime.errors import DataError, FeedError

SLOW = 13  # steps of the dataset "slow"


def test_a_worker_that_is_killed_is_replaced(start_loader: StartLoader) -> None:
    with server_for("slow", epochs=2) as server:
        loader = start_loader(server.link(), "slow", workers=2)
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(2)]
        os.kill(loader.workers(2)[0], signal.SIGKILL)
        assert fingerprint(seen + list(batches)) == local("slow")
        assert fingerprint(server.source().batches(1)) == local("slow", 1)
        assert "starting it again" in loader.log


def test_one_of_two_loaders_is_killed_with_all_its_workers(start_loader: StartLoader) -> None:
    with server_for("slow") as server:
        first, _ = start_loader(server.link(), "slow", workers=2), start_loader(server.link(), "slow")
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(3)]
        first.kill()
        assert fingerprint(seen + list(batches)) == local("slow")


def test_all_loaders_go_and_come_back(start_loader: StartLoader, caplog: pytest.LogCaptureFixture) -> None:
    with server_for("slow") as server:
        first = start_loader(server.link(), "slow", workers=2)
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(3)]
        first.kill()

        def come_back() -> None:
            for _ in until(20):
                if "no loader is connected: training waits" in caplog.text:
                    start_loader(server.link(), "slow")
                    return

        coming = threading.Thread(target=come_back)
        coming.start()
        assert fingerprint(seen + list(batches)) == local("slow")
        coming.join()
        assert "training goes on" in caplog.text
        figures = server.figures()
        assert 1.0 < figures.alone <= figures.waited
        assert figures.bottleneck().startswith("missing loaders")


def test_a_worker_that_is_stopped_does_not_hold_up_training(start_loader: StartLoader) -> None:
    with server_for("slow", epochs=2) as server:
        loader = start_loader(server.link(), "slow", workers=2)
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(4)]
        stopped = loader.workers(2)[0]
        stand_still(stopped)
        assert fingerprint(seen + list(batches)) == local("slow")
        os.kill(stopped, signal.SIGCONT)
        assert fingerprint(server.source().batches(1)) == local("slow", 1)


@functools.cache
def undisturbed(dataset: str) -> dict[str, Tensor]:
    return feed_faults.reference(dataset)


# Sockets, shared memory, TLS, aside, rows sent from where they lie, samples put together in shared memory;
# `benchmarks/feed_faults.py` has many more.
@pytest.mark.parametrize(
    ("seed", "dataset"), [(0, "arrays"), (1, "arrays"), (2, "arrays"), (3, "many"), (0, "wide"), (1, "loaded")]
)
def test_connections_cut_anywhere(start_loader: StartLoader, in_tmp: Path, seed: int, dataset: str) -> None:
    outcome = feed_faults.attempt(seed, dataset, start_loader, Path("run"), undisturbed(dataset))
    assert outcome.problem == ""
    assert outcome.cuts > 0


def test_the_gpu_side_comes_back_and_goes_on_in_the_middle(start_loader: StartLoader) -> None:
    server = server_for("arrays")
    loader = start_loader(server.link())
    batches = server.source().batches(0)
    seen = [next(batches) for _ in range(20)]
    server.close(finished=False)
    with server_for("arrays", port=server.port) as again:
        seen += again.source().batches(0, 20)
        assert fingerprint(seen) == local("arrays")
    assert "exit code 0" in loader.wait()


def test_workers_end_with_their_loader(start_loader: StartLoader) -> None:
    with server_for("slow") as server:
        loader = start_loader(server.link(), "slow", workers=2)
        workers = [psutil.Process(pid) for pid in loader.workers(2)]
        next(server.source().batches(0))
        loader.kill()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_loader_with_another_dataset_is_refused(start_loader: StartLoader) -> None:
    with server_for("arrays") as server:
        wrong = start_loader(server.link(), "other arrays")
        said = wrong.wait()
        assert "does not take this loader" in said
        assert "fingerprint" in said
        assert server.figures().refused == 1
        start_loader(server.link())
        assert fingerprint(server.source().batches(0)) == local("arrays")


def test_a_loader_with_another_plan_is_refused(start_loader: StartLoader) -> None:
    with server_for("arrays") as server:
        assert "batch_size is 16 on the server and 8" in start_loader(server.link(), batch_size=8).wait()


def test_a_sample_that_cannot_be_loaded_stops_training_with_its_id(start_loader: StartLoader) -> None:
    with server_for("bad") as server:
        start_loader(server.link(), "bad")
        seen: list[Any] = []
        with pytest.raises(DataError, match=r"sample 37 cannot be loaded .*the file of 37 is damaged"):
            seen += server.source().batches(0)


def test_a_sample_that_cannot_be_loaded_can_be_left_out(start_loader: StartLoader) -> None:
    settings = FeedSettings(deadline=30.0, on_bad_sample="skip")
    with server_for("bad", settings=settings) as server:
        start_loader(server.link(), "bad", workers=2)
        ids = [i for _, batch in server.source().batches(0) for i in batch.ids.tolist()]
        assert sorted(ids) == [i for i in range(200) if i != 37]
        assert [(bad.epoch, bad.sample) for bad in server.skipped] == [(0, 37)]


def test_loaders_that_never_come_are_an_error(start_loader: StartLoader) -> None:
    server = server_for("arrays", settings=FeedSettings(absence=0.5))
    with server, pytest.raises(FeedError, match=r"no loader came within 0\.5 s"):
        list(server.source().batches(0))


def test_a_loader_that_finds_nobody_gives_up(start_loader: StartLoader) -> None:
    server = FeedServer(settings=QUICK)
    server.close()
    assert "gave up after" in start_loader(server.link(), patience=0.5).wait()
