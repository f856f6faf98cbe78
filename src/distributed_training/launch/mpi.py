"""Ranks under mpirun: `dtrain launch --mpi --hostfile hosts.txt -- train config.yaml strategy=mpi`.

mpirun starts them and ends them together. This process finds the mpirun that belongs to the backend, gives it what it
needs in its own spelling (Open MPI 4 and 5, MPICH and its kin), passes signals on, and has the last word: the error of
the rank that failed first, and its exit code.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from distributed_training.config.errors import ConfigError
from distributed_training.launch.mpi_rank import MARK, STOP
from distributed_training.launch.report import Outcome, of_mpi_signal, with_trace
from distributed_training.launch.ssh import Place, forwarded
from distributed_training.native.toolchain import INSTALL_MPI, find_mpirun
from distributed_training.runtime.errors import MissingDependencyError
from distributed_training.runtime.signals import ENDING, end_with_parent, handled_by
from distributed_training.runtime.watch import HUNG

_SAVING = 60.0  # seconds that ranks have for their last checkpoint after Ctrl-C or SIGTERM
_ENDING = 15.0  # seconds that mpirun has to end its ranks
_ASKING = 60.0  # seconds that mpirun has to say which one it is
# How Open MPI and MPICH say that a rank was ended by a signal; MPICH does not know its number.
_KILLED = (
    re.compile(r"(?P<rank>rank \d+) with PID (?P<pid>\d+) on node (?P<host>\S+) exited on\s+signal (?P<signal>\d+)"),
    re.compile(r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)(?s:.*)EXIT STRING: .*\(signal (?P<signal>\d+)\)"),
)
_REMEMBERED = 12  # lines: mpirun says such things over several
_HOST = re.compile(
    r"(?P<host>[^\s:=#]+)(?::(?P<count>\d+))?(?:\s+slots\s*=\s*(?P<slots>\d+))?"
    r"(?:\s+(?!slots\b)\w+\s*=\s*\S+)*"  # other words, which are mpirun's
)


@dataclass(frozen=True)
class Job:
    """What mpirun is to start."""

    program: list[str]
    """Arguments of Python."""
    places: list[Place]
    """Machines and their numbers of ranks; empty: this machine alone."""
    nproc: int = 1
    """Ranks of this machine, where it is alone."""
    python: str = sys.executable
    """Python on the machines."""
    deadline: float | None = None
    """Longest wait of the ranks for each other."""
    more_variables: list[str] = field(default_factory=list)
    """Names of variables that other machines get beside the usual ones."""


def read_hostfile(path: Path, nproc: int | None) -> list[Place]:
    """The machines of a file, one a line: `machine1 slots=2`, `machine1:2` or `machine1`.

    `nproc`, if given, counts for every machine, whatever the file says; without either a machine gets one rank.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from None
    places = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _HOST.fullmatch(text)
        if found is None or text.startswith("-"):
            raise ConfigError(f"{path}, line {number}: {text!r} is not a machine, such as `machine1 slots=2`")
        places.append(Place(found["host"], nproc or int(found["slots"] or found["count"] or 1)))
    if not places:
        raise ConfigError(f"{path}: no machines; write one a line, such as `machine1 slots=2`")
    return places


def run(job: Job) -> Outcome:
    """Start mpirun, show what the ranks say, and give the outcome."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise MissingDependencyError(f"there is no mpirun beside {sys.executable} or on PATH: {INSTALL_MPI}")
    own = {} if job.deadline is None else {"DTRAIN_RUN__DEADLINE": str(job.deadline)}
    with tempfile.TemporaryDirectory(prefix="dtrain-launch-") as folder:
        words = _spelling(mpirun).words(job, [*forwarded(job.more_variables), *own], Path(folder))
        rank = [job.python, "-m", "distributed_training.launch.mpi_rank", *job.program]
        with _Running([str(mpirun), *words, *rank], {**os.environ, **own}) as running:
            return running.outcome()


class _OpenMPI:
    """Open MPI 4 and 5, and what is made of them."""

    def words(self, job: Job, variables: list[str], folder: Path) -> list[str]:
        """Options that start the job's ranks."""
        words = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        # Bound to one core, as mpirun does it, a rank's communication thread and the trainer would share that core.
        words += ["--bind-to", "none"]
        if job.places:
            hosts = folder / "hosts"
            hosts.write_text("".join(f"{place.host} slots={place.nproc}\n" for place in job.places), encoding="utf-8")
            words += ["--hostfile", str(hosts), "-np", str(_ranks(job))]
        else:  # named with its number, else it refuses more ranks than cores
            words += ["--host", f"localhost:{job.nproc}", "-np", str(job.nproc)]
        return [*words, *(word for name in variables for word in ("-x", name))]


