"""The cable between two machines is taken away and comes back: the weights are those of an undisturbed training."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator

import pytest
from tests.feed.conftest import StartLoader
from tests.feed.namespaces import inside
from tests.feed.test_feed import server_for
from tests.feed.test_training import local_training, network
from tests.launch.networks import Machine, two_machines
from tests.training.examples import assert_same_weights, trainer
from torch import Tensor

from distributed_training.feed import FeedSettings
from distributed_training.training import Callback, Trainer


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as pair:
        yield pair


def cable(machine: Machine, state: str) -> None:
    subprocess.run(["ip", "-n", machine.name, "link", "set", "eth0", state], check=True, timeout=30)


class Unplugged(Callback):
    """Takes the cable away in the middle of an epoch, for some time."""

    def __init__(self, machine: Machine, seconds: float) -> None:
        self.machine = machine
        self.back = threading.Timer(seconds, cable, (machine, "up"))

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        if trainer.cursor.global_step == 20:
            cable(self.machine, "down")
            self.back.start()


@pytest.mark.parametrize(
    ("seconds", "silence"), [(0.6, 8.0), (2.5, 0.9)], ids=["for a moment", "longer than both sides wait"]
)
def test_the_cable_is_taken_away_and_comes_back(
    start_loader: StartLoader,
    machines: tuple[Machine, Machine],
    caplog: pytest.LogCaptureFixture,
    seconds: float,
    silence: float,
) -> None:
    gpu, cpu = machines
    # Few steps ahead, so that training soon waits for what the cable does not bring.
    settings = FeedSettings(silence=silence, max_steps_ahead=4, deadline=60.0, absence=60.0, shortest_lease=0.5)
    with inside(gpu.name):
        server = server_for("arrays", epochs=2, host=gpu.address, settings=settings)
    net, unplugged = network(), Unplugged(gpu, seconds)
    with server:
        loader = start_loader(
            server.link(), workers=2, shared_memory=False, silence=silence, patience=60.0, namespace=cpu.name
        )
        trainer(net, unplugged).train(server.source(), epochs=2)
        unplugged.back.join()
        lost = "nothing was heard of it" in caplog.text
        assert lost == (seconds > silence)
        assert ("connecting again" in loader.log) == lost
        assert server.figures().waited > seconds / 2
    assert_same_weights(net, local_training())
