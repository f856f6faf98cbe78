"""The GPU side from a config: listens, builds the model for the data that the first loader has, trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from distributed_training.config import Config
from distributed_training.runtime.errors import FeedError
from distributed_training.split.fed_training import train_from_feed
from distributed_training.split.listening import Address, Listening, link_to_loader, listen
from distributed_training.training import TrainingResult
from distributed_training.training.job import build_trainer

if TYPE_CHECKING:
    from distributed_training.split.tunnelling import Tunnelling
    from distributed_training.wire.fields import Fact


class Serving:
    """A training as configured whose data is elsewhere. To be closed; `listening` says where loaders come.

    Data is never looked at here: the first loader says how many samples and classes there are and what shape they have,
    and must have this config's batch size, seed and order.
    """

    def __init__(
        self,
        config: Config,
        *,
        port: int | None = None,
        allow: Iterable[str] | None = None,
        tunnelling: Tunnelling | None = None,
        connect: str | None = None,
    ) -> None:
        """With `tunnelling`, which is closed with this, it listens behind a tunnel instead of at an address.
        `connect` is the link of a loader that listens: this side dials it."""
        network, training, data = config.network, config.training, config.data
        self.config = config
        facts: dict[str, Fact] = {
            "batch_size": training.batch_size,
            "seed": training.seed,
            "shuffle": data.shuffle,
            "drop_last": data.drop_last,
        }
        port, self._tunnelling = network.port if port is None else port, tunnelling
        address = Address(network.gpu_host, port, allow=allow)
        if tunnelling is not None:
            address = tunnelling.address(port, allow=allow)
        if connect is not None:
            address = Address(network.gpu_host, port, connect=link_to_loader(connect))
        again = config.checkpoint.resume != "never"
        self.listening: Listening = listen(config, address, again=again, epochs=training.epochs, facts=facts)
        self.leads = self.listening.world.rank == 0
        self.finished = False
        """Whether the training came to its end."""

    def announce(self) -> None:
        """Say on the screen how loaders connect; opens the tunnel, if there is one."""
        if self._tunnelling is not None:
            self._tunnelling.lead_to(self.listening)
        else:
            self.listening.announce()

    def train(self) -> TrainingResult:
        """Wait for the first loader, then train."""
        server = self.listening.server
        server.hub.wait_for_plan()
        classes, shape = kind_of_data(server.hub.told)
        trainer = build_trainer(self.config, classes, shape)
        try:
            result = train_from_feed(trainer, self.listening, epochs=self.config.training.epochs)
            self.finished = result.status != "interrupted"
            return result
        finally:
            trainer.close()

    def close(self) -> None:
        """Stop listening. Loaders that are still there wait for this side to come back."""
        self.listening.close(finished=False)
        if self._tunnelling is not None:
            self._tunnelling.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def kind_of_data(told: Mapping[str, Fact]) -> tuple[int | None, tuple[int, ...] | None]:
    """(classes, shape of a sample's input) as the first loader said. It is checked: it comes from the network."""
    classes, shape = told.get("num_classes"), told.get("input_shape")
    if classes is not None and not (type(classes) is int and 0 < classes < 2**31):
        raise FeedError(f"the loader says num_classes={classes!r}; both sides need the same release")
    if shape is None:
        return classes, None
    sizes = shape.split(",") if isinstance(shape, str) and shape else []
    if len(sizes) > 8 or not all(size.isdigit() and len(size) < 10 for size in sizes):
        raise FeedError(f"the loader says input_shape={shape!r}; both sides need the same release")
    return classes, tuple(map(int, sizes))
