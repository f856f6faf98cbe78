"""CIFAR-10 and CIFAR-100 from their official binary archives: found in `data.root`, or else downloaded there.

A record is one label byte (CIFAR-100: coarse, then fine) and 3,072 bytes of a 32x32 image, colour planes first. Records
are read straight from the archive; nothing is ever unpacked to disk.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from distributed_training.config.schema import DataConfig
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import Splits
from distributed_training.data.sources.arguments import read_arguments
from distributed_training.data.sources.download import download
from distributed_training.runtime.errors import DataError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Archive:
    """What is fixed about one of the two datasets."""

    file: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: str
    label_classes: tuple[int, ...]
    """Number of classes of each label byte of a record."""

    @property
    def url(self) -> str:
        """Where the authors publish it."""
        return f"https://www.cs.toronto.edu/~kriz/{self.file}"


ARCHIVES = {
    "cifar10": Archive(
        file="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        label_classes=(10,),
    ),
    "cifar100": Archive(
        file="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        label_classes=(20, 100),
    ),
}


@dataclass(kw_only=True)
class Cifar10Arguments:
    """`data.args` of cifar10."""

    url: str | None = None
    """Another place to download the archive from."""
    md5: str | None = None
    """Checksum of the archive at `url`, where it is not the official one."""


@dataclass(kw_only=True)
class Cifar100Arguments(Cifar10Arguments):
    """`data.args` of cifar100."""

    coarse: bool = False
    """Predict the 20 coarse classes instead of the 100 fine ones."""


def load(config: DataConfig) -> Splits:
    """Images uint8 [3, 32, 32] and int64 labels; the official test set is the validation part."""
    archive = ARCHIVES[config.dataset]
    arguments = read_arguments(Cifar100Arguments if config.dataset == "cifar100" else Cifar10Arguments, config)
    coarse = isinstance(arguments, Cifar100Arguments) and arguments.coarse
    label_byte = 0 if coarse else len(archive.label_classes) - 1
    files = _read(Path(config.root), archive, arguments)

    def dataset(names: tuple[str, ...]) -> ArrayDataset:
        records = np.concatenate([_records(files[name], archive, name, config.root) for name in names])
        images = np.ascontiguousarray(records[:, len(archive.label_classes) :]).reshape(-1, 3, 32, 32)
        labels = records[:, label_byte].astype(np.int64)
        return ArrayDataset((images, labels), num_classes=archive.label_classes[label_byte], name=config.dataset)

    return Splits(dataset(archive.train), dataset((archive.test,)))


def _read(root: Path, archive: Archive, arguments: Cifar10Arguments) -> dict[str, bytes]:
    """The .bin files as bytes: extracted ones, those of an archive, or those of a download, in this order."""
    names = (*archive.train, archive.test)
    for folder in (root / archive.folder, root):
        found = [name for name in names if (folder / name).is_file()]
        if len(found) == len(names):
            return {name: (folder / name).read_bytes() for name in names}
        if found:
            missing = ", ".join(sorted(set(names) - set(found)))
            raise DataError(f"{folder}: {missing} missing; extract {archive.file} again or remove the folder")
    path = root if root.is_file() else root / archive.file
    if not path.exists():
        download(arguments.url or archive.url, path, arguments.md5 or archive.md5)
    return _read_archive(path, names)


def _read_archive(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                stream = tar.extractfile(member) if name in names and member.isfile() else None
                if stream is not None:
                    files[name] = stream.read()
            while unpacked.read(1 << 20):  # to the very end, where gzip keeps the checksum of it all
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: damaged or truncated archive ({error}); remove it to download it again") from error
    missing = [name for name in names if name not in files]
    if missing:
        raise DataError(f"{path}: not the right archive, {', '.join(missing)} missing; remove it to download it again")
    return files


def _records(data: bytes, archive: Archive, name: str, root: str) -> np.ndarray:
    """The records of one file as uint8 [records, record length], sizes and labels checked."""
    place = f"{name} of {archive.file} in {root}"
    length = len(archive.label_classes) + PIXELS
    if len(data) == 0 or len(data) % length:
        raise DataError(f"{place}: {len(data)} bytes are no whole number of {length}-byte records; it is truncated")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, length)
    for byte, classes in enumerate(archive.label_classes):
        bad = np.flatnonzero(records[:, byte] >= classes)
        if len(bad):
            row = int(bad[0])
            raise DataError(
                f"{place}, record {row}: label {records[row, byte]} is not in 0..{classes - 1}; it is damaged"
            )
    return records
