"""A process that has imported everything, and forks ranks as if they were started by hand.

Importing torch is most of the time of a small job: here it is done once for many jobs. Each rank is a process of its
own with its own environment, and runs its program as Python would; all write to one file, as to one screen.

Orders come as lines of JSON: {"program": [...], "environments": [...], "screen": path} starts a rank for each
environment and answers with their process numbers; {"wait": seconds} answers with their exit codes, null for a rank
that still ran and was killed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
from typing import Any


def serve() -> list[str] | None:
    """Follow orders until there are no more. In a rank: return its program."""
    ranks: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer: list[Any] = [_code_of(pid, time.monotonic() + order["wait"]) for pid in ranks]
        else:
            ranks = []
            for variables in order["environments"]:
                pid = os.fork()
                if pid == 0:
                    _become_rank(variables, order["screen"])
                    return list(order["program"])
                ranks.append(pid)
            answer = list(ranks)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return None


def _become_rank(variables: dict[str, str], screen: str) -> None:
    os.environ.update(variables)
    os.chdir(variables.get("PWD", "."))
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, screen, os.O_WRONLY), (2, screen, os.O_WRONLY)):
        file = os.open(path, mode | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def _code_of(pid: int, end: float) -> int | None:
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    for module in ("torch.distributed.optim", "torchmetrics.classification", "distributed_training.training.session"):
        importlib.import_module(module)

    program = serve()
    if program is not None:
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
