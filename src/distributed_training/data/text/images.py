"""Pictures of a `datasets.Dataset` made into what an image model takes, when they are fetched."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.base import Dataset
from distributed_training.data.text.columns import Columns, choose_columns
from distributed_training.data.text.labels import Labels, check_numbers, find_labels
from distributed_training.data.text.settings import ProcessSettings
from distributed_training.runtime.errors import DataError

_SAMPLES = 64  # that a fingerprint looks at


class ImageDataset(Dataset):
    """Images by an image processor: a batch is a dict of `pixel_values` (float32) and `labels` (int64).

    They are decoded and resized each time they are fetched, as kept ones would take many times the space;
    `data.num_workers` does it in parallel.
    """

    alone = True

    def __init__(self, table: Any, processor: Any, columns: Columns, labels: Labels, name: str) -> None:
        self.table, self.processor, self.columns, self.name = table, processor, columns, name
        self.classes, self.num_classes = labels.names, labels.count
        assert columns.label is not None
        encoded = labels.encode(table[columns.label][:], 0, name)
        self._labels = np.asarray(encoded, dtype=np.int64)
        check_numbers(self._labels, labels, None, name)

    @property
    def column_names(self) -> list[str]:
        """The keys of a batch."""
        return ["pixel_values", "labels"]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        if not -len(self) <= sample < len(self):
            raise IndexError(f"{self.name} has {len(self)} samples, and no sample {sample}")
        return {key: value[0] for key, value in self.fetch(np.array([sample % len(self)])).items()}

    def fetch(self, ids: np.ndarray) -> dict[str, Tensor]:
        if not len(ids):
            return {key: value[:0] for key, value in self.fetch(np.zeros(1, dtype=np.int64)).items()}
        images = [self._image(int(sample)) for sample in ids]
        pixels = self.processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels.to(torch.float32), "labels": torch.from_numpy(self._labels[ids])}

    def fingerprint(self) -> str:
        from datasets import Image

        digest = hashlib.sha256(self._labels.tobytes())
        stored = self.table.select_columns([self.columns.inputs]).cast_column(self.columns.inputs, Image(decode=False))
        for sample in np.unique(np.linspace(0, len(self) - 1, _SAMPLES).astype(np.int64)).tolist():
            row = stored[sample][self.columns.inputs]
            content = row["bytes"]
            if content is None:
                with open(row["path"], "rb") as file:
                    content = file.read()
            digest.update(content)
        digest.update(json.dumps(self.processor.to_dict(), sort_keys=True, default=str).encode())
        digest.update(repr(self.classes).encode())
        return digest.hexdigest()[:16]

    def _image(self, sample: int) -> Any:
        try:
            image = self.table[sample][self.columns.inputs]
            if image is None:
                raise ValueError("there is no image")
            return image.convert("RGB")
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.name}, sample {sample}, column {self.columns.inputs}: {type(error).__name__}: {error}"
            ) from error


class ImageProcessing:
    """What is done to every image. Made from the training data; the held-out data gets the same."""

    def __init__(self, dataset: Any, processor: Any, settings: ProcessSettings, where: str) -> None:
        self._processor, self._settings, self._where = processor, settings, where
        self._columns = choose_columns(dataset.column_names, settings, where)
        if type(dataset.features[self._columns.inputs]).__name__ != "Image":
            raise DataError(
                f"{where}, column {self._columns.inputs}: holds {dataset.features[self._columns.inputs]}, not images"
            )
        assert self._columns.label is not None
        self._labels = find_labels(dataset, self._columns.label, settings, where)

    def process(self, dataset: Any, split: str = "") -> ImageDataset:
        """The images of a dataset."""
        where = f"{self._where}, {split}" if split else self._where
        columns = choose_columns(dataset.column_names, self._settings, where)
        return ImageDataset(dataset, self._processor, columns, self._labels, where)
