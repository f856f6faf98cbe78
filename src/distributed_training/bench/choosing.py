"""Which cases and variants of a part were asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distributed_training.config.check import did_you_mean
from distributed_training.config.errors import ConfigError


def choose(wanted: Sequence[str], known: Iterable[str], usual: Sequence[str], option: str) -> list[str]:
    """The names asked for by `option` (`--cases`), in the order of the part; `usual` where none were."""
    names = list(known)
    for name in wanted:
        if name not in names:
            raise ConfigError(
                f"{option} {name}: there is no such name here{did_you_mean(name, names)} ({', '.join(names)})"
            )
    return [name for name in names if name in (wanted or usual)]
