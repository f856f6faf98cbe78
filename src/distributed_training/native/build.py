"""Building an extension from the source in the package: once for each torch, MPI and compiler, then kept.

    ~/.cache/distributed_training/native/
        objects/                      compiled sources by what they depend on: a change to one compiles only that
        mpi-openmpi-5.0.11-torch-.../ the extension, and facts.json on what it was built with

Processes of one host build one at a time, aside; a rename puts the result in place, so that nobody loads half of one.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from distributed_training.native.toolchain import INSTALL_MPI, Toolchain, find_mpicxx, identify, python_tag
from distributed_training.runtime.errors import BuildError, MissingDependencyError

logger = logging.getLogger(__name__)

MPI_SOURCE = Path(__file__).parent / "mpi"
DEADLINE = 900.0
"""Seconds that a build, or the wait for another process that builds, may take."""
_SHOWN = 12  # lines of a compiler's error
_KEPT = 3  # builds of older sources that stay
_OBJECTS_KEPT = 30 * 24 * 3600  # seconds
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_loaded: dict[Path, ModuleType] = {}


def load_extension(source: Path = MPI_SOURCE) -> ModuleType:
    """The extension made of the C++ files in a folder, built first where it is not yet."""
    if source not in _loaded:
        _loaded[source] = _import(find_built(source) or build(source))
    return _loaded[source]


def find_built(source: Path = MPI_SOURCE) -> Path | None:
    """The extension, if it is built for what is here; None if it has to be built.

    On a machine without a compiler one that was built elsewhere for the same torch and source is as good: homes of
    clusters are shared, and only some of their machines have compilers.
    """
    mpicxx = find_mpicxx()
    if mpicxx is not None:
        with suppress(MissingDependencyError):
            library = _Recipe(source, identify(mpicxx)).library
            return library if library.is_file() else None
    wanted = {"source": _fingerprint(_files(source)), "python": python_tag()}
    found = sorted(cache_folder().glob(f"{source.name}-*/facts.json"), key=lambda path: path.stat().st_mtime)
    for facts in reversed(found):
        said = json.loads(facts.read_text(encoding="utf-8"))
        if wanted.items() <= said.items():
            return facts.with_name(_library_name(source))
    return None


def build(source: Path = MPI_SOURCE, *, force: bool = False) -> Path:
    """Build the extension unless it is there; the path of its library. Other processes that want it wait."""
    mpicxx = find_mpicxx()
    if mpicxx is None:
        raise MissingDependencyError(
            f"the MPI backend is built from C++, but there is no mpicxx beside {sys.executable} or on PATH: "
            f"{INSTALL_MPI} (or set MPICXX to the one to use)"
        )
    recipe = _Recipe(source, identify(mpicxx))
    with _one_at_a_time(cache_folder() / f".lock-{platform.node()}"):
        if force or not recipe.library.is_file():
            _Build(recipe).run()
    return recipe.library


def cache_folder() -> Path:
    """Where builds are kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "distributed_training" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"{folder}: compiled code cannot be kept there ({error.strerror}); set XDG_CACHE_HOME to a folder that is "
            "yours"
        ) from None
    return folder


