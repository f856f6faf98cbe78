"""A checkpoint on disk: a folder with `state.safetensors` and `manifest.json`, committed by one rename.

Everything is written into a folder of another name and synced to the disk; only then is that folder renamed. A reader
never sees half a checkpoint, and whatever happens afterwards shows in the hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from distributed_training.checkpoint.staging import Staging
from distributed_training.checkpoint.tree import put_together
from distributed_training.runtime.errors import CheckpointError

FORMAT = 1
STATE_FILE, MANIFEST_FILE = "state.safetensors", "manifest.json"
UNFINISHED, REPLACED = ".writing-", ".replaced-"
_MANIFEST_KEYS = {"format", "step", "epoch", "metrics", "files", "state"}
_CHUNK = 8 * 2**20


@dataclass(frozen=True)
class CheckpointInfo:
    """What is known of a checkpoint without reading its tensors."""

    path: Path
    step: int
    """Global step: optimizer steps taken so far."""
    epoch: int
    metrics: Mapping[str, float]


def checkpoint_name(step: int) -> str:
    """Folder name, sortable by step."""
    return f"step-{step:010d}"


def write_checkpoint(
    folder: Path, staging: Staging, description: Any, *, step: int, epoch: int, metrics: Mapping[str, float]
) -> CheckpointInfo:
    """Write what is staged and commit it. On any failure nothing is left behind and older checkpoints are untouched."""
    final = folder / checkpoint_name(step)
    aside = folder / f"{UNFINISHED}{final.name}-{os.getpid()}"
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a killed process: in a container every start has the same number
        aside.mkdir(parents=True)
        size, digest = _write_hashed(aside / STATE_FILE, staging.parts())
        manifest = {
            "format": FORMAT,
            "step": step,
            "epoch": epoch,
            "metrics": {name: float(value) for name, value in metrics.items()},
            "time": time.time(),
            "files": {STATE_FILE: {"size": size, "sha256": digest}},
            "state": description,
        }
        _write_hashed(aside / MANIFEST_FILE, [memoryview(_seal(manifest))])
        _sync_folder(aside)
        _commit(aside, final)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{final}: not saved ({error.strerror or error}); earlier checkpoints are intact. "
            "Free some space or choose another run.root, then continue with --resume auto"
        ) from error
    return CheckpointInfo(final, step, epoch, dict(metrics))


def read_info(path: Path) -> CheckpointInfo:
    """A checkpoint's step, epoch and metrics."""
    manifest = _read_manifest(path)
    return CheckpointInfo(path, manifest["step"], manifest["epoch"], manifest["metrics"])


def verify(path: Path) -> None:
    """Read every byte and compare with the hashes, or raise CheckpointError saying what is wrong."""
    for name, expected in _read_manifest(path)["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
            if size != expected["size"]:
                raise CheckpointError(f"{file}: damaged: {size} bytes instead of {expected['size']}")
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
        if digest != expected["sha256"]:
            raise CheckpointError(f"{file}: damaged: its content does not match its hash")


def listed_files(path: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file of a checkpoint, as its manifest has them. There is one: no other is known."""
    try:
        files = {name: (file["size"], file["sha256"]) for name, file in _read_manifest(path)["files"].items()}
        size, digest = files[STATE_FILE]
        if len(files) > 1 or type(size) is not int or size < 0 or len(bytes.fromhex(digest)) != 32:
            raise ValueError(f"it lists {', '.join(files)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST_FILE}: damaged: {error}") from None
    return files


def read_plain(path: Path, key: str) -> Any:
    """A part of a checkpoint's state that holds no tensors, such as its config, without reading any tensor."""
    try:
        return put_together(_read_manifest(path)["state"][key], {})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint by its name (`model/...`), without reading it."""
    try:
        with safe_open(path / STATE_FILE, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def adopt(aside: Path, final: Path) -> CheckpointInfo:
    """Commit a checkpoint that was brought here, its tensors compared with their hash already.

    The manifest is looked at as if anybody had written it. CheckpointError where it is none, or of another step.
    """
    size, _ = listed_files(aside)[STATE_FILE]
    info = read_info(aside)
    metrics = info.metrics if isinstance(info.metrics, dict) else {"": None}
    plain = type(info.step) is type(info.epoch) is int and all(type(value) is float for value in metrics.values())
    if not plain or final.name != checkpoint_name(info.step) or (aside / STATE_FILE).stat().st_size != size:
        raise CheckpointError(f"{final}: what came under this name is a checkpoint of step {str(info.step)[:20]}")
    final.parent.mkdir(parents=True, exist_ok=True)
    _sync_folder(aside)
    _commit(aside, final)
    return CheckpointInfo(final, info.step, info.epoch, info.metrics)


def read_state(path: Path) -> Any:
    """The state in a checkpoint, tensors on the CPU. Verified first."""
    verify(path)
    try:
        with safe_open(path / STATE_FILE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return put_together(_read_manifest(path)["state"], tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def _write_hashed(path: Path, parts: Sequence[memoryview]) -> tuple[int, str]:
    """Write and sync a file, hashing in a second thread meanwhile: both release the interpreter lock."""
    digest = hashlib.sha256()

    def hash_all() -> None:
        for part in parts:
            digest.update(part)

    hasher = threading.Thread(target=hash_all, name="checkpoint-hasher")
    hasher.start()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for part in parts:
                start = 0
                while start < len(part):
                    start += os.write(descriptor, part[start : start + _CHUNK])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        hasher.join()
    return sum(len(part) for part in parts), digest.hexdigest()


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """The manifest with a hash of itself, so that a flipped bit in it shows."""
    body = json.dumps(manifest, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": json.loads(body)}).encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        sealed = json.loads(file.read_bytes())
        body = json.dumps(sealed["manifest"], sort_keys=True)
        if hashlib.sha256(body.encode()).hexdigest() != sealed["sha256"]:
            raise CheckpointError(f"{file}: damaged: its content does not match its hash")
    except OSError as error:
        raise CheckpointError(f"{path}: not a checkpoint ({MANIFEST_FILE}: {error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file}: damaged: not a manifest") from None
    manifest: dict[str, Any] = sealed["manifest"]
    if not isinstance(manifest, dict) or not manifest.keys() >= _MANIFEST_KEYS:
        raise CheckpointError(f"{file}: damaged: not a manifest")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path}: written in format {manifest['format']}, this version reads format {FORMAT}")
    return manifest


def _commit(aside: Path, final: Path) -> None:
    replaced = _out_of_sight(final)
    if final.exists():  # a damaged one of the same step that the run has come past again
        final.rename(replaced)
    aside.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, out of sight first: whoever looks meanwhile sees it whole or not at all."""
    try:
        path.rename(replaced := _out_of_sight(path))
    except OSError:
        return
    shutil.rmtree(replaced, ignore_errors=True)


def _out_of_sight(path: Path) -> Path:
    """A free name beside a checkpoint, under which nobody looks for one."""
    replaced = path.with_name(f"{REPLACED}{path.name}-{os.getpid()}")
    shutil.rmtree(replaced, ignore_errors=True)
    return replaced


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
