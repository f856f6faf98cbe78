"""Cut connections of a feed at random byte positions: `python benchmarks/feed_faults.py --seeds 50`.

Each seed trains a small network on batches of two loader workers whose connections go through a proxy, which cuts the
first of them after a random number of bytes: in the handshake, in a header, in the middle of a batch. By turns over
sockets, shared memory, TLS and sockets into which the C library sends aside, with rows that are gathered first and
rows that are sent from where they lie. The weights must be those of a training on local data, to the last bit, and the
ledger must show every sample exactly once an epoch.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from tests.feed.conftest import Nursery
from tests.feed.datasets import make_dataset, make_plan
from tests.feed.proxy import CuttingProxy
from tests.training.examples import trainer
from torch import Tensor, nn

from distributed_training.data import Loader as LocalLoader
from distributed_training.feed import FeedServer, FeedSettings, PairingLink
from distributed_training.feed.pairing import new_token
from distributed_training.feed.tls import make_certificate
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.verify.audit import audit

EPOCHS = 2
CARRIERS = ("sockets", "shared memory", "TLS", "aside")
SETTINGS = FeedSettings(deadline=60.0, absence=60.0, lease=5.0, shortest_lease=0.3, silence=6.0, authentication=2.0)
WIDTHS = {"arrays": 20, "many": 100, "wide": 800, "loaded": 100}
CUTS = {"arrays": (6, 20_000), "many": (8, 1_000_000), "wide": (8, 2_000_000), "loaded": (8, 500_000)}
"""Connections that are cut, and the most bytes that one carries before."""
SMALL = 5_000
"""The most bytes where batches themselves go through shared memory."""


@dataclass(frozen=True)
class Outcome:
    """One training."""

    seed: int
    dataset: str
    carrier: str
    cuts: int
    positions: tuple[int, ...]
    seconds: float
    problem: str
    """What is not as in the undisturbed training; empty if it is the same."""


def reference(dataset: str) -> dict[str, Tensor]:
    """Weights after a training on local data."""
    data, net = make_dataset(dataset), _network(dataset)
    source = LocalLoader(data, make_plan(data))
    trainer(net).train(source, epochs=EPOCHS)
    source.close()
    return net.state_dict()


def attempt(seed: int, dataset: str, start: Callable[..., Any], folder: Path, expected: dict[str, Tensor]) -> Outcome:
    """Train with cut connections; `start` starts a loader process."""
    carrier = CARRIERS[seed % len(CARRIERS)]
    data, net = make_dataset(dataset), _network(dataset)
    safe: dict[str, Any] = {"token": new_token(), "certificate": make_certificate()} if carrier == "TLS" else {}
    began = time.monotonic()
    server = FeedServer(make_plan(data), dataset=data.fingerprint(), epochs=EPOCHS, settings=SETTINGS, **safe)
    cuts, most = CUTS[dataset]
    with server, CuttingProxy(server.port, seed, cuts, SMALL if carrier == "shared memory" else most) as proxy:
        own = server.link()
        start(
            PairingLink("127.0.0.1", proxy.port, own.token, own.fingerprint),
            dataset,
            workers=2,
            shared_memory=carrier == "shared memory",
            aside=carrier == "aside",
        )
        trainer(net, run_dir=folder).train(server.source(), epochs=EPOCHS)
    weights = net.state_dict()
    differ = [name for name in expected if not torch.equal(weights[name], expected[name])]
    problem = f"other weights: {', '.join(differ)}" if differ else audit(RunDirectory(folder)).problem
    if not proxy.cut:
        problem = problem or "no connection was cut"
    return Outcome(seed, dataset, carrier, proxy.cut, tuple(proxy.positions), time.monotonic() - began, problem)


def _network(dataset: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTHS[dataset], 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 10))


def main() -> None:
    """Run all seeds and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each cut
    torch.set_num_threads(1)
    expected = {name: reference(name) for name in WIDTHS}
    outcomes: list[Outcome] = []
    nursery = Nursery()
    with tempfile.TemporaryDirectory(prefix="feed-faults-") as folder:
        for seed in range(options.first, options.first + options.seeds):
            name = list(WIDTHS)[seed // len(CARRIERS) % len(WIDTHS)]
            place = Path(folder, str(seed))
            loaders: list[Any] = []

            def start(*words: Any, place: Path = place, loaders: list[Any] = loaders, **settings: Any) -> Any:
                loaders.append(nursery.start(place.with_suffix(".log"), *words, **settings))
                return loaders[-1]

            outcome = attempt(seed, name, start, place, expected[name])
            for loader in loaders:
                loader.kill()
                loader.wait()
            outcomes.append(outcome)
            print(
                f"seed {seed:3}  {name:<7} {outcome.carrier:<14} {outcome.cuts} cuts, {outcome.seconds:5.1f} s  "
                f"{outcome.problem or 'same weights'}",
                flush=True,
            )
    nursery.close()
    wrong = [outcome for outcome in outcomes if outcome.problem]
    positions = sorted(position for outcome in outcomes for position in outcome.positions)
    print(
        f"{len(outcomes)} trainings, {sum(outcome.cuts for outcome in outcomes)} connections cut after "
        f"{positions[0]} to {positions[-1]} bytes ({sum(position < 600 for position in positions)} of them within the "
        f"handshake): {len(wrong)} with other weights or ledger"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
