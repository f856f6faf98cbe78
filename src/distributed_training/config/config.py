"""`Config`: all settings of a run, and where each of them came from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed_training.config.check import coerce, did_you_mean
from distributed_training.config.errors import ConfigError
from distributed_training.config.sagemaker import SageMakerConfig
from distributed_training.config.schema import (
    CheckpointConfig,
    DataConfig,
    EarlyStoppingConfig,
    FeedConfig,
    ModelConfig,
    NetworkConfig,
    RecordConfig,
    RunConfig,
    StrategyConfig,
    TrackingConfig,
    TrainingConfig,
)
from distributed_training.config.tuning import TuningConfig


@dataclass(frozen=True)
class Origin:
    """One layer's say about one setting."""

    source: str
    value: Any


@dataclass(kw_only=True)
class Config:
    """Every setting of a run, checked when it is made."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    feed: FeedConfig = field(default_factory=FeedConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    run: RunConfig = field(default_factory=RunConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    sagemaker: SageMakerConfig = field(default_factory=SageMakerConfig)

    def __post_init__(self) -> None:
        self._origins: dict[str, list[Origin]] = {}
        for f in dataclasses.fields(self):
            coerce(getattr(self, f.name), section_types()[f.name], f.name)
        self.chosen_strategy()  # refuses a contradiction

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> Config:
        """The settings of a YAML file over the defaults, then `.env`, the environment and `key=value` overrides."""
        from distributed_training.config.load import load_config

        return load_config(path, overrides)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "dict") -> Config:
        """A config from a nested mapping, such as a saved `to_dict()`. Unknown keys are errors."""
        from distributed_training.config.load import config_from_layers

        return config_from_layers([(source, dict(values))])

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key: `config.get('training.batch_size')`. Unknown keys give `default`."""
        here: Any = self
        parts = resolve_alias(key).split(".")
        while parts:
            taken = 1
            if isinstance(here, Mapping):  # keys of the user's may have dots
                taken = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in here), 0)
                if not taken:
                    return default
                here = here[".".join(parts[:taken])]
            elif dataclasses.is_dataclass(here) and parts[0] in {f.name for f in dataclasses.fields(here)}:
                here = getattr(here, parts[0])
            else:
                return default
            del parts[:taken]
        return dataclasses.asdict(here) if dataclasses.is_dataclass(here) and not isinstance(here, type) else here

    def get_network_config(self) -> dict[str, Any]:
        """The network section as a dict: gpu_host, cpu_host, port."""
        return dataclasses.asdict(self.network)

    def chosen_strategy(self) -> StrategyConfig:
        """The strategy in force: `training.type` names one in the words of Hugging Face users."""
        kind, strategy = self.training.type, self.strategy
        if kind == "auto":
            return strategy
        name = {"basic": "single", "accelerated": "accelerate"}[kind]
        if strategy.name not in ("auto", name):
            raise ConfigError(
                f"training.type={kind} means strategy={name}, but strategy={strategy.name}: leave one of them out"
            )
        if kind == "basic" and strategy.zero_stage is not None:
            raise ConfigError(
                f"strategy.zero_stage={strategy.zero_stage} divides a model among processes, but training.type=basic "
                "is one device: use training.type=accelerated"
            )
        plugin: Any = "deepspeed" if strategy.zero_stage is not None else strategy.plugin
        if strategy.plugin not in ("none", plugin):
            raise ConfigError(
                f"strategy.zero_stage={strategy.zero_stage} is DeepSpeed's, but strategy.plugin={strategy.plugin}"
            )
        return dataclasses.replace(strategy, name=name, plugin=plugin)

    def to_dict(self) -> dict[str, Any]:
        """All settings as a nested dict of plain values."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Config:
        """A copy with dotted keys changed: `config.replace(**{'training.epochs': 3})`."""
        from distributed_training.config.load import config_from_layers, literal, nest

        base = literal(self.to_dict())
        for key in changes:
            if known_keys().get(key):  # a mapping of the user's own keys is replaced, not merged
                section, _, name = key.partition(".")
                del base[section][name]
        result = config_from_layers([("config", base)] + [("replace", nest(k, v)) for k, v in changes.items()])
        for key, origins in result._origins.items():
            result._origins[key] = self.origins(key) + [o for o in origins if o.source == "replace"]
        return result

    def origins(self, key: str) -> list[Origin]:
        """Who set this key, first the default, last the winner."""
        key = resolve_alias(key)
        return self._origins.get(key, [Origin("default", self.get(key))])

    def save(self, path: str | Path) -> None:
        """Write all settings as YAML."""
        from omegaconf import OmegaConf

        from distributed_training.config.load import literal

        Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(literal(self.to_dict()))), encoding="utf-8")


ALIASES = {"training.learning_rate": "training.lr"}


def resolve_alias(key: str) -> str:
    """The one true name of a key."""
    return ALIASES.get(key, key)


@functools.cache
def section_types() -> dict[str, type]:
    """Each section's name and dataclass."""
    return {f.name: f.default_factory for f in dataclasses.fields(Config)}  # type: ignore[misc]


def fields_of(section: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """All settings below a section class, nested sections opened, as (dotted key, field)."""
    for f in dataclasses.fields(section):
        inner = f.default_factory
        if isinstance(inner, type) and dataclasses.is_dataclass(inner):
            yield from fields_of(inner, f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}", f


@functools.cache
def known_keys() -> dict[str, bool]:
    """Every dotted key there is, and whether its value is a free mapping (whose inner keys are the user's)."""
    return {key: f.default_factory is dict for key, f in fields_of(Config)}


@functools.cache
def groups() -> frozenset[str]:
    """Dotted names of all sections, those inside others too: they hold settings and have no value themselves."""
    parts = [key.split(".") for key in known_keys()]
    return frozenset(".".join(p[:n]) for p in parts for n in range(1, len(p)))


@functools.cache
def takes_text(key: str) -> bool:
    """Whether a setting is text, so that `run.name=1e3` is a name and not a number."""
    return any(key == k and f.type in ("str", "str | None") for k, f in fields_of(Config))


def check_key(key: str) -> None:
    """Refuse a key that is no setting, naming the nearest that is."""
    known = known_keys()
    if key in known or any(free and key.startswith(name + ".") for name, free in known.items()):
        return
    section, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    near = did_you_mean(leaf, siblings)
    if near:  # the same name in the same section beats a similar whole key
        word = near.removeprefix("; did you mean ").removesuffix("?")
        raise ConfigError(f"unknown setting {key}; did you mean {siblings[word]}?")
    near = did_you_mean(key, [*known, *ALIASES]) or f"; the sections are {', '.join(section_types())}"
    raise ConfigError(f"unknown setting {key}{near}")