class _Hydra:
    """MPICH, Intel MPI, MVAPICH. All variables are passed on without being asked for."""

    def words(self, job: Job, variables: list[str], folder: Path) -> list[str]:
        """Options that start the job's ranks."""
        if not job.places:
            return ["-np", str(job.nproc)]
        hosts = folder / "hosts"
        hosts.write_text("".join(f"{place.host}:{place.nproc}\n" for place in job.places), encoding="utf-8")
        return ["-f", str(hosts), "-np", str(_ranks(job))]


def _ranks(job: Job) -> int:
    return sum(place.nproc or 1 for place in job.places)


def _spelling(mpirun: Path) -> _OpenMPI | _Hydra:
    """How this mpirun wants its options."""
    try:
        done = subprocess.run([str(mpirun), "--version"], capture_output=True, text=True, timeout=_ASKING, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(f"{mpirun} --version fails ({error}): {INSTALL_MPI}") from None
    return _OpenMPI() if "Open MPI" in done.stdout or "OpenRTE" in done.stdout else _Hydra()


class _Running:
    """mpirun at work, and two threads that read what it says."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._errors: list[dict[str, Any]] = []  # of ranks, in the order in which they came
        self._killed: Outcome | None = None
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C would end it, and the ranks could not save
            preexec_fn=end_with_parent,  # and it must not outlive us
        )
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)

    def outcome(self) -> Outcome:
        """Wait for the end. A signal to this process is passed on to the ranks, which save first."""
        with _passed_on(self._process) as told:
            while self._process.poll() is None:
                if told.number is not None and time.monotonic() - told.at > _SAVING:
                    break
                time.sleep(0.05)
        self.__exit__()
        code = self._process.returncode if self._process.returncode >= 0 else 128 - self._process.returncode
        if self._errors:
            first = self._errors[0]
            report, code = with_trace(first["who"], first["error"]), first["error"]["extraInfo"].get("code", 1)
        elif told.number is not None:
            return Outcome(128 + told.number)
        elif self._killed is not None:
            return self._killed
        else:
            report = "the ranks stood still: their report is above" if code == HUNG else ""
        return Outcome(code, report or (f"mpirun ended with exit code {code}; what it said is above" if code else ""))

    def _read(self, stream: IO[bytes], to: IO[str]) -> None:
        seen: deque[str] = deque(maxlen=_REMEMBERED)
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace")
                if line.startswith(MARK) and self._note(line.removeprefix(MARK)):
                    continue
                seen.append(line)
                if "signal" in line:
                    self._killed = _killed("".join(seen)) or self._killed
                to.write(line)
                to.flush()

    def _note(self, line: str) -> bool:
        try:
            self._errors.append(json.loads(line))
        except ValueError:  # something of another rank came in between: shown as it is
            return False
        return True


def _killed(text: str) -> Outcome | None:
    """What mpirun said of a rank that a signal ended, if that is what it said."""
    for pattern in _KILLED:
        if found := pattern.search(text):
            who = found.groupdict().get("rank", "a rank")
            return of_mpi_signal(f"{who} ({found['host']}, process {found['pid']})", int(found["signal"]))
    return None


class _Told:
    number: signal.Signals | None = None
    at = 0.0


@contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[_Told]:
    """Ctrl-C, SIGTERM and a hang-up reach the ranks, once."""
    told = _Told()

    def note(number: int, frame: FrameType | None) -> None:
        if told.number is None:
            told.number, told.at = signal.Signals(number), time.monotonic()
            process.send_signal(STOP)

    with handled_by(note, ENDING):
        yield told
