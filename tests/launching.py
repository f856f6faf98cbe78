"""Starting real jobs of several processes from a test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    """One thread a process: the ranks share two cores."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_CORE"))}
    return {**own, "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def scratch() -> Iterator[str]:
    """A folder for what launchers leave behind in the temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        yield folder


def run_ranks(
    ranks: int, command: list[str], *, timeout: float = 240, check: bool = True, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in every rank under torchrun."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]
    module = command[1:] if command[0] == "-m" else None
    program = ["-m", *module] if module is not None else command
    with scratch() as folder:
        done = subprocess.run(
            [sys.executable, *launcher, *program],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env=environment(TMPDIR=folder, **variables),
        )
    if check:
        assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-6000:]}"
    return done


def run_horovod(
    ranks: int, command: list[str], *, timeout: float = 240, check: bool = True, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in every rank under horovodrun."""
    with scratch() as folder:
        done = subprocess.run(
            [*horovodrun(ranks), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env=environment(TMPDIR=folder, **variables),
        )
    if check:
        assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-6000:]}"
    return done


def horovodrun(ranks: int) -> list[str]:
    """The beginning of a command line that runs this Python in every rank under horovodrun."""
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks), sys.executable]
