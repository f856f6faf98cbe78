"""The strategies that a plan compares: what each divides among the ranks, and the settings that choose it."""

from __future__ import annotations

from dataclasses import dataclass, field

from distributed_training.config import Config
from distributed_training.strategies import needs


@dataclass(frozen=True)
class Way:
    """One way to run the training."""

    label: str
    family: str
    """Whose formulas: single, dp, ddp, zero1, fsdp, deepspeed, horovod."""
    settings: dict[str, str | int] = field(default_factory=dict)
    """What to set to train so."""
    stage: int = 0
    """ZeRO stage: 1 divides the optimizer's state, 2 gradients too, 3 weights too."""
    compression: str = "none"
    backend: str = ""
    """How ranks talk; empty: what fits the device."""
    plain_buckets: bool = False
    """All gradients travel in DDP's buckets, large ones too."""

    @property
    def exact(self) -> bool:
        """Whether the training is that of one device."""
        return self.compression == "none"

    @property
    def strategy(self) -> str:
        """Its name in the config."""
        return str(self.settings["strategy.name"])

    @property
    def words(self) -> str:
        """On the command line."""
        words = [f"{key}={value}" for key, value in self.settings.items()]
        return " ".join(words).replace("strategy.name=", "strategy=")

    @property
    def like_alone(self) -> str | None:
        """The way whose one rank shows what the library adds to a step; None where that is known from what travels."""
        if self.family != "deepspeed":
            return None
        return "deepspeed 3" if self.stage == 3 else "deepspeed 2"  # its stage 1 does what its stage 2 does

    @property
    def installed(self) -> bool:
        """Whether it can run here."""
        return needs(self.strategy).installed


def _way(label: str, family: str, strategy: str, **options: object) -> Way:
    settings: dict[str, str | int] = {"strategy.name": strategy}
    if options.get("compression"):
        settings["strategy.compression"] = str(options["compression"])
    if family == "deepspeed":
        settings["strategy.zero_stage"] = options["stage"]  # type: ignore[assignment]
    return Way(label, family, settings, **options)  # type: ignore[arg-type]


WAYS = (
    _way("single", "single", "single"),
    _way("dp", "dp", "dp"),
    _way("ddp", "ddp", "ddp"),
    _way("ddp+bf16", "ddp", "ddp", compression="bf16", plain_buckets=True),
    _way("ddp+powersgd", "ddp", "ddp", compression="powersgd", plain_buckets=True),
    _way("zero1", "zero1", "zero1", stage=1),
    _way("zero2", "fsdp", "zero2", stage=2),
    _way("zero3", "fsdp", "zero3", stage=3),
    _way("deepspeed 1", "deepspeed", "deepspeed", stage=1),
    _way("deepspeed 2", "deepspeed", "deepspeed", stage=2),
    _way("deepspeed 3", "deepspeed", "deepspeed", stage=3),
    _way("accelerate", "ddp", "accelerate", plain_buckets=True),
    _way("horovod", "horovod", "horovod", backend="horovod"),
    _way("mpi", "ddp", "mpi", backend="mpi"),
)
BY_LABEL = {way.label: way for way in WAYS}


def ways_for(ranks: int, device: str, per_node: int) -> list[Way]:
    """Those that make sense for so many ranks."""
    if ranks == 1:
        return [BY_LABEL["single"]]
    return [way for way in WAYS if way.family != "single" and _possible(way, ranks, device, per_node)]


def _possible(way: Way, ranks: int, device: str, per_node: int) -> bool:
    if way.family == "dp":  # one process with several GPUs: there is none on the CPU, and no other machine
        return device == "cuda" and ranks <= per_node
    return True


def chosen_way(config: Config) -> Way | None:
    """The way that a config names already; None for auto."""
    strategy = config.chosen_strategy()
    for way in WAYS:
        wanted: dict[str, str | int] = {"strategy.name": strategy.name, "strategy.compression": strategy.compression}
        if strategy.name == "deepspeed":
            wanted["strategy.zero_stage"] = 2 if strategy.zero_stage is None else strategy.zero_stage
        if {"strategy.compression": "none", **way.settings} == wanted:
            return way
    return BY_LABEL["zero3"] if strategy.name == "fsdp" else None