@dataclass(frozen=True)
class _Recipe:
    """All that an extension is made of."""

    source: Path
    tools: Toolchain

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What it is built with, for its name and for whoever looks."""
        tools = {name: str(value) for name, value in asdict(self.tools).items() if name != "environment"}
        flags = shlex.join([*self.tools.flags, *self.tools.link_flags])
        return {**tools, "python": python_tag(), "flags": flags, "source": _fingerprint(_files(self.source))}

    @property
    def label(self) -> str:
        """What builds of this folder for the same torch and MPI have in common."""
        return f"{self.source.name}-{self.tools.mpi}-{python_tag()}"

    @property
    def library(self) -> Path:
        """Where it is kept."""
        digest = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()
        return cache_folder() / f"{self.label}-{digest[:16]}" / _library_name(self.source)

    @property
    def sources(self) -> list[Path]:
        """The files to compile."""
        found = [path for path in _files(self.source) if path.suffix == ".cpp"]
        if not found:
            raise BuildError(f"{self.source}: no C++ files; the installation is not whole: install the package again")
        return found

    def compilation(self, source: Path) -> list[str]:
        """The command that compiles a file, without its output."""
        name = f"-DTORCH_EXTENSION_NAME={_module_name(self.source)}"
        return [str(self.tools.mpicxx), *self.tools.flags, name, "-c", str(source)]

    def object_of(self, source: Path) -> Path:
        """Where a compiled file is kept: the name changes with all that it depends on."""
        parts = [*self.tools.flags, str(self.tools.mpicxx), self.tools.compiler, self.tools.mpi, python_tag()]
        digest = hashlib.sha256("\0".join([*parts, _fingerprint(_with_includes(source))]).encode()).hexdigest()
        return cache_folder() / "objects" / f"{source.stem}-{digest[:24]}.o"


class _Build:
    def __init__(self, recipe: _Recipe) -> None:
        self._recipe = recipe
        self._end = time.monotonic() + DEADLINE

    def run(self) -> None:
        """Compile what has changed, link, and put the result in place."""
        recipe = self._recipe
        (cache_folder() / "objects").mkdir(exist_ok=True)
        objects = {source: recipe.object_of(source) for source in recipe.sources}
        wanted = [source for source, path in objects.items() if not path.is_file()]
        logger.info("building the MPI backend for %s (%d files; once, a few minutes) ...", recipe.label, len(wanted))
        with ThreadPoolExecutor(self._jobs(len(wanted))) as pool:
            list(pool.map(lambda source: self._compile(source, objects[source]), wanted))
        folder = recipe.library.parent
        with tempfile.TemporaryDirectory(prefix=".building-", dir=cache_folder()) as aside:
            ready = Path(aside) / "ready"
            ready.mkdir()
            command = [str(recipe.tools.mpicxx), *map(str, objects.values()), *recipe.tools.link_flags]
            self._run(command, ready / recipe.library.name)
            (ready / "facts.json").write_text(json.dumps(recipe.facts, indent=2) + "\n", encoding="utf-8")
            if folder.exists():  # another host of the same home, or built by force: out of the way in one rename too
                os.rename(folder, Path(aside) / "old")
            os.rename(ready, folder)
        self._prune(objects)

    def _jobs(self, files: int) -> int:
        """Each takes a core and up to 2 GB. MAX_JOBS is what torch's own builds are limited by."""
        most = os.environ.get("MAX_JOBS", "")
        return max(1, min(files, int(most) if most.isdigit() else len(os.sched_getaffinity(0))))

    def _compile(self, source: Path, output: Path) -> None:
        self._run(self._recipe.compilation(source), output)
        if self._recipe.object_of(source) != output:
            output.unlink()
            raise BuildError(f"{source} was changed while it was compiled: build it again")

    def _run(self, command: list[str], output: Path) -> None:
        """Run a compiler; its output appears whole or not at all."""
        part = output.with_name(f".{os.getpid()}-{output.name}")
        nice = ["nice", "-n", "5"] if shutil.which("nice") else []
        environment = {**os.environ, **dict(self._recipe.tools.environment)}
        try:
            done = subprocess.run(
                [*nice, *command, "-o", str(part)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(1.0, self._end - time.monotonic()),
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            part.unlink(missing_ok=True)
            raise BuildError(f"{command[0]} was not done after {DEADLINE:g} s; is this machine overloaded?") from None
        if done.returncode:
            part.unlink(missing_ok=True)
            raise self._failed(command, done.stdout.decode(errors="replace"))
        os.replace(part, output)

    def _failed(self, command: list[str], said: str) -> BuildError:
        log = cache_folder() / "failed.log"
        log.write_text(f"{shlex.join(command)}\n{said}", encoding="utf-8")
        lines = said.splitlines()
        first = next((i for i, line in enumerate(lines) if re.search(r"\b(error|undefined|cannot)\b", line)), 0)
        shown = "\n    ".join(lines[first : first + _SHOWN]) or "it said nothing"
        return BuildError(
            f"the MPI backend does not compile with {self._recipe.tools.compiler} ({command[0]}); the whole is in "
            f"{log}:\n    {shown}"
        )

    def _prune(self, objects: dict[Path, Path]) -> None:
        """Objects that nobody has used for long, and builds of sources that are gone."""
        limit = time.time() - _OBJECTS_KEPT
        for path in (cache_folder() / "objects").iterdir():
            if path not in objects.values() and path.stat().st_mtime < limit:
                path.unlink(missing_ok=True)
        builds = sorted(cache_folder().glob(f"{self._recipe.label}-*"), key=lambda path: path.stat().st_mtime)
        for path in builds[: -_KEPT - 1]:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Around a build: one process of a host builds, the others wait, and the system frees the lock of one that dies."""
    end = time.monotonic() + DEADLINE
    with lock.open("a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    file.seek(0)
                    raise BuildError(
                        f"process {file.read().strip() or 'unknown'} has been building for more than {DEADLINE:g} s "
                        f"({lock}); end it, and try `dtrain native build`"
                    ) from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _import(library: Path) -> ModuleType:
    name = library.name.partition(".")[0]
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"{library} was built but cannot be loaded: {error}; build it again: dtrain native build --force"
        ) from None
    return module


def _module_name(source: Path) -> str:
    return f"dtrain_{source.name}"


def _library_name(source: Path) -> str:
    return f"{_module_name(source)}.so"


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.suffix in (".cpp", ".h"))


def _with_includes(source: Path) -> list[Path]:
    """A file and those of its folder that it includes, directly or not."""
    found, left = {source}, [source]
    while left:
        for name in _INCLUDE.findall(left.pop().read_text(encoding="utf-8")):
            path = source.parent / name
            if path.is_file() and path not in found:
                found.add(path)
                left.append(path)
    return sorted(found)


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
