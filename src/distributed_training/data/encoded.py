"""Encoded images: JPEG, PNG and others as they lie in files, decoded by threads where they are needed.

A photograph takes a tenth of its pixels' bytes as a JPEG. Over a slow link it travels so, and is decoded on the other
side by the same library and the same steps: pixel for pixel what decoding before the journey gives.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.data.augment import IMAGE_KEYS
from distributed_training.runtime.errors import DataError
from distributed_training.runtime.imports import require

FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
_MOST_THREADS = 16


class DecodeImages:
    """A `device_transform`: encoded images of a batch to uint8 [n, 3, size, size]. All else passes as it is.

    The images are the first column of a tuple or list, or the `image` (`images`, `pixel_values`, `inputs`, `x`) of a
    dict: a list of bytes, one a sample. The shorter side is resized to `size`, and the middle cut out.
    """

    def __init__(self, size: int, threads: int | None = None) -> None:
        require("PIL.Image", "files", "decoding images")
        self.size = size
        self.threads = threads or min(_MOST_THREADS, len(os.sched_getaffinity(0)))

    def __call__(self, data: Any, *, ids: np.ndarray) -> Any:
        """The batch with its images decoded."""
        if are_bytes(data):
            return self._decode(data, ids)
        if isinstance(data, Mapping):
            key = next((key for key in IMAGE_KEYS if key in data and are_bytes(data[key])), None)
            return data if key is None else {**data, key: self._decode(data[key], ids)}
        if isinstance(data, (tuple, list)) and data and are_bytes(data[0]):
            values = [self._decode(data[0], ids), *data[1:]]
            return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
        return data

    def _decode(self, images: Sequence[bytes], ids: np.ndarray) -> Tensor:
        shape = (len(images), 3, self.size, self.size)
        pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        rows = pixels.numpy()

        def decode(row: int) -> None:
            rows[row] = decode_image(io.BytesIO(images[row]), self.size, f"sample {ids[row]}")

        threads = min(self.threads, len(images))
        if threads < 2:
            for row in range(len(images)):
                decode(row)
        else:
            with ThreadPoolExecutor(threads) as pool:  # decoders run without the interpreter
                list(pool.map(decode, range(len(images))))
        return pixels


def are_bytes(column: Any) -> bool:
    """Whether this is a column of encoded samples."""
    return isinstance(column, (list, tuple)) and bool(column) and all(isinstance(value, bytes) for value in column)


def decode_image(source: Path | io.BytesIO, size: int, name: str) -> np.ndarray:
    """The middle of an image as uint8 [3, size, size]."""
    from PIL import Image

    try:
        with Image.open(source, formats=FORMATS) as image:
            image.draft("RGB", (2 * size, 2 * size))  # JPEGs decode at a fraction of their size, several times faster
            scale = size / min(image.size)
            width, height = (max(size, round(side * scale)) for side in image.size)
            left, top = (width - size) // 2, (height - size) // 2
            square = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
            pixels = np.asarray(square.crop((left, top, left + size, top + size)), dtype=np.uint8)
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(f"{name}: not a readable image ({error}); replace or remove the file") from error
    return pixels.transpose(2, 0, 1)
