"""How one step runs on one or many devices, chosen by one word."""

from __future__ import annotations

import importlib.util
import shutil
from typing import NamedTuple

from distributed_training.config.check import did_you_mean
from distributed_training.native.toolchain import beside_python
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.imports import import_object
from distributed_training.strategies.auto import choose_strategy
from distributed_training.strategies.base import Place, StepResult, StepSettings, Strategy

__all__ = ["STRATEGIES", "Place", "StepResult", "StepSettings", "Strategy", "make_strategy", "needs"]

STRATEGIES = {
    "single": "distributed_training.strategies.single:SingleDevice",
    "dp": "distributed_training.strategies.dp:DataParallel",
    "ddp": "distributed_training.strategies.ddp:DDP",
    "zero1": "distributed_training.strategies.zero1:Zero1",
    "zero2": "distributed_training.strategies.zero2:Zero2",
    "zero3": "distributed_training.strategies.zero3:Zero3",
    "fsdp": "distributed_training.strategies.fsdp:FSDP",
    "deepspeed": "distributed_training.strategies.deepspeed:DeepSpeed",
    "accelerate": "distributed_training.strategies.accelerate:make_accelerate",
    "horovod": "distributed_training.strategies.horovod:Horovod",
    "mpi": "distributed_training.strategies.mpi:MPI",
}


class Needs(NamedTuple):
    """What must be there before a strategy can run."""

    library: str | None = None
    """A module of somebody else's."""
    extra: str = ""
    """The extra of ours that installs it."""
    launcher: str = "torchrun"
    """Who starts its processes: torchrun, horovodrun, mpirun, or none for one process."""
    program: str | None = None
    """A program of somebody else's, beside this Python or on PATH."""

    @property
    def installed(self) -> bool:
        """Whether all of it is there. The library is not imported: that can take seconds."""
        if self.program is not None and not (beside_python(self.program) or shutil.which(self.program)):
            return False
        if self.library is None:
            return True
        try:
            return importlib.util.find_spec(self.library) is not None
        except ModuleNotFoundError:  # the package around the module
            return False


_NEEDS = {
    "single": Needs(launcher="none"),
    "dp": Needs(launcher="none"),
    "deepspeed": Needs("deepspeed", "deepspeed"),
    "accelerate": Needs("accelerate", "accelerate"),
    "horovod": Needs("horovod.torch", "horovod", launcher="horovodrun"),
    "mpi": Needs(extra="mpi", launcher="mpirun", program="mpirun"),
}


def needs(name: str) -> Needs:
    """What the strategy of this name needs."""
    return _NEEDS.get(name, Needs())


def make_strategy(place: Place) -> Strategy:
    """The strategy that the config names. auto: what fits the devices and launcher found."""
    name = place.config.name
    if name == "auto":
        name = choose_strategy(place)
    if name not in STRATEGIES:
        raise ConfigError(
            f"strategy={name!r} is unknown; known: auto, {', '.join(STRATEGIES)}{did_you_mean(name, STRATEGIES)}"
        )
    strategy: Strategy = import_object(STRATEGIES[name], "strategy.name")(place)
    return strategy
