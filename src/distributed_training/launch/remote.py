"""The far end of `launch/ssh.py`: runs this host's ranks as it is told on standard input, and ends when that ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import IO, TYPE_CHECKING, Any

from distributed_training.config.errors import DistributedTrainingError
from distributed_training.launch.ssh import MARK
from distributed_training.runtime.threads import keep_waits_short

if TYPE_CHECKING:
    from distributed_training.launch.local import Launch


def main() -> None:
    """Read a task, run it, report, and exit with its code."""
    keep_waits_short()
    orders = _take_standard_input()
    first = orders.readline()
    if not first:
        sys.exit(128 + signal.SIGTERM)  # whoever called is gone
    task = json.loads(first)
    os.environ.update(task["variables"])
    meet = task["meet"] or _choose_meeting_point(task["host"])
    if task["number"] == 0:
        _answer({"meet": meet})  # the others wait for it
    threading.Thread(target=_obey, args=(orders,), daemon=True).start()
    from distributed_training.launch.local import run  # torch, only now that its variables are there

    try:
        outcome = run(_launch(task, meet))
        code, report = outcome.code, outcome.report
    except DistributedTrainingError as error:
        code, report = error.exit_code, str(error)
    _answer({"report": report})
    os._exit(code)  # without waiting for the thread that reads


def _launch(task: dict[str, Any], meet: str) -> Launch:
    from distributed_training.launch.local import Launch, one_per_gpu

    return Launch(
        program=task["program"],
        nproc=task["nproc"] or one_per_gpu(),
        machines=(task["machines"], task["machines"]),
        node_rank=task["number"],
        master=meet,
        max_restarts=task["max_restarts"],
        deadline=task["deadline"],
    )


def _take_standard_input() -> IO[str]:
    """Standard input for this process alone: the ranks would read our orders."""
    orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return orders


def _choose_meeting_point(name: str) -> str:
    """The address at which this host was reached (its name may be known to one ssh config only) and a free port."""
    reached = os.environ.get("SSH_CONNECTION", "").split()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{reached[2] if len(reached) == 4 else name}:{probe.getsockname()[1]}"


def _answer(said: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(said)}\n")  # a rank may have left an unfinished line
    sys.stdout.flush()


def _obey(orders: IO[str]) -> None:
    """Signals by name; the end of the input means that nobody is there any more."""
    for line in orders:
        os.kill(os.getpid(), signal.Signals[line.strip()])
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
