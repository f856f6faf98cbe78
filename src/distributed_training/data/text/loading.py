"""Samples from the Hub, from files or from a folder of `save_to_disk`, as splits of the `datasets` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distributed_training.config.check import did_you_mean
from distributed_training.data.text.quiet import quiet_unless_watched
from distributed_training.data.text.settings import LoadSettings
from distributed_training.data.text.streams import kept_on_disk
from distributed_training.runtime.errors import ConfigError, DataError, DistributedTrainingError
from distributed_training.runtime.hub import hub_errors, hub_token, without_token
from distributed_training.runtime.imports import require

_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".arrow": "arrow",
}
_HELD_OUT = ("validation", "val", "valid", "dev", "test")
_PURPOSE = "data.dataset=huggingface"


def load_splits(settings: LoadSettings, root: str | Path | None = None) -> tuple[Any, Any]:
    """What to train on and what to validate on (None: nothing was held out), as `datasets.Dataset`s."""
    splits, where = load_all(settings, root)
    held_out = settings.validation_split
    if held_out is None and not _overlaps(settings.split):
        held_out = next((name for name in _HELD_OUT if name in splits and name != settings.split), None)
    train = take(splits, settings.split, where, "data.args.split", settings)
    if held_out is None:
        return train, None
    return train, take(splits, held_out, where, "data.args.validation_split", settings)


def load_all(settings: LoadSettings, root: str | Path | None = None) -> tuple[dict[str, Any], str]:
    """Every split by name, not yet cut, and how errors call the whole."""
    require("datasets", "hf", _PURPOSE)
    if settings.name is None and root is None:
        raise ConfigError("say which data: data.args.name for a dataset on the Hub, or data.root for files")
    where = f"data.args.name={settings.name}" if settings.name is not None else str(root)
    if settings.name is not None and settings.subset is not None:
        where += f" ({settings.subset})"
    with _said_plainly(where, settings):
        found = _from_hub(settings) if settings.name is not None else _from_files(Path(str(root)), settings)
    splits = dict(found) if hasattr(found, "keys") else {"train": found}
    if not splits:
        raise DataError(f"{where}: holds no split")
    return splits, where


def take(splits: dict[str, Any], wanted: str, where: str, key: str, settings: LoadSettings) -> Any:
    """A split, a part of one (`train[:80%]`) or a sum of them; of a stream, what is kept of it on disk."""
    for name in re.findall(r"(?:^|\+)\s*([^\[+]+)", wanted):
        if name.strip() not in splits:
            hint = did_you_mean(name.strip(), splits)
            raise DataError(f"{key}={wanted}: {where} has the splits {', '.join(splits)}, not {name.strip()!r}{hint}")
    if settings.streaming:
        dataset = _streamed(splits, wanted, where, settings)
    else:
        dataset = splits[wanted] if wanted in splits else _cut(splits, wanted, where, key)
        if settings.samples is not None and settings.samples < len(dataset):
            dataset = dataset.select(range(settings.samples))
    if len(dataset) == 0:
        raise DataError(f"{key}={wanted}: this split of {where} holds no samples")
    return dataset


def _cut(splits: dict[str, Any], wanted: str, where: str, key: str) -> Any:
    """Ranges of splits, put one behind the other. The library's own notation, for data on disk too."""
    from datasets import ReadInstruction, concatenate_datasets

    try:
        ranges = ReadInstruction.from_spec(wanted).to_absolute({name: len(one) for name, one in splits.items()})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{key}={wanted} of {where}: {' '.join(str(error).split())}") from None
    parts = []
    for one in ranges:
        whole = splits[one.splitname]
        begin, end = one.from_ or 0, len(whole) if one.to is None else one.to
        parts.append(whole if (begin, end) == (0, len(whole)) else whole.select(range(begin, end)))
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _streamed(splits: dict[str, Any], wanted: str, where: str, settings: LoadSettings) -> Any:
    if settings.samples is None:
        raise ConfigError(
            f"data.args.streaming=true of {where}: a training is a function of its settings, so say how much of the "
            "stream it is on: data.args.samples (these are kept on disk, and every epoch, rank and resume reads them)"
        )
    if wanted not in splits:
        raise ConfigError(f"{where} is streamed: {wanted} must be one split, of which data.args.samples are taken")
    with _said_plainly(where, settings):
        return kept_on_disk(splits[wanted], settings, wanted, where)


def _from_hub(settings: LoadSettings) -> Any:
    import datasets

    return datasets.load_dataset(
        settings.name,
        settings.subset,
        revision=settings.revision,
        streaming=settings.streaming,
        token=hub_token(),
        **settings.options,
    )


def _from_files(root: Path, settings: LoadSettings) -> Any:
    import datasets

    if not root.exists():
        raise DataError(f"{root}: no such file or folder; set data.root, or data.args.name for a dataset on the Hub")
    if settings.subset is not None or settings.revision is not None:
        raise ConfigError(f"data.args.subset and data.args.revision are for datasets on the Hub; {root} has none")
    if (root / "dataset_dict.json").is_file() or (root / "state.json").is_file():
        return datasets.load_from_disk(str(root))
    streaming = settings.streaming
    if root.is_file():
        kind = settings.format or _SUFFIXES.get(_suffix(root))
        if kind is None:
            raise DataError(f"{root}: unknown kind of file; set data.args.format to csv, json, parquet, text or arrow")
        options = {"delimiter": "\t"} if _suffix(root) == ".tsv" else {}
        return datasets.load_dataset(kind, data_files=str(root), streaming=streaming, **options, **settings.options)
    if settings.format is None:
        return datasets.load_dataset(str(root), streaming=streaming, **settings.options)
    return datasets.load_dataset(settings.format, data_dir=str(root), streaming=streaming, **settings.options)


def _suffix(path: Path) -> str:
    """The suffix that tells the kind, without that of a compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".bz2", ".xz", ".zst"):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _overlaps(split: str) -> bool:
    """Whether the training uses held-out splits by name: nothing is chosen for validation then."""
    return any(re.search(rf"(^|\+){name}\b", split) for name in _HELD_OUT)


@contextmanager
def _said_plainly(where: str, settings: LoadSettings) -> Iterator[None]:
    """What the library says about data that it cannot get, in one line with the setting in front."""
    try:
        with quiet_unless_watched(), hub_errors(where, DataError):
            yield
    except DistributedTrainingError:
        raise
    except Exception as error:
        text = without_token(" ".join(str(error).split())[:500])
        if type(error).__name__ == "DatasetNotFoundError":
            raise DataError(_not_found(where, text)) from None
        if "BuilderConfig" in text or "Config name is missing" in text:
            raise ConfigError(f"data.args.subset={settings.subset}: {text}") from None
        cause = error.__cause__
        if cause is not None and type(error).__name__ == "DatasetGenerationError":
            text = without_token(f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}")
        raise DataError(f"{where}: cannot be read: {text}") from error


def _not_found(where: str, text: str) -> str:
    if "gated" in text.lower():
        return f"{where}: its owner wants to be asked first: accept the conditions on its page, then set HF_TOKEN"
    if "offline" in text.lower() or "Couldn't reach" in text:
        return (
            f"{where}: not in the cache here, and the Hub is not asked or not reached (HF_HUB_OFFLINE); "
            "unset it or mend the network, or give files on disk with data.root"
        )
    return (
        f"{where}: the Hub has no such dataset, or it is private; check the name, and for a private one set HF_TOKEN "
        "in the environment or in .env"
    )
