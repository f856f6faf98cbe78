"""A model that serves clients, for tests: real sockets, the model in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tests.training.examples import trainer
from torch import Tensor, nn

from distributed_training.feed import FeedServer, FeedSettings, LoaderSettings
from distributed_training.feed.pairing import new_token
from distributed_training.feed.tls import make_certificate
from distributed_training.split.service import ModelService
from distributed_training.training import Trainer

WIDTH, CLASSES = 12, 5
QUICK = LoaderSettings(first_pause=0.02, longest_pause=0.1, patience=20.0, silence=10.0)


def network(seed: int = 0, outputs: int = CLASSES) -> nn.Sequential:
    """The same small network each time; its dropout must not be on."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, outputs))


def arrays(samples: int = 203, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels; a last batch is uneven for most sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, WIDTH, generator=generator), torch.randint(0, CLASSES, (samples,), generator=generator)


class Rows:
    """A dataset that gives a sample at a time, and may have bad ones."""

    def __init__(self, data: tuple[Tensor, Tensor], bad: tuple[int, ...] = ()) -> None:
        self.data, self.bad = data, bad

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise ValueError(f"the file of {index} is damaged")
        return self.data[0][index], self.data[1][index]


class Service:
    """What serves, and how to reach it."""

    def __init__(self, mode: str, served: Trainer, port: int = 0, *, secure: bool = False, **settings: Any) -> None:
        own = {"silence": 6.0, "authentication": 2.0, **settings}
        self._model = ModelService(served, mode, FeedSettings(**own))
        self.turns = self._model.turns
        identity: dict[str, Any] = {"token": new_token(), "certificate": make_certificate()} if secure else {}
        self.server = FeedServer(service=self.turns, settings=self.turns.settings, port=port, **identity)
        self.link = str(self.server.link())
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="the model")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._model.run()
        except BaseException as error:
            self._errors.append(error)

    def has_sent(self) -> bool:
        """Whether a client got a result."""
        return self.turns.figures().sent > 0

    def close(self, *, finished: bool = True) -> None:
        """End it; fails where the model did."""
        self.turns.stop()
        self._thread.join(20)
        self.server.close(finished=finished)
        assert not self._errors, self._errors


@contextmanager
def serving(mode: str, served: Trainer | None = None, **settings: Any) -> Iterator[Service]:
    """A service for the time of a block."""
    service = Service(mode, served or trainer(network()), **settings)
    try:
        yield service
    finally:
        service.close()


def probabilities(data: tuple[Tensor, Tensor], seed: int = 0) -> np.ndarray:
    """What the network says of all samples at once."""
    with torch.no_grad():
        return network(seed).eval()(data[0]).softmax(1).numpy()
