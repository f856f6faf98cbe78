"""A folder of images, one subfolder a class, decoded as they are needed.

`data.root` is `root/CLASS/*.jpg`, or `root/train/CLASS/*.jpg` with `root/validation` (or val, test) beside it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distributed_training.config.check import between
from distributed_training.config.schema import DataConfig
from distributed_training.data.base import Dataset, Splits
from distributed_training.data.encoded import DecodeImages, decode_image
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.split import hold_out
from distributed_training.runtime.errors import DataError
from distributed_training.runtime.imports import require

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(kw_only=True)
class ImageArguments:
    """`data.args` of images."""

    size: int = 224
    """Width and height of an image: the shorter side is resized to it and the middle cut out."""
    encoded: bool = False
    """Pass the files on as they are, to be decoded where the model is: less to send over a slow link."""

    def __post_init__(self) -> None:
        between("data.args.size", self.size, 1, 8192)


class ImageFolder(Dataset):
    """Image files with the folder they lie in as their class: uint8 [3, size, size] and an int64 label.

    `encoded`, an image is the bytes of its file.
    """

    alone = True

    def __init__(
        self, root: Path, files: list[str], labels: np.ndarray, classes: list[str], arguments: ImageArguments
    ) -> None:
        self.root, self.files, self.labels, self.classes = root, files, labels, classes
        self.size, self.encoded = arguments.size, arguments.encoded
        self.num_classes = len(classes)
        self.input_shape = (3, self.size, self.size)

    def __len__(self) -> int:
        return len(self.files)

    def fetch(self, ids: np.ndarray) -> Any:
        if self.encoded:
            files = [_read(self.root / self.files[sample]) for sample in ids]
            return files, torch.from_numpy(self.labels[ids])
        images = np.empty((len(ids), 3, self.size, self.size), dtype=np.uint8)
        for row, sample in enumerate(ids):
            path = self.root / self.files[sample]
            images[row] = decode_image(path, self.size, str(path))
        return torch.from_numpy(images), torch.from_numpy(self.labels[ids])

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"images {self.size}{' encoded' if self.encoded else ''}".encode())
        for name in self.files:
            path = self.root / name
            try:
                length = path.stat().st_size
            except OSError as error:
                raise DataError(f"{path}: cannot be read ({error.strerror}); was it removed?") from error
            digest.update(f"\0{name}\0{length}".encode())
        return digest.hexdigest()[:16]


def device_part(config: DataConfig) -> DecodeImages | None:
    """What of the work on a sample is left for the side that has the model."""
    arguments = read_arguments(ImageArguments, config)
    return DecodeImages(arguments.size) if arguments.encoded else None


def load(config: DataConfig) -> Splits:
    """Classes are the names of the folders, sorted. Files beside the class folders and folders in them are left out."""
    arguments = read_arguments(ImageArguments, config)
    require("PIL.Image", "files", "reading images")
    root = Path(config.root)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; set data.root to a folder with one subfolder of images a class")
    train = root / "train"
    if not (train.is_dir() and _folders(train)):  # a folder `train` full of images is a class of that name
        return hold_out(_scan(root, None, arguments), config.validation_fraction)
    dataset = _scan(train, None, arguments)
    held = next((root / name for name in ("validation", "val", "test") if (root / name).is_dir()), None)
    if held is None:
        return hold_out(dataset, config.validation_fraction)
    return Splits(dataset, _scan(held, dataset.classes, arguments))


def _scan(root: Path, classes: list[str] | None, arguments: ImageArguments) -> ImageFolder:
    """All images below `root`, sorted; `classes` are those of the training images, where this is the validation."""
    folders = _folders(root)
    names = [folder.name for folder in folders]
    if not folders:
        raise DataError(f"{root}: no class folders in it; expected {root}/CLASS/image.jpg")
    if classes is None:
        classes = names
    files: list[str] = []
    labels: list[int] = []
    for folder in folders:
        if folder.name not in classes:
            raise DataError(f"{folder}: class {folder.name!r} does not occur in the training images")
        found = sorted(p.name for p in folder.iterdir() if _is_image(p))
        if not found:
            raise DataError(f"{folder}: no images in this class folder ({', '.join(sorted(EXTENSIONS))}); remove it")
        files += [f"{folder.name}/{name}" for name in found]
        labels += [classes.index(folder.name)] * len(found)
    return ImageFolder(root, files, np.array(labels, dtype=np.int64), classes, arguments)


def _folders(root: Path) -> list[Path]:
    return sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in EXTENSIONS and not path.name.startswith(".") and path.is_file()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); replace or remove the file") from error
