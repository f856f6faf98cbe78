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
from typing import Any

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


def run_ranks(ranks: int, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in every rank under torchrun; `options` are those of `run`."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]
    return run([sys.executable, *launcher, *command], **options)


def run_horovod(ranks: int, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in every rank under horovodrun; `options` are those of `run`."""
    return run([*horovodrun(ranks), *command], **options)


def run(
    command: list[str], *, timeout: float = 240, check: bool = True, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, with these environment variables."""
    with scratch() as folder:
        own = environment(TMPDIR=folder, **variables)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=own)
    if check:
        assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-6000:]}"
    return done


def horovodrun(ranks: int) -> list[str]:
    """The beginning of a command line that runs this Python in every rank under horovodrun."""
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks), sys.executable]
