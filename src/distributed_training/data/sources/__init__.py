"""Datasets by name, one file a kind: each file has `load(config) -> Splits`.

`DATASETS` maps a name to its module. Modules are imported only when asked for, so that a dataset which needs an
optional library costs nothing to those who do not use it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from distributed_training.config.check import did_you_mean
from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Splits
from distributed_training.runtime.errors import ConfigError, DataError

__all__ = ["DATASETS", "device_part", "load_dataset"]

DATASETS: dict[str, str] = {
    "digits": f"{__name__}.digits",
    "cifar10": f"{__name__}.cifar",
    "cifar100": f"{__name__}.cifar",
    "synthetic": f"{__name__}.synthetic",
    "csv": f"{__name__}.csv_files",
    "numpy": f"{__name__}.numpy_files",
    "parquet": f"{__name__}.parquet_files",
    "images": f"{__name__}.image_folder",
    "huggingface": f"{__name__}.huggingface",
}


def load_dataset(config: DataConfig) -> Splits:
    """The training and validation data that `data.dataset` names: a kind of `DATASETS` or `my_module:MyDataset`."""
    name = config.dataset
    module = f"{__name__}.imported" if ":" in name else DATASETS.get(name)
    if module is None:
        raise ConfigError(
            f"data.dataset={name!r} is none of {', '.join(DATASETS)}, nor an import path such as my_module:MyDataset"
            f"{did_you_mean(name, DATASETS)}"
        )
    try:
        splits: Splits = importlib.import_module(module).load(config)
    except OSError as error:
        place = error.filename or config.root
        raise DataError(f"data.dataset={name}: cannot read {place}: {error.strerror or error}") from error
    _refuse_empty(splits, config)
    return splits


def device_part(config: DataConfig) -> Callable[..., Any] | None:
    """What `data.dataset` leaves to be done to each batch on the device, if anything."""
    module = DATASETS.get(config.dataset)
    make = getattr(importlib.import_module(module), "device_part", None) if module is not None else None
    return make(config) if make is not None else None


def _refuse_empty(splits: Splits, config: DataConfig) -> None:
    for part, dataset in (("training", splits.train), ("validation", splits.validation)):
        if dataset is not None and len(dataset) == 0:
            raise DataError(f"data.dataset={config.dataset}: the {part} set holds no samples (data.root={config.root})")
