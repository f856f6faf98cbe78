"""The process of a `TurnProcess`: `python -m distributed_training.bench.turn_worker module:function ARGUMENTS ...`.

Its module is imported at once, with all that takes. At the first order the function is called as
`function(orders, **arguments)`. It sets up, calls `orders.ready()`, then does its work once for every further order and
answers with plain values. An error that it raises is the answer to the order it was at.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed_training.runtime.errors import DistributedTrainingError
from distributed_training.runtime.signals import end_with_parent


class Orders:
    """What this process is told to do, in order. Iterating ends when there is nothing more."""

    def __init__(self, reading: int, writing: int, folder: Path) -> None:
        self._orders = os.fdopen(reading, "rb")
        self._writing = writing
        self.folder = folder
        """A place for files, removed when this process is gone."""

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


def main() -> None:
    """Run the function named on the command line."""
    end_with_parent(signal.SIGKILL)
    target, arguments, reading, writing, folder = sys.argv[1:]
    orders = Orders(int(reading), int(writing), Path(folder))
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        orders.answer(imported=module)
        orders.wait_or_end()
        function(orders, **json.loads(arguments))
    except DistributedTrainingError as error:
        orders.answer(error=str(error))
    except Exception as error:
        orders.answer(error=f"{type(error).__name__}: {str(error).strip()[:500]}")
        raise


if __name__ == "__main__":
    main()
