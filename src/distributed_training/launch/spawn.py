"""Ranks from Python: `distributed_training.spawn(fn, nproc=2)`, in a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed_training.config.errors import ConfigError
from distributed_training.launch.rank import end_with_parent
from distributed_training.launch.report import of_error_files
from distributed_training.runtime import failure
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.failure import SHOWN_BY_LAUNCHER
from distributed_training.runtime.forking import garbage_stays_here

_SAVING = 60.0  # seconds that ranks have for their last checkpoint after Ctrl-C
_FOLLOW = 10.0  # seconds that the others have to end after one has failed


def spawn(fn: Callable[..., Any], nproc: int = 2, args: Sequence[Any] = ()) -> list[Any]:
    """Run `fn(*args)` in `nproc` processes that form a world, and return what each gave, in the order of ranks.

        def train():
            trainer = Trainer(model(), config=config)  # strategy=auto chooses ddp
            return trainer.train(data).metrics["train_loss"]

        losses = spawn(train, nproc=2)

    A function of an importable module runs in fresh processes. A lambda, a closure or a function of a notebook or of
    the script itself cannot be sent to one, so the processes are then forked from this one: that needs a system that
    can fork, and no GPU in use here so far; each then computes with one CPU thread. Values come back by pickle; move
    tensors to the CPU.

    Raises:
        RanksError: with the traceback of the rank that failed; the others are ended.
    """
    if nproc < 1:
        raise ConfigError(f"spawn(nproc={nproc}): at least one process")
    method = start_method(fn)
    with socket.create_server(("127.0.0.1", 0)) as meeting_point, TemporaryDirectory(prefix="dtrain-spawn-") as folder:
        errors = Path(folder)
        ranks = _start(method, fn, tuple(args), _worlds(nproc, meeting_point.getsockname()[1], errors))
        store = _keep_store(meeting_point)  # after the forks: it has a thread
        try:
            values = _results(ranks, errors)
            for rank in ranks:
                rank.process.join(_SAVING)  # what they do at exit is theirs
            return values
        except KeyboardInterrupt:
            _end(ranks, signal.SIGINT, _SAVING)
            raise
        finally:
            _end(ranks, signal.SIGTERM, _FOLLOW)
            del store


def start_method(fn: Callable[..., Any]) -> str:
    """`spawn` where a fresh process can import the function, else `fork`."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    importable = module is not None and getattr(module, getattr(fn, "__qualname__", ""), None) is fn
    if importable and module.__name__ != "__main__":  # type: ignore[union-attr]
        return "spawn"
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError(
            f"spawn({fn!r}): this system cannot fork; put the function into a module that can be imported"
        )
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            f"spawn({fn!r}): a function that is not importable needs a fork, but this process already uses a GPU, "
            "which does not survive one. Put the function into a module, or call spawn before any GPU is used"
        )
    return "fork"


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    answers: Connection


def _start(method: str, fn: Any, args: tuple[Any, ...], worlds: list[dict[str, str]]) -> list[_Rank]:
    context: Any = multiprocessing.get_context(method)
    ranks = []
    for number, world in enumerate(worlds):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(fn, args, world, sending), name=f"rank {number}")
        with garbage_stays_here():
            process.start()
        sending.close()  # so that the end of the process is the end of the pipe
        ranks.append(_Rank(number, process, receiving))
    return ranks


def _worlds(nproc: int, port: int, errors: Path) -> list[dict[str, str]]:
    """The variables of each rank."""
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    shared = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the meeting point is here, not in rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        SHOWN_BY_LAUNCHER: "1",
    }
    own = [
        {"RANK": str(n), "LOCAL_RANK": str(n), "TORCHELASTIC_ERROR_FILE": str(errors / str(n))} for n in range(nproc)
    ]
    return [{**shared, **variables} for variables in own]


def _rank(fn: Callable[..., Any], args: tuple[Any, ...], world: dict[str, str], answers: Connection) -> None:
    """In the new process."""
    end_with_parent()
    os.environ.update(world)
    if "torch" in sys.modules:  # forked: OpenMP's threads are not, and a child that waits for them waits for ever
        sys.modules["torch"].set_num_threads(1)
    try:
        answer = pickle.dumps(fn(*args))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # from `fn` on
        failure.report(error, 1)
        sys.exit(1)
    answers.send_bytes(answer)
    answers.close()


def _keep_store(meeting_point: socket.socket) -> Any:
    """The store at which the ranks meet, on the socket that already has its port."""
    import torch.distributed as dist

    host, port = meeting_point.getsockname()
    own = os.dup(meeting_point.fileno())
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=own)


def _results(ranks: list[_Rank], errors: Path) -> list[Any]:
    """What each rank returned; an error as soon as one ends without."""
    values: dict[int, Any] = {}
    open_ = {rank.answers: rank for rank in ranks}
    while open_:
        for answers in wait(list(open_)):
            assert isinstance(answers, Connection)
            rank = open_.pop(answers)
            try:
                values[rank.number] = pickle.loads(answers.recv_bytes())  # from a process of our own
            except EOFError:
                rank.process.join()
                said = of_error_files({r.number: str(errors / str(r.number)) for r in ranks}, len(ranks))
                raise RanksError(said[0] if said else _death(rank, len(ranks))) from None
    return [values[rank.number] for rank in ranks]


def _death(rank: _Rank, size: int) -> str:
    code = rank.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank.number} of {size} {how} before its function returned"


def _end(ranks: list[_Rank], number: signal.Signals, seconds: float) -> None:
    """A signal to those still there, once; those that are there much later are killed."""
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            os.kill(rank.process.pid, number)
    end = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(0.1, end - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.answers.close()
