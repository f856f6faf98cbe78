"""Threads that are not Python's, at the end of a process.

A thread of Gloo lets go of an exchange's tensors some time after whoever waited for the exchange has gone on. If
nobody else knows such a tensor by then, and Python has seen it, the thread needs Python's lock. Python ends a thread
that asks for the lock after the interpreter began to end, here in the midst of a C++ destructor; C++ answers that with
`terminate called without an active exception`, and a process that has done all its work dies of SIGABRT.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

_NAMES = ("pt_gloo_runloop", "dtrain_callback")  # as torch calls Gloo's, and native/mpi/work.cpp its own
_TASKS = Path("/proc/self/task")
_LOOK_EVERY = 0.01  # seconds: a thread that waits for Python's lock gets it meanwhile, or asks for it again
_AT_MOST = 5.0  # seconds: whoever does not come to rest on a busy machine is not worth a hang


def let_rest_at_exit() -> None:
    """From now on the interpreter ends only once these threads have put down what they held. Safe to call again."""
    atexit.unregister(_let_rest)
    atexit.register(_let_rest)


def _let_rest() -> None:
    if not _TASKS.is_dir():  # not Linux: nobody says what a thread does
        time.sleep(5 * _LOOK_EVERY)
        return
    end = time.monotonic() + _AT_MOST
    before: dict[str, tuple[str, str]] = {}
    now = _activity()
    while (now != before or any(state != "S" for state, _ in now.values())) and time.monotonic() < end:
        time.sleep(_LOOK_EVERY)
        before, now = now, _activity()


def _activity() -> dict[str, tuple[str, str]]:
    """State, and how often it went to sleep or was put aside, of each of the threads."""
    found = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() in _NAMES:
                lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                switches = lines["voluntary_ctxt_switches"] + lines["nonvoluntary_ctxt_switches"]
                found[task.name] = (lines["State"].split()[0], switches)
    return found
