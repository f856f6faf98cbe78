"""The process of a `TurnProcess`, or each of its ranks: `python -m distributed_training.bench.turn_worker FOLDER`.

`FOLDER/task.json` names a function. Its module is imported at once, with all that takes. At the first order it is
called as `function(orders, **arguments)`. It sets up, calls `orders.ready()`, then does its work once for every further
order and answers with plain values. An error that it raises is the answer to the order it was at.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.runtime.errors import DistributedTrainingError
from distributed_training.runtime.meters import resident
from distributed_training.runtime.signals import end_with_parent
from distributed_training.runtime.threads import keep_waits_short
from distributed_training.runtime.world import read_world

if TYPE_CHECKING:
    import torch


class Orders:
    """What this process is told to do, in order. Iterating ends when there is nothing more."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._orders = os.fdopen(_opened(folder / f"orders-{rank}", os.O_RDONLY), "rb")
        self._writing = _opened(folder / f"answers-{rank}", os.O_WRONLY)
        self.folder = folder
        """A place for files, removed when this process is gone. All ranks have the same."""

    def ready(self, **facts: Any) -> None:
        """Say that all is set up."""
        self.answer(**facts)

    def answer(self, **values: Any) -> None:
        """Say what came of the order."""
        os.write(self._writing, json.dumps(values).encode() + b"\n")

    def wait(self) -> dict[str, Any] | None:
        """The next order; None when there will be none."""
        line = self._orders.readline()
        return json.loads(line) if line else None

    def wait_or_end(self) -> dict[str, Any]:
        """The next order. For loops of others, which cannot be told to stop: the process ends where there is none."""
        order = self.wait()
        if order is None:
            os._exit(0)
        return order

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (order := self.wait()) is not None:
            yield order


def _opened(pipe: Path, way: int) -> int:
    """One end of a pipe with a name; opening never waits for who has the other, in case it is gone."""
    end = os.open(pipe, way | os.O_NONBLOCK)
    os.set_blocking(end, True)
    return end


def room(device: torch.device, ranks: int = 1) -> dict[str, float]:
    """For answers: what this process holds where it computes, and what is free there. `Rotation` keeps it by that.

    `ranks` share the memory of the machine; each has a GPU to itself.
    """
    if device.type == "cuda":
        import torch

        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()  # the others may need it meanwhile
        return {"reserved_bytes": float(reserved), "free_bytes": float(torch.cuda.mem_get_info(device)[0])}
    return {"reserved_bytes": ranks * resident(), "free_bytes": available()}


def available() -> float:
    """Bytes of the machine's memory that are free or can be made so."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def main() -> None:
    """Run the function that the task names."""
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    if task["alone"]:  # others end with their launcher
        end_with_parent(signal.SIGKILL)
    keep_waits_short()  # before torch is imported
    orders = Orders(folder, 0 if task["alone"] else read_world().rank)
    module, _, name = task["target"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        orders.answer(imported=module)
        orders.wait_or_end()
        function(orders, **task["arguments"])
    except DistributedTrainingError as error:
        orders.answer(error=str(error))
    except Exception as error:
        orders.answer(error=f"{type(error).__name__}: {str(error).strip()[:500]}")
        raise


if __name__ == "__main__":
    main()
