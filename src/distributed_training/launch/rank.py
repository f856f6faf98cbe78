"""The first code of every rank that we start: `python -m distributed_training.launch.rank PROGRAM...`.

It runs the program as Python would. What it adds: an error that ends the rank is left where the launcher looks for it,
whether or not the program uses a Trainer, and a rank does not outlive its launcher.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from distributed_training.runtime import failure
from distributed_training.runtime.signals import end_with_parent


def main(tell: Callable[[dict[str, Any]], None] | None = None, orphaned: signal.Signals = signal.SIGTERM) -> None:
    """Run `-m module arguments` or `script.py arguments`. An error is left in a file, or goes to `tell`.

    `orphaned` is the signal that this process gets when its launcher is gone.
    """
    faulthandler.enable()
    end_with_parent(orphaned)
    failure.speak_through_launcher(tell)
    program = sys.argv[1:]
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(getattr(error, "exit_code", 1))


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program on: the way there is ours and Python's."""
    part = trace.tb_next if trace is not None else None
    while part is not None and part.tb_frame.f_globals.get("__name__") == "runpy":
        part = part.tb_next
    return part or trace


if __name__ == "__main__":
    main()
