"""The CPU side at work: data and plan, workers, what is shown of them. Behind `CPULoader` and `dtrain feed`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed_training.config import Config
from distributed_training.data import Loader as LocalLoader
from distributed_training.feed import Loader
from distributed_training.feed.answering import HomeDoor
from distributed_training.feed.homecoming.home import Home
from distributed_training.feed.loader import LoaderFigures
from distributed_training.feed.pairing import PairingLink
from distributed_training.split.homecoming import home_for, say_where
from distributed_training.split.screen import LoaderScreen
from distributed_training.split.settings import loader_settings
from distributed_training.training.job import load_data, make_plan, sample_shape

if TYPE_CHECKING:
    from distributed_training.wire.fields import Fact


@dataclass
class Feeding:
    """What a loader brings."""

    train: LocalLoader
    validation: LocalLoader | None
    workers: int
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """What the GPU side is told beside the plan."""

    def run(self, links: list[PairingLink] | HomeDoor, config: Config) -> LoaderFigures:
        """Load until the training is over, for the GPU side at these links or for the one that calls at a door."""
        ranks = len(links) if isinstance(links, list) else 1  # of a GPU side that calls: not known
        plan, epochs = self.train.plan, self.facts.get("epochs")
        screen = LoaderScreen(
            config.run.progress,
            plan.steps_per_epoch,
            plan.batch_size / ranks,
            self.workers,
            epochs if isinstance(epochs, int) else None,
        )
        home, began = home_for(config, self.train), time.time()
        loader = self.loader(links, config, home, screen)
        try:
            return loader.run()
        finally:
            screen.close(loader.figures())
            if home is not None and config.run.progress != "off":
                say_where(home, began)

    def loader(
        self,
        links: list[PairingLink] | HomeDoor,
        config: Config,
        home: Home | None,
        on_figures: Callable[[LoaderFigures], None] | None = None,
    ) -> Loader:
        """The loader that brings it, not started."""
        held_out = self.validation
        return Loader(
            self.train.dataset,
            self.train.plan,
            links,
            workers=self.workers,
            settings=loader_settings(config),
            on_figures=on_figures,
            validation=(held_out.dataset, held_out.plan) if held_out is not None else None,
            facts={**facts_for_model(self.train), **self.facts},
            home=home,
        )


def feeding_from(config: Config, ranks: int = 1) -> Feeding:
    """The data that a config names; at least one worker for each rank."""
    data = load_data(config)
    train = LocalLoader(data.train, make_plan(data.train, config, training=True))
    held_out = data.validation
    validation = LocalLoader(held_out, make_plan(held_out, config, training=False)) if held_out is not None else None
    return Feeding(train, validation, max(config.data.num_workers, ranks, 1), {"epochs": config.training.epochs})


def facts_for_model(data: LocalLoader) -> dict[str, Fact]:
    """What a model is made from that is to fit the data."""
    shape, classes = sample_shape(data.dataset), data.dataset.num_classes
    facts: dict[str, Fact] = {}
    if shape is not None:
        facts["input_shape"] = ",".join(map(str, shape))
    if classes is not None:
        facts["num_classes"] = classes
    return facts
