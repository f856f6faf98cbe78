"""A training whose batches come from loaders: the trainer, a server that listens, and what is said at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed_training.split.expected import ExpectedTime
from distributed_training.split.homecoming import Homecoming
from distributed_training.split.listening import Listening
from distributed_training.training import Trainer, TrainingResult


def train_from_feed(
    trainer: Trainer,
    listening: Listening,
    *,
    epochs: int | None = None,
    val_data: Any = None,
    scheduler: Any = None,
    resume: str | Path | None = None,
) -> TrainingResult:
    """Train on what loaders bring, and tell them at the end whether to stay.

    Held-out samples come from `val_data` on this machine, or else from the loaders, if they have any. Without `epochs`
    the loaders say how many, and if they do not either, the config.
    """
    server = listening.server
    source = server.source()
    finished, expected = False, ExpectedTime(source)
    homecoming = Homecoming(trainer, server, source)
    try:
        held_out = val_data if val_data is not None else source.validation()
        wanted = epochs if epochs is not None else server.hub.epochs
        if listening.world.rank == 0:
            trainer.callbacks.append(expected)
        start = homecoming.begin(resume)
        result = trainer.train(source, held_out, epochs=wanted, scheduler=scheduler, resume=start)
        homecoming.finish()
        finished = result.status != "interrupted"
        return result
    finally:
        trainer.callbacks[:] = [callback for callback in trainer.callbacks if callback is not expected]
        homecoming.close()
        listening.close(finished=finished)  # else loaders wait for this side to come back
