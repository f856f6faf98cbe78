"""A job on several hosts, each reached over ssh: `dtrain launch --hosts a,b`.

On every host runs `launch/remote.py`. What it is to do, and the environment, go to its standard input, so that nothing
secret stands on a command line and nothing needs quoting; when that input ends, because this process is gone, it ends
too. It answers on its standard output, among the output of the ranks, in lines that begin with `MARK`.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from distributed_training.config.errors import ConfigError
from distributed_training.runtime.signals import ENDING, handled_by
from distributed_training.runtime.watch import FAILED_ELSEWHERE

MARK = "\x1edtrain "
_FORWARDED = (
    "DTRAIN_",
    "NCCL_",
    "GLOO_",
    "MASTER_",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TORCH_CPP_LOG_LEVEL",
)
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_UNREACHABLE = 255  # exit code of ssh itself
_FOLLOW = 10.0  # seconds that the other hosts have to see by themselves that one has failed
_END = 75.0  # seconds to the end after a signal: the ranks' time to save, and some for the way


@dataclass(frozen=True)
class Place:
    """A host, and how many processes it gets; None: one a GPU."""

    host: str
    nproc: int | None


@dataclass(frozen=True)
class Job:
    """What runs on the hosts, and how they are reached."""

    places: list[Place]
    program: list[str]
    ssh: str
    python: str
    master: str | None
    max_restarts: int
    deadline: float | None
    more_variables: list[str]


def read_hosts(text: str, nproc: int | None) -> list[Place]:
    """`a,b` or `user@a:4,b:2`: hosts in the order of their ranks, with their numbers of processes."""
    places = []
    for word in text.split(","):
        host, colon, slots = word.strip().partition(":")
        if not host or host.startswith("-") or (colon and not (slots.isdigit() and int(slots))):
            raise ConfigError(f"--hosts {text}: {word.strip()!r} is not HOST or HOST:PROCESSES")
        places.append(Place(host, int(slots) if colon else nproc))
    return places


def run(job: Job) -> int:
    """Start the hosts, show what they say, and give the exit code of the job."""
    events: queue.Queue[tuple[_Host, Any]] = queue.Queue()
    hosts = [_Host(job, number, events) for number in range(len(job.places))]
    try:
        with _signals_for(hosts) as told:
            return _Conversation(job, hosts, events, told).run()
    finally:
        for host in hosts:
            host.close()


class _Conversation:
    """The first host says where all meet, the others are told; then all run until the last has ended."""

    def __init__(self, job: Job, hosts: list[_Host], events: queue.Queue[tuple[_Host, Any]], told: _Told) -> None:
        self._job, self._hosts, self._events, self._told = job, hosts, events, told
        self._ends: list[_Host] = []  # in the order in which they ended
        self._failed_at = 0.0

    def run(self) -> int:
        self._hosts[0].start(self._job.master)
        while len(self._ends) < len(self._hosts):
            self._lose_patience()
            try:
                host, said = self._events.get(timeout=0.2)
            except queue.Empty:
                continue
            if "meet" in said:
                for other in self._hosts[1:]:
                    other.start(said["meet"])
            elif "report" in said:
                host.report = said["report"]
            elif "exit" in said:
                self._ended(host, said["exit"])
        return self._last_words()

    def _ended(self, host: _Host, code: int) -> None:
        host.code = code
        self._ends.append(host)
        if code and not self._failed_at:
            self._failed_at = time.monotonic()
            if host.report is None:  # it never began: nobody else can notice
                self._failed_at -= _FOLLOW

    def _lose_patience(self) -> None:
        now, told = time.monotonic(), self._told.at
        if self._failed_at and not told and now - self._failed_at > _FOLLOW:
            self._told.tell(signal.SIGTERM)
        if told and now - told > _END:
            for host in self._hosts:
                host.close()

    def _last_words(self) -> int:
        failed = [host for host in self._ends if host.code]
        if not failed:
            return 0
        if self._told.by_user is not None and all(not host.report for host in failed):
            return 128 + self._told.by_user
        cause = min(
            failed, key=lambda host: host.code == FAILED_ELSEWHERE
        )  # the first of those with a reason of their own
        cause.say(sys.stderr, cause.reason())
        return 128 + self._told.by_user if self._told.by_user is not None else cause.code


class _Host:
    """One host: its ssh process and the threads that read what it says."""

    def __init__(self, job: Job, number: int, events: queue.Queue[tuple[_Host, Any]]) -> None:
        self._job, self._number, self._events = job, number, events
        self.name = job.places[number].host
        self.report: str | None = None
        self.code = 0
        self._last_line = ""
        command = (
            f"cd {shlex.quote(os.getcwd())} && exec {shlex.quote(job.python)} -m distributed_training.launch.remote"
        )
        self._process = subprocess.Popen(
            [*shlex.split(job.ssh), *_OPTIONS, self.name, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C would end ssh, not the ranks
        )
        streams = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self._readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._readers, self._waiter):
            thread.start()

    def start(self, meet: str | None) -> None:
        """Say what to run and where all hosts meet; None: this one is to choose."""
        task = {
            "program": self._job.program,
            "nproc": self._job.places[self._number].nproc,
            "machines": len(self._job.places),
            "number": self._number,
            "meet": meet,
            "host": self.name.rpartition("@")[2],
            "max_restarts": self._job.max_restarts,
            "deadline": self._job.deadline,
            "variables": forwarded(self._job.more_variables),
        }
        self.send(json.dumps(task))

    def send(self, line: str) -> None:
        """One line to the other end, if it is still there."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, and its exit code says why
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def say(self, to: IO[str], text: str) -> None:
        """Lines with the host's name before each."""
        to.write("".join(f"[{self.name}] {line}\n" for line in text.splitlines()))
        to.flush()

    def reason(self) -> str:
        """Why this host failed."""
        if self.report is not None:
            return self.report or f"ended with exit code {self.code}"
        said = f": {self._last_line}" if self._last_line else ""
        if self.code == _UNREACHABLE:
            return f"cannot be reached over ssh{said}. Try `ssh {self.name} true`: it must work without a password"
        return (
            f"the job could not be started there (exit code {self.code}){said}. It runs {self._job.python} in "
            f"{os.getcwd()}: both must exist on that host (--remote-python chooses another Python)"
        )

    def close(self) -> None:
        """End the connection, and with it what runs there."""
        if self._process.poll() is None:
            self._process.kill()
        for thread in (self._waiter, *self._readers):
            thread.join(timeout=5)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def _read(self, stream: IO[bytes], to: IO[str]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip("\n")
                if line.startswith(MARK):
                    self._events.put((self, json.loads(line.removeprefix(MARK))))
                else:
                    self._last_line = line.strip() or self._last_line
                    self.say(to, line)

    def _wait(self) -> None:
        code = self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)
        self._events.put((self, {"exit": code if code >= 0 else 128 - code}))


def forwarded(more: Sequence[str]) -> dict[str, str]:
    """The variables of this environment that the hosts get."""
    missing = [name for name in more if name not in os.environ]
    if missing:
        raise ConfigError(f"--env {missing[0]}: there is no such variable here")
    return {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED) or name in more}


class _Told:
    """The signal that all hosts were told to pass on."""

    def __init__(self, hosts: list[_Host]) -> None:
        self._hosts = hosts
        self.at = 0.0
        self.by_user: signal.Signals | None = None

    def tell(self, number: signal.Signals) -> None:
        if not self.at:
            self.at = time.monotonic()
            for host in self._hosts:
                host.send(number.name)


@contextmanager
def _signals_for(hosts: list[_Host]) -> Iterator[_Told]:
    """Ctrl-C and SIGTERM here are passed on, once; the ranks save and end."""
    told = _Told(hosts)

    def note(number: int, frame: FrameType | None) -> None:
        passed_on = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        told.by_user = told.by_user or passed_on
        told.tell(passed_on)

    with handled_by(note, ENDING):
        yield told
