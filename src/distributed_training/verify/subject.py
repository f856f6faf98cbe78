"""What is verified: a config or a program of the user's, and the ways in which it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distributed_training.config.check import did_you_mean
from distributed_training.config.load import CONFIG_FILE_VARIABLE, PREFIX
from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies import STRATEGIES

# In force unless the command line says otherwise: differences of rounding are smallest in fp32, and PowerSGD is to be
# seen at work in a short run.
_ASSUMED = {"training.precision": "fp32", "strategy.powersgd_start_step": "2"}


@dataclass(frozen=True)
class Subject:
    """A training: a config with settings, or a program that has a Trainer."""

    config: str | None = None
    """A config file; left out, ./config.yaml if there is one, else the defaults."""
    settings: list[str] = field(default_factory=list)
    """`key=value` words over it."""
    program: list[str] = field(default_factory=list)
    """A script and its arguments; empty to train what the config says."""

    def command(self, settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """(arguments of Python, environment variables) that train it with settings on top of its own."""
        words = [*_words(_ASSUMED), *self.settings, *_words(settings)]
        if not self.program:
            return ["-m", f"{__package__}.child", *([self.config] if self.config else []), *words], {}
        variables = {CONFIG_FILE_VARIABLE: self.config} if self.config else {}
        for word in words:
            key, _, value = word.partition("=")
            variables[PREFIX + key.upper().replace(".", "__")] = value
        return self.program, variables


@dataclass(frozen=True)
class Variant:
    """A strategy with settings of its own: `ddp`, `ddp+powersgd`, `deepspeed+zero_stage=3`."""

    label: str
    strategy: str
    settings: dict[str, str]


def read_variant(label: str) -> Variant:
    """The variant that a word of --strategies means. A part without a key is a kind of compression."""
    strategy, *parts = label.split("+")
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"--strategies: {strategy!r} is unknown; known: {', '.join(STRATEGIES)}{did_you_mean(strategy, STRATEGIES)}"
        )
    settings = {"strategy.name": strategy}
    for part in parts:
        key, equals, value = part.partition("=")
        settings[f"strategy.{key if equals else 'compression'}"] = value if equals else key
    return Variant(label, strategy, settings)


def _words(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]
