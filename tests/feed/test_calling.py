"""The loader listens and the GPU side dials: the same batches, the same training, whatever happens to either."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import replace
from typing import Any

import pytest
from tests.feed.conftest import LoaderProcess, StartLoader, connected, until
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.test_feed import QUICK, fingerprint, local
from tests.feed.test_training import Killing, local_training, network
from tests.launching import free_port
from tests.training.examples import assert_same_weights, trainer

from distributed_training.data.base import Share
from distributed_training.feed import FeedServer, FeedSettings, PairingLink
from distributed_training.feed.pairing import new_token
from distributed_training.runtime.errors import FeedError

EVERYWHERE, HERE = "0.0.0.0", "127.0.0.1"


def listening(start_loader: StartLoader, host: str = HERE, **options: Any) -> tuple[LoaderProcess, PairingLink]:
    """A loader that listens, and the link that it gives."""
    loader = start_loader(f"listen {host} {options.pop('port', 0) or free_port()}", shared_memory=False, **options)
    for _ in until(20):
        if "link " in loader.log:
            text = loader.log.partition("link ")[2].split()[0]
            return loader, PairingLink.parse(text)
    raise AssertionError(loader.log)


def caller(link: PairingLink, settings: FeedSettings = QUICK, epochs: int = 2, share: Share = Share()) -> FeedServer:  # noqa: B008
    dataset = make_dataset("arrays")
    plan = make_plan(dataset)
    server = FeedServer(plan, dataset=dataset.fingerprint(), settings=settings, epochs=epochs, call=link)
    server.hub.share = share
    return server


def test_the_training_is_that_with_local_data_though_workers_die(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader, EVERYWHERE, workers=3)
    assert link.fingerprint is not None
    assert link.token is not None
    net = network()
    with caller(link) as server:
        trainer(net, Killing(loader)).train(server.source(), epochs=2)
        connected(server, 3)  # as many connections as it has workers
    assert "exit code 0" in loader.wait()
    assert_same_weights(net, local_training())


def test_a_gpu_side_that_died_is_followed_by_another(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader, workers=2)
    first = caller(link)
    batches = first.source().batches(0)
    seen = [next(batches) for _ in range(20)]
    first.close(finished=False)
    with caller(link) as second:
        assert fingerprint(seen + list(second.source().batches(0, 20))) == local("arrays")
    assert "exit code 0" in loader.wait()


def test_a_loader_that_died_is_followed_by_another(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader)
    with caller(link, settings=replace(QUICK, max_steps_ahead=4)) as server:
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(20)]
        loader.kill()
        loader.wait()
        start_loader(f"listen {HERE} {link.port}", shared_memory=False)
        assert fingerprint(seen + list(batches)) == local("arrays")


def test_ranks_share_the_workers(start_loader: StartLoader) -> None:
    _, link = listening(start_loader, workers=3)
    servers = [caller(link, epochs=1, share=Share(rank, 2)) for rank in range(2)]
    try:
        whole = local("arrays")
        for _ in until(20):
            if [server.figures().loaders for server in servers] == [2, 1]:
                break
        for pair in zip(*(server.source().batches(0) for server in servers)):
            ids = [number for _, batch in pair for number in batch.ids.tolist()]
            assert ids == whole[pair[0][0]][1]
        assert [server.figures().loaders for server in servers] == [2, 1]
    finally:
        for server in servers:
            server.close()


def test_a_loader_with_fewer_workers_than_ranks_hears_it(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader, workers=1)
    with caller(link, epochs=1, share=Share(1, 2)):
        assert "1 loader workers for 2 ranks; each rank needs at least one" in loader.wait()


def test_strangers_do_not_keep_the_gpu_side_out(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader, EVERYWHERE)
    strangers = [socket.create_connection((HERE, link.port)) for _ in range(4)]
    strangers[0].sendall(os.urandom(300))
    try:
        with caller(link, epochs=1) as server:
            assert fingerprint(server.source().batches(0)) == local("arrays")
    finally:
        for sock in strangers:
            sock.close()
    assert "exit code 0" in loader.wait()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token": new_token()}, "token is not that of the loader"),
        ({"fingerprint": "0" * 64}, "shows a certificate with fingerprint"),
    ],
    ids=["token", "fingerprint"],
)
def test_a_wrong_link_ends_the_training(start_loader: StartLoader, changed: dict[str, Any], said: str) -> None:
    loader, link = listening(start_loader, EVERYWHERE)
    with caller(replace(link, **changed)) as server, pytest.raises(FeedError, match=said):
        list(server.source().batches(0))
    assert loader.alive()


def test_both_ends_on_the_same_side(start_loader: StartLoader) -> None:
    _, link = listening(start_loader)
    assert "dtrain serve --connect" in start_loader(link).wait()
    with FeedServer() as server:
        wrong = PairingLink(HERE, server.port, carrier="ws")
        with caller(wrong) as other, pytest.raises(FeedError, match="dtrain feed --to"):
            list(other.source().batches(0))


def test_a_loader_with_other_data_ends_and_says_why(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader, dataset="other arrays")
    with caller(link):
        assert "has a dataset with fingerprint" in loader.wait()


def test_a_worker_that_stands_still_does_not_hold_up_training(start_loader: StartLoader) -> None:
    loader, link = listening(start_loader, workers=2)
    with caller(link, settings=replace(QUICK, silence=1.0, max_steps_ahead=4)) as server:
        batches = server.source().batches(0)
        seen = [next(batches) for _ in range(5)]
        os.kill(loader.workers(2)[0], signal.SIGSTOP)
        assert fingerprint(seen + list(batches)) == local("arrays")
