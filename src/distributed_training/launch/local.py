"""The ranks of this machine, under torch's elastic agent: started, watched, restarted and ended together."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from distributed_training.config.errors import ConfigError
from distributed_training.launch import report
from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.failure import SHOWN_BY_LAUNCHER
from distributed_training.runtime.group import connect, name_job, wait_for_master
from distributed_training.runtime.interfaces import address_towards
from distributed_training.runtime.world import JOB_VARIABLE

SAVING = 60  # seconds that ranks have for their last checkpoint after Ctrl-C or SIGTERM
_ECHO = 2.0  # seconds in which a second signal is the same wish: terminals and schedulers often send two
_LAST_CALL = 10  # seconds in which more machines may come once there are enough; later ones mean a restart
_MORE = "the screen of the machine with that address says why"
_DEADLINE = 300.0  # seconds, as run.deadline has it


@dataclass(frozen=True)
class Launch:
    """What to start on this machine, and how its ranks find those of other machines."""

    program: list[str]
    """Arguments of Python: `-m module ...` or `script.py ...`."""
    nproc: int = 1
    """Ranks on this machine."""
    machines: tuple[int, int] = (1, 1)
    """Fewest and most machines of the job."""
    node_rank: int = 0
    """Number of this machine; with `master` only."""
    master: str | None = None
    """`host:port` at which the machine with number 0 listens."""
    rdzv: str | None = None
    """`host:port` of torchrun's c10d rendezvous: machines are numbered as they come."""
    max_restarts: int = 0
    """How often all ranks may be started again after a failure."""
    deadline: float | None = None
    """Longest wait in seconds for other machines, and of the ranks for each other."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the ranks, beside those of this process."""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ConfigError(f"--nproc {self.nproc}: a machine needs at least one process")
        if self.master and self.rdzv:
            raise ConfigError("--master and --rdzv are two ways to meet: give one of them")
        if self.machines[1] > 1 and not (self.master or self.rdzv):
            raise ConfigError(
                f"--nnodes {self.machines[1]}: the machines must know where to meet: give all of them the same "
                "--rdzv HOST:PORT, or --master HOST:PORT and each its --node-rank"
            )
        if self.master and not 0 <= self.node_rank < self.machines[1]:
            raise ConfigError(
                f"--node-rank {self.node_rank} of {self.machines[1]} machines: they go from 0 to {self.machines[1] - 1}"
            )


def run(launch: Launch) -> report.Outcome:
    """Run the job's ranks of this machine to their end."""
    # torch tells its signals to itself by a variable of this process.
    with tempfile.TemporaryDirectory(prefix="dtrain-launch-") as folder, _quiet(), environment_for_a_while():
        ranks = _Ranks(launch, folder)
        config = _launch_config(launch, ranks)
        words = ["-m", "distributed_training.launch.rank", *launch.program]
        began = time.monotonic()
        with _signals() as signals:
            try:
                launch_agent(config, sys.executable, words)
                return report.Outcome(0)
            except ChildFailedError as error:
                return report.of_failures(error.failures, ranks.world_size)
            except SignalException as error:
                given_up = SAVING if time.monotonic() - signals.first > SAVING else 0
                return report.of_signal(error.sigval, given_up, ranks.errors())
            except (RendezvousError, RuntimeError, TimeoutError) as error:
                if ranks.world_size:  # the ranks had begun
                    raise RanksError(f"the launchers at {launch.rdzv or launch.master} are gone: {_MORE}") from None
                raise _not_met(launch, error, time.monotonic() - began) from None


