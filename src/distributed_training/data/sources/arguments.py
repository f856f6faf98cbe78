"""`data.args` of one dataset kind, checked against a dataclass of what the kind takes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from distributed_training.config.check import check_types, did_you_mean
from distributed_training.config.schema import DataConfig
from distributed_training.runtime.errors import ConfigError

Arguments = TypeVar("Arguments")


def read_arguments(kind: type[Arguments], config: DataConfig) -> Arguments:
    """`config.args` as an instance of `kind`; an unknown key or a value of the wrong type raises ConfigError."""
    section: Any = kind
    known = [f.name for f in dataclasses.fields(section)]
    for key in config.args:
        if key not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no arguments"
            hint = did_you_mean(str(key), known)
            raise ConfigError(f"data.args.{key} is not known: the dataset {config.dataset} {takes}{hint}")
    arguments = kind(**config.args)
    check_types(arguments, "data.args")
    return arguments
