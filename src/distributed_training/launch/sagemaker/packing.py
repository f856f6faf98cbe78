"""The source that travels to the job: the files of this folder and our own package, in one archive.

What git ignores stays here, and so do secrets, earlier runs and caches. The archive is the same, byte for byte, for
the same files.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import distributed_training
from distributed_training.config.errors import ConfigError
from distributed_training.launch.sagemaker.leaks import is_secret_file, refuse_secrets_in_files
from distributed_training.launch.sagemaker.starting import FOLDER, START

_NEVER = {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".ipynb_checkpoints", ".idea", FOLDER}
_NEVER |= {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".cache", "wandb"}
_GIT_TIME = 60  # seconds


@dataclass(frozen=True)
class Source:
    """What is packed, and what was left here on purpose."""

    root: Path
    files: tuple[Path, ...]
    """Relative to `root`."""
    left_here: tuple[Path, ...]
    """Files that git does not ignore but that do not travel: secrets, and links that lead out of the folder."""
    requirements: str

    @property
    def size(self) -> int:
        """Bytes of the user's files."""
        return sum((self.root / file).stat().st_size for file in self.files)


def find_source(
    root: Path, requirements: str, exclude: Sequence[str], runs: Path, max_mb: int, named: Sequence[Path] = ()
) -> Source:
    """The files to pack; `named` ones too if git ignores them. An error where they are too large, or hold secrets."""
    files = [_inside(root, path) for path in named]
    left: list[Path] = []
    for file in _candidates(root):
        if any(part in _NEVER for part in file.parts) or _is_below(root / file, runs):
            continue
        if any(fnmatch(str(file), pattern) or fnmatch(file.name, pattern) for pattern in exclude):
            continue
        if file in files:
            continue
        outside = not (root / file).resolve().is_relative_to(root.resolve())
        (left if outside or is_secret_file(file) else files).append(file)
    source = Source(root, tuple(sorted(files)), tuple(sorted(left)), requirements)
    if source.size > max_mb * 1_000_000:
        raise _too_large(source, max_mb)
    refuse_secrets_in_files(root, source.files)
    return source


def write_archive(source: Source, path: Path) -> None:
    """Write the archive."""
    package = Path(distributed_training.__file__).parent
    with (
        path.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for file in source.files:
            _add(archive, source.root / file, str(file))
        for file in sorted(_package_files(package)):
            _add(archive, package / file, f"{FOLDER}/{package.name}/{file}")
        for name, text in (("start.sh", START), ("requirements.txt", source.requirements)):
            content = text.encode()
            entry = tarfile.TarInfo(f"{FOLDER}/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    status = path.stat()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
    with path.open("rb") as content:
        archive.addfile(entry, content)


def _package_files(package: Path) -> Iterator[Path]:
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            yield path.relative_to(package)


def _candidates(root: Path) -> list[Path]:
    """All files of a folder that git does not ignore, whether or not it is a repository."""
    if shutil.which("git") is None:
        if any(root.glob("**/.gitignore")):
            raise ConfigError(
                f"{root}: it has a .gitignore, and git, which reads it, is not installed here; install git, so that "
                "nothing is uploaded that you ignore"
            )
        found = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
        return [path.relative_to(root) for path in found if path.is_file()]
    if _git(root, "rev-parse", "--is-inside-work-tree").returncode == 0:
        listed = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", ".")
    else:
        with tempfile.TemporaryDirectory(prefix="dtrain-git-") as empty:
            _git(Path(empty), "init", "--quiet", "--bare", ".")
            place = (f"--git-dir={empty}", f"--work-tree={root}")
            listed = _git(root, *place, "ls-files", "--others", "--exclude-standard", "-z", ".")
    if listed.returncode:
        raise ConfigError(f"{root}: git cannot list its files: {listed.stderr.decode(errors='replace').strip()}")
    found = [Path(os.fsdecode(name)) for name in dict.fromkeys(listed.stdout.split(b"\0")) if name]
    return [path for path in found if (root / path).is_file()]


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, timeout=_GIT_TIME)


def _inside(root: Path, path: Path) -> Path:
    place = (root / path).resolve()
    if not place.is_file():
        raise ConfigError(f"{path}: no such file here in {root}")
    if not place.is_relative_to(root.resolve()):
        raise ConfigError(f"{path}: it lies outside of {root}, which is packed; start from a folder that holds it")
    return place.relative_to(root.resolve())


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _too_large(source: Source, max_mb: int) -> ConfigError:
    sizes = sorted(((source.root / file).stat().st_size, str(file)) for file in source.files)[::-1]
    largest = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for size, name in sizes[:3])
    return ConfigError(
        f"{source.root}: {source.size / 1e6:.0f} MB would be packed, and sagemaker.max_source_mb allows {max_mb}. The "
        f"largest files: {largest}. Put data into S3 (--data s3://...), add to .gitignore or sagemaker.exclude what "
        "the job does not need, or raise the limit"
    )
