"""The beginning of a stream, kept on disk: what makes a training on it repeatable.

A stream has no sample numbers, so no plan can say which samples make up a step, no rank can take its share without
reading all the others', and a resume can only read past what it has seen. The first so many samples written to Arrow
files have none of that, are read from the network once, and take the disk space that the user named.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed_training.data.text.settings import LoadSettings
from distributed_training.data.text.turns import in_turn
from distributed_training.runtime.errors import DataError


def kept_on_disk(stream: Any, settings: LoadSettings, split: str, where: str) -> Any:
    """The first `settings.samples` of a stream, from disk if they were read before."""
    import datasets

    assert settings.samples is not None
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "dtrain-streams" / _key(settings, split, where)
    with in_turn(folder):
        if not folder.exists():
            _write(stream, settings.samples, folder, where)
        kept = datasets.load_from_disk(str(folder))
    return kept


def _key(settings: LoadSettings, split: str, where: str) -> str:
    facts = [where, settings.subset, settings.revision, settings.format, settings.options, split, settings.samples]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _write(stream: Any, samples: int, folder: Path, where: str) -> None:
    import datasets

    aside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        made = datasets.Dataset.from_generator(
            _Samples(stream, samples), features=stream.features, cache_dir=str(aside / "cache")
        )
        made.save_to_disk(str(aside / "kept"))
        del made
        (aside / "kept").rename(folder)
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{where}: the stream broke off: {error.__cause__ or error}; try again") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _Samples:
    """The first samples, as a function that the library calls."""

    def __init__(self, stream: Any, samples: int) -> None:
        self._stream, self._samples = stream, samples

    def __call__(self) -> Iterator[Any]:
        yield from self._stream.take(self._samples)

    def __reduce__(self) -> Any:  # hashed by the library for its cache, which is thrown away
        return (str, (uuid.uuid4().hex,))
