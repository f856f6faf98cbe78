"""One rank on a Ray worker: a process of its own, so that what runs is what every other launcher runs.

The worker that Ray placed starts this module as a program, with the variables of its rank, passes on what it writes and
the signals that the launcher wishes, and says how it ended. The worker needs no torch: it only waits.
"""

from __future__ import annotations

import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from distributed_training.launch import rank as rank_program
from distributed_training.launch.ray_desk import ERR, OUT, Began, End, Output
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.failure import SHOWN_BY_LAUNCHER
from distributed_training.runtime.watch import FAILED_ELSEWHERE, HUNG
from distributed_training.runtime.world import JOB_VARIABLE

SAVING = 60.0  # seconds that a rank has for its last checkpoint after a signal
_INTERVAL = 0.1  # seconds between two words with the desk
_PATIENCE = 120.0  # seconds that the desk may be silent
_FOLLOW = 6.0  # seconds that a failed rank waits for the ends of the others, so that all are known
_GONE = 1.0  # the same where it has waited already, for one that is gone
_PORTS = (20_000, 32_000)  # above those of Ray's workers, below those that the system gives away by itself


@dataclass(frozen=True)
class Task:
    """What every rank of a job runs."""

    program: list[str]
    """Arguments of Python: `-m module ...` or `script.py ...`."""
    directory: str
    """Working directory, the same on every node."""
    job: str
    """Name of the job, which all its restarts share: they go on in the same run directory."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables beside those of the worker."""


@dataclass(frozen=True)
class Seat:
    """Which rank a worker has, and where all meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str
    port: int
    start: int = 0
    """Which start of all ranks it is, from 0."""
    gpus: tuple[str, ...] = ()
    """GPUs of all ranks on this node, in their order; left out, those that the worker sees."""

    def variables(self) -> dict[str, str]:
        """As torchrun writes it down: `runtime/world.py`, Accelerate and DeepSpeed read it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RESTART_COUNT": str(self.start),
            **({"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}),
        }


def meeting_point() -> tuple[str, int]:
    """The address of this worker's node, and a port that nobody listens at."""
    import ray

    for _ in range(100):
        port = random.SystemRandom().randrange(*_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return ray.util.get_node_ip_address(), port
    raise RanksError(f"{platform.node()}: no free port between {_PORTS[0]} and {_PORTS[1]}")


def run_rank(task: Task, seat: Seat, desk: Any) -> End:
    """Run this rank's program to its end, in touch with the desk."""
    _here.stop.clear()
    _here.over.clear()
    try:
        with TemporaryDirectory(prefix="dtrain-ray-") as folder:
            return _run(task, seat, _Line(desk), Path(folder) / "error.json")
    finally:
        _here.over.set()


def _run(task: Task, seat: Seat, line: _Line, error_file: Path) -> End:
    process = _start(task, seat, error_file)
    where = f"{platform.node()}, process {process.pid}"
    try:
        line.call("begin", Began(seat.start, seat.rank, seat.size, where))
        told = _attend(process, line, seat.rank)
        code = process.wait()
    finally:
        _kill(process)
    error = json.loads(error_file.read_text(encoding="utf-8"))["message"] if error_file.is_file() else None
    end = End(seat.start, seat.rank, seat.size, where, process.pid, code, error, told)
    line.call("end", end)
    return end


def wait_for_others(seat: Seat, own: End, desk: Any) -> list[End]:
    """The ends of all ranks of this start that are known soon after this one failed.

    Ray ends all workers when one fails; before that, the rank that failed first must have said why.
    """
    limit = _GONE if own.code == HUNG else _FOLLOW
    line, end = _Line(desk), time.monotonic() + limit
    while len(known := line.call("ends", seat.start)) < seat.size and time.monotonic() < end:
        time.sleep(_INTERVAL)
    return list(known)


def only_lost(ends: list[End]) -> bool:
    """Whether nothing failed but machines or connections: a program's own error would come again."""
    return all(end.told or end.code in (0, HUNG, FAILED_ELSEWHERE) for end in ends)


def _start(task: Task, seat: Seat, error_file: Path) -> subprocess.Popen[bytes]:
    own = {
        "TORCHELASTIC_RUN_ID": task.job,  # what it says goes before a Slurm or MPI in which the cluster may run
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        JOB_VARIABLE: task.job,
        SHOWN_BY_LAUNCHER: "1",
        "PYTHONUNBUFFERED": "1",
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed_training.launch.ray_rank", *task.program],
            cwd=task.directory,
            env={**os.environ, **task.variables, **seat.variables(), **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise RanksError(
            f"rank {seat.rank} of {seat.size} cannot start on {platform.node()} in {task.directory}: {error.strerror}; "
            "the folder must be the same on every node of the cluster"
        ) from None


def _attend(process: subprocess.Popen[bytes], line: _Line, rank: int) -> str:
    """Until the process has ended: its words to the desk, wishes to it. The signal that it was given, if any."""
    streams = [_Stream(process.stdout, OUT), _Stream(process.stderr, ERR)]
    told, end = "", 0.0
    try:
        while process.poll() is None:
            wish = line.call("say", rank, [chunk for stream in streams for chunk in stream.take()])
            if _here.stop.is_set():
                wish = wish or signal.SIGTERM.name
            if wish and not told:
                told, end = wish, time.monotonic() + SAVING
                process.send_signal(signal.Signals[wish])
            if told and time.monotonic() > end:
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_INTERVAL)
    except _Abandoned:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVING)
        raise
    for stream in streams:
        stream.finish()
    line.call("say", rank, [chunk for stream in streams for chunk in stream.take()])
    return told


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it may have left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Here:
    """The rank of this process, for whoever else runs code in it."""

    def __init__(self) -> None:
        self.stop, self.over = threading.Event(), threading.Event()
        self.over.set()


_here = _Here()


def save_and_end() -> None:
    """Have this worker's rank save a checkpoint and end, and wait for it: Ray is about to take the worker away."""
    _here.stop.set()
    _here.over.wait(SAVING + _FOLLOW)


class _Abandoned(RanksError):
    """The launcher is gone."""


class _Line:
    """Calls of the desk. One that is gone for good ends the rank."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    def call(self, name: str, *arguments: Any) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            return ray.get(getattr(self._desk, name).remote(*arguments), timeout=_PATIENCE)
        except (RayActorError, GetTimeoutError) as error:
            raise _Abandoned(f"the launcher is gone, or silent for {_PATIENCE:g} s ({type(error).__name__})") from None


class _Stream:
    """What the process writes on one stream, read by a thread, taken in whole lines."""

    def __init__(self, stream: IO[bytes] | None, name: str) -> None:
        assert stream is not None
        self._stream, self._name = stream, name
        self._text, self._over = b"", False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._thread.start()

    def take(self) -> list[Output]:
        """What is there, up to the last whole line; all of it when the stream is over."""
        with self._lock:
            cut = len(self._text) if self._over else max(self._text.rfind(b"\n"), self._text.rfind(b"\r")) + 1
            ready, self._text = self._text[:cut], self._text[cut:]
        return [Output(self._name, ready)] if ready else []

    def finish(self) -> None:
        """The process has ended: wait for its last words, though a child of it may keep the stream open."""
        self._thread.join(timeout=2.0)
        self._over = True

    def _read(self) -> None:
        with self._stream:
            while chunk := os.read(self._stream.fileno(), 1 << 16):
                with self._lock:
                    self._text += chunk


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # in Ray's worker Ctrl-C is blocked, and its children inherit that
    # A worker that is gone may be replaced within seconds: two processes must never be the same rank of one run.
    rank_program.main(orphaned=signal.SIGKILL)