class _Ranks(DefaultLogsSpecs):
    """torch's place to prepare what each rank gets: here, the variables of ours."""

    def __init__(self, launch: Launch, folder: str) -> None:
        super().__init__(log_dir=folder)
        self._launch, self._restarts = launch, 0
        self._error_files: dict[int, str] = {}
        self.world_size = 0

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by torch before each start of the ranks."""
        if self._error_files:
            sys.stderr.write("".join(f"{line}\n" for line in [*self.errors(), self._restart(envs[0])]))
        destinations = super().reify(envs)
        own = self._variables()
        for variables in envs.values():
            variables.update(own)
        self.world_size = int(envs[0]["WORLD_SIZE"])
        self._error_files = {int(envs[n]["RANK"]): path for n, path in destinations.error_files.items()}
        return destinations

    def _restart(self, variables: Mapping[str, str]) -> str:
        count = int(variables["TORCHELASTIC_RESTART_COUNT"])
        if count == self._restarts:  # torch counts them where a rank failed
            return "another machine came, left or had a failure: all ranks start again"
        self._restarts = count
        return f"restart {count} of {self._launch.max_restarts}: all ranks start again"

    def errors(self) -> list[str]:
        """What ranks of the newest start have left to be shown."""
        return report.of_error_files(self._error_files, self.world_size)

    def _variables(self) -> dict[str, str]:
        variables = {SHOWN_BY_LAUNCHER: "1", **self._launch.variables}
        if "OMP_NUM_THREADS" not in os.environ:  # torchrun gives every rank one thread, also where cores are idle
            variables.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // self._launch.nproc)))
        if self._launch.deadline is not None:
            variables["DTRAIN_RUN__DEADLINE"] = str(self._launch.deadline)
        if self._launch.rdzv is not None:  # rank 0, and with it its store, may move to another machine
            place = host_and_port(self._launch.rdzv, "--rdzv")
            variables[JOB_VARIABLE] = name_job(connect(place, self._launch.deadline or _DEADLINE))
        return variables


def _launch_config(launch: Launch, ranks: _Ranks) -> LaunchConfig:
    deadline = int(launch.deadline or _DEADLINE)
    settings: dict[str, Any] = {"timeout": deadline, "join_timeout": deadline, "read_timeout": deadline}
    own: dict[str, Any]
    if launch.master is not None:
        host, port = host_and_port(launch.master, "--master")
        if launch.node_rank > 0:
            wait_for_master((host, port), deadline)
        settings["rank"] = launch.node_rank
        own = {"rdzv_backend": "static", "rdzv_endpoint": f"{host}:{port}", "run_id": f"dtrain-{host}-{port}"}
    elif launch.rdzv is not None:
        host, port = host_and_port(launch.rdzv, "--rdzv")
        settings["is_host"] = is_here(host)
        if not settings["is_host"]:
            wait_for_master((host, port), deadline)
        own = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{host}:{port}", "run_id": f"dtrain-{host}-{port}"}
        own["local_addr"] = address_towards(host)
        if launch.machines[0] < launch.machines[1]:  # a machine that comes later does not find torch's shared store
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            settings["last_call_timeout"] = _LAST_CALL
    else:  # port 0: the system chooses a free one, and nobody can take it in between
        own = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "run_id": f"dtrain-{uuid.uuid4().hex}"}
        settings["is_host"] = True
        own["local_addr"] = "127.0.0.1"
    return LaunchConfig(
        min_nodes=launch.machines[0],
        max_nodes=launch.machines[1],
        nproc_per_node=launch.nproc,
        max_restarts=launch.max_restarts,
        logs_specs=ranks,
        rdzv_configs=settings,
        shutdown_timeout=SAVING,
        signals_to_handle="SIGQUIT",  # the others are ours: see _signals
        **own,
    )


def one_per_gpu() -> int:
    """As many processes as this machine has GPUs, or one."""
    import torch

    return max(1, torch.cuda.device_count())


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """`host:port` in two; IPv6 addresses in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{option} {text}: give HOST:PORT, such as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def is_here(host: str) -> bool:
    """Whether an address is one of this machine: only then can it be listened at."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError:
        raise RanksError(f"{host}: no such host; check the name, or give its address") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


def _not_met(launch: Launch, error: Exception, waited: float) -> RanksError:
    place = launch.master or launch.rdzv or "127.0.0.1"
    text = " ".join(str(error.__cause__ or error).split())
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return RanksError(f"port {place.rpartition(':')[2]} is in use on {socket.gethostname()}; choose another one")
    return RanksError(
        f"after {waited:.0f} s the launchers of {launch.machines[0]} machines had not come together at {place} "
        f"({type(error).__name__}: {text[:200]}); run `dtrain launch` on all of them with the same --nnodes and "
        "address, and raise --deadline if they need longer to start"
    )


class _FirstSignal:
    first = 0.0


@contextmanager
def _signals() -> Iterator[_FirstSignal]:
    """The first Ctrl-C, SIGTERM or hang-up ends the job with checkpoints; one soon after it is the same wish."""
    seen = _FirstSignal()

    def note(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if seen.first and now - seen.first < _ECHO:
            return
        seen.first = seen.first or now
        passed_on = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        raise SignalException("asked to stop", passed_on)

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in (*handled, signal.SIGQUIT)}
    for number in handled:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's own account of what goes on: the report says it shorter."""
    found = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]
    before = [(logger, logger.level) for logger in found]
    for logger in found:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)
