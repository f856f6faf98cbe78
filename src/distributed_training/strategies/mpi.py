"""DistributedDataParallel over MPI: `mpirun -np 4 dtrain train strategy=mpi`, with our own backend in C++."""

from __future__ import annotations

from dataclasses import replace

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.base import Place
from distributed_training.strategies.ddp import DDP


class MPI(DDP):
    """What `ddp` does, and MPI carries it: through shared memory inside a host, by MPI between hosts."""

    name = "mpi"

    def __init__(self, place: Place) -> None:
        if place.config.backend not in ("auto", self.name):
            raise ConfigError(
                f"strategy=mpi exchanges by MPI, but strategy.backend={place.config.backend}: leave one of them out"
            )
        super().__init__(replace(place, config=replace(place.config, backend=self.name)))
