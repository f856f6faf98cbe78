"""A process that has imported everything, and forks ranks as if they were started by hand: `rank_server.py MODULE...`.

Importing torch is most of the time of a small job: here it is done once for many jobs. Each rank is a process of its
own with its own environment, and runs its program as Python would; all write to one file, as to one screen.

Orders come as lines of JSON: {"program": [...], "environments": [...], "screen": path} starts a rank for each
environment and answers with their process numbers; {"wait": seconds, "together": bool} answers with their exit codes,
null for a rank that still ran and was killed; where it stood is then on the screen. `together`: when one has failed,
the others are killed, as a launcher does.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from typing import Any, TextIO


def serve(answers: TextIO) -> list[str] | None:
    """Follow orders until there are no more. In a rank: return its program."""
    ranks: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer: list[Any] = _codes_of(ranks, time.monotonic() + order["wait"], order["together"])
        else:
            ranks = []
            for variables in order["environments"]:
                pid = os.fork()
                if pid == 0:
                    answers.close()
                    _become_rank(variables, order["screen"])
                    return list(order["program"])
                ranks.append(pid)
            answer = list(ranks)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return None


def _become_rank(variables: dict[str, str], screen: str) -> None:
    os.environ.update(variables)
    os.chdir(variables.get("PWD", "."))
    for number, path, mode in ((0, os.devnull, os.O_RDONLY), (1, screen, os.O_WRONLY), (2, screen, os.O_WRONLY)):
        file = os.open(path, mode | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    faulthandler.enable()  # a rank that crashes, or that is ended because it hangs, shows where
    if "COVERAGE_PROCESS_CONFIG" in variables:  # what Python does at its start for a process that is to be measured
        import coverage

        coverage.process_startup(force=True)


def _codes_of(ranks: list[int], end: float, together: bool) -> list[int | None]:
    codes: dict[int, int | None] = {}
    while len(codes) < len(ranks):
        for pid in [pid for pid in ranks if pid not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        hangs = time.monotonic() > end
        if hangs or (together and any(codes.values())):
            for pid in [pid for pid in ranks if pid not in codes]:
                if hangs:
                    os.kill(pid, signal.SIGABRT)
                    time.sleep(0.5)  # to write down where it stood
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.02)
    return [codes[pid] for pid in ranks]


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries say while they are imported is no answer
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is there now is none of the ranks' garbage: looking for it would be most of their work

    program = serve(answers)
    if program is not None:
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
