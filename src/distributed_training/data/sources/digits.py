"""1,797 handwritten digits of 8x8 pixels that come with the package: no download, trains in seconds."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distributed_training.config.schema import DataConfig
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.split import hold_out
from distributed_training.runtime.errors import DataError

ASSET = Path(__file__).parents[1] / "assets" / "digits.npz"


@dataclass(kw_only=True)
class DigitsArguments:
    """`data.args` of digits: none."""


def load(config: DataConfig) -> Splits:
    """Images float32 [1, 8, 8] in 0..1 and labels 0..9."""
    read_arguments(DigitsArguments, config)
    try:
        with ASSET.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            images, labels = stored["images"], stored["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{ASSET}: damaged or missing ({error}); reinstall distributed-training") from error
    scaled = images[:, None].astype(np.float32) / 16
    dataset = ArrayDataset((scaled, labels.astype(np.int64)), num_classes=10, name="digits")
    return hold_out(dataset, config.validation_fraction)
