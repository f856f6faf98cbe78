"""What every rank runs: a `dtrain` command, a user's script or a user's module."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from distributed_training.config.errors import ConfigError


def python_arguments(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """The words after `--` as arguments of Python: `train x=1`, `script.py 1 2` or `-m module 1 2`."""
    if not words:
        raise ConfigError(
            "nothing to launch: give a command after `--`, such as `dtrain launch --nproc 2 -- train strategy=ddp`"
        )
    first = words[0]
    if first == "-m":
        if len(words) == 1:
            raise ConfigError("-m needs the name of a module: dtrain launch -- -m package.module")
        return list(words)
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise ConfigError(f"{first}: no such file; give the path of your script as seen from {Path.cwd()}")
        return list(words)
    if first not in commands:
        known = ", ".join(sorted(commands))
        raise ConfigError(f"{first!r} is no command of dtrain ({known}), no .py file and not -m MODULE")
    return ["-m", "distributed_training", *words]
