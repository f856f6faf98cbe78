"""A user's own dataset, `my_module:MyDataset`, called with `data.args`."""

from __future__ import annotations

import inspect
from typing import Any

from distributed_training.config.check import did_you_mean
from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.sources.split import hold_out
from distributed_training.runtime.errors import ConfigError, DataError, DistributedTrainingError
from distributed_training.runtime.imports import import_object


def load(config: DataConfig) -> Splits:
    """What the user's class or function returns: a dataset, a pair of them, or Splits.

    A single dataset is split by `data.validation_fraction`.
    """
    target = import_object(config.dataset, "data.dataset")
    if not callable(target):
        raise ConfigError(f"data.dataset={config.dataset!r} is a {type(target).__name__}, not a class or function")
    _check_arguments(target, config)
    try:
        made = target(**config.args)
    except DistributedTrainingError:
        raise
    except Exception as error:
        raise DataError(f"data.dataset={config.dataset} raised {type(error).__name__}: {error}") from error
    if isinstance(made, Splits):
        return made
    if isinstance(made, tuple):
        if len(made) != 2:
            raise DataError(f"data.dataset={config.dataset} returned {len(made)} parts, not (train, validation)")
        train, validation = made
        return Splits(_dataset(train, config), None if validation is None else _dataset(validation, config))
    dataset = _dataset(made, config)
    if len(dataset) == 0:
        raise DataError(f"data.dataset={config.dataset}: the dataset holds no samples")
    return hold_out(dataset, config.validation_fraction)


def _dataset(made: Any, config: DataConfig) -> Dataset:
    if isinstance(made, Dataset):
        return made
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        raise DataError(
            f"data.dataset={config.dataset} gave a {type(made).__name__}, which has no samples by number; "
            "return a map-style dataset with __len__ and __getitem__"
        )
    from distributed_training.data.torch_dataset import as_dataset

    return as_dataset(made)


def _check_arguments(target: Any, config: DataConfig) -> None:
    """Refuse arguments that the user's code does not take, before its own TypeError says so less clearly."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # compiled code without a signature
    try:
        signature.bind(**config.args)
    except TypeError as error:
        known = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        unknown = [key for key in config.args if key not in known]
        if unknown:
            message = (
                f"data.args.{unknown[0]} is not known: {config.dataset} takes {', '.join(known) or 'no arguments'}"
            )
            raise ConfigError(f"{message}{did_you_mean(str(unknown[0]), known)}") from None
        raise ConfigError(f"data.args do not fit {config.dataset}: {error}") from None
