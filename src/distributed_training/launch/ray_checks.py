"""What every node of a Ray cluster must find: our package, the working directory, the same files, one run.root."""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training._version import __version__
from distributed_training.launch.ray_cluster import Node
from distributed_training.runtime.errors import ConfigError, RanksError, RunDirectoryError

_ANSWER = 120.0  # seconds that a node has to start a process and look
_TOKEN = ".shared-"


@dataclass(frozen=True)
class Wanted:
    """What a job needs on its nodes."""

    directory: Path
    """Working directory."""
    files: Sequence[Path] = ()
    """Files that it reads: a config, a script."""
    root: Path | None = None
    """Where its run directory goes, which all nodes must share; None: not known."""


def check_nodes(ray: Any, nodes: Sequence[Node], wanted: Wanted) -> None:
    """Look at every node before anything starts.

    Raises:
        RanksError: our package is not there, in another version, or with another Python.
        ConfigError: a file is missing or different.
        RunDirectoryError: run.root is not the same folder everywhere.
    """
    files = {str(path.absolute()): hashlib.sha256(path.read_bytes()).hexdigest() for path in wanted.files}
    folder = str(wanted.directory.absolute())
    root = str((wanted.directory / wanted.root).absolute()) if wanted.root is not None else None
    token = f"{_TOKEN}{uuid.uuid4().hex}"
    if root is not None:
        _put(Path(root), token)
    try:
        found = _ask(ray, nodes, (folder, list(files), root, token))
    finally:
        if root is not None:
            (Path(root) / token).unlink(missing_ok=True)
    for node, facts in zip(nodes, found):
        _judge(node, facts, folder, files, root)


def _put(root: Path, token: str) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / token).write_text("All nodes of a Ray cluster must see this.\n", encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(
            f"{root}: cannot be written ({error.strerror}); choose another folder with run.root=FOLDER"
        ) from None


def _ask(ray: Any, nodes: Sequence[Node], question: tuple[Any, ...]) -> list[dict[str, Any]]:
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(_by_value())
    calls = [
        look.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(*question)
        for node in nodes
    ]
    answers = []
    for node, call in zip(nodes, calls):
        try:
            answers.append(ray.get(call, timeout=_ANSWER))
        except GetTimeoutError:
            raise RanksError(f"node {node.address} of the Ray cluster started nothing within {_ANSWER:g} s") from None
        except RayError as error:
            reason = " ".join(str(error).split())[:300]
            raise RanksError(f"node {node.address} of the Ray cluster cannot be used: {reason}") from None
    return answers


def _by_value() -> Callable[..., dict[str, Any]]:
    """A function that a node can run that has not got our package: it is sent as a whole, not by its name."""

    def look(folder: str, files: list[str], root: str | None, token: str) -> dict[str, Any]:
        import hashlib
        import os
        import subprocess
        import sys

        def digest(path: str) -> str:
            try:
                with open(path, "rb") as file:
                    return hashlib.sha256(file.read()).hexdigest()
            except OSError as error:
                return f"cannot be read: {error.strerror}"

        facts: dict[str, Any] = {
            "python": sys.executable,
            "folder": os.path.isdir(folder),
            "files": {path: digest(path) for path in files},
            "shared": root is None or os.path.isfile(os.path.join(root, token)),
        }
        # As a rank will do it: in a fresh process, in that folder.
        code = "from distributed_training._version import __version__; print(__version__)"
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=folder if facts["folder"] else None, capture_output=True, text=True, timeout=60
        )
        facts["version"] = done.stdout.strip()
        return facts

    return look


def _judge(node: Node, facts: dict[str, Any], folder: str, files: dict[str, str], root: str | None) -> None:
    where = f"node {node.address} of the Ray cluster"
    shared = "all nodes must see the same storage (NFS, EFS, ...) under the same path"
    if not facts["folder"]:
        raise ConfigError(f"{where} has no folder {folder}, the working directory of the ranks: {shared}")
    for path, digest in files.items():
        there = facts["files"][path]
        if there != digest:
            problem = there if there.startswith("cannot") else "has other contents than here"
            raise ConfigError(f"{path}: {problem} on {where}; {shared}, or copy the file there")
    if facts["version"] != __version__:
        found = f"version {facts['version']}" if facts["version"] else "none"
        raise RanksError(
            f"{where} needs distributed_training {__version__} as here, but {facts['python']} there has {found}: "
            f"install it there, for Python {sys.version_info.major}.{sys.version_info.minor}"
        )
    if not facts["shared"]:
        raise RunDirectoryError(
            f"run.root={root} is not shared: {where} does not see what was written there from here. Restarts go on "
            f"from checkpoints in it, whichever nodes they run on: {shared}; choose such a folder with run.root=FOLDER"
        )
