"""The first code of a rank under `dtrain launch --mpi`: `python -m distributed_training.launch.mpi_rank PROGRAM...`.

What `launch/rank.py` does, and what only MPI asks for. An error that ends the rank goes to the launcher in one marked
line of its output: ranks may be on machines that share no folder. A signal to stop comes as SIGUSR2: at SIGTERM mpirun
would end the ranks before they have saved.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from typing import Any

from distributed_training.launch import rank
from distributed_training.runtime.failure import SHOWN_BY_LAUNCHER
from distributed_training.runtime.world import read_world

MARK = "\x1edtrain-rank "
STOP = signal.SIGUSR2
"""What the launcher sends through mpirun in place of SIGTERM."""
_LONGEST = 3000  # characters of a traceback: a line must pass mpirun in one piece


def main() -> None:
    """Run the program of this rank."""
    signal.signal(STOP, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    if "OMP_NUM_THREADS" not in os.environ:  # before torch: each rank takes its part of the cores
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // read_world().local_size))
    os.environ[SHOWN_BY_LAUNCHER] = "1"
    rank.main(_tell)


def _tell(error: dict[str, Any]) -> None:
    """One line that the launcher takes out of what this rank writes."""
    facts = error["extraInfo"]
    if len(facts["py_callstack"]) > _LONGEST:
        facts["py_callstack"] = f"(...)\n{facts['py_callstack'][-_LONGEST:]}"
    world = read_world()
    line = {"who": f"{world.label} ({platform.node()}, process {os.getpid()})", "error": error}
    sys.stdout.flush()
    sys.stderr.write(f"\n{MARK}{json.dumps(line)}\n")  # something may have left an unfinished line
    sys.stderr.flush()


if __name__ == "__main__":
    main()
