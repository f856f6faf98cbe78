"""A notebook that runs in a real kernel, so that a test can press its buttons: run a cell, stop it, kill the kernel."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import threading
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from tests.split.conftest import wait_for

_LONG = 150.0


class Notebook:
    """The code cells of a notebook and a kernel for them, which a thread looks after. To be closed."""

    def __init__(self, file: Path, folder: Path, variables: dict[str, str]) -> None:
        self._notebook = nbformat.read(file, as_version=4)
        self._cells = [at for at, cell in enumerate(self._notebook.cells) if cell.cell_type == "code"]
        resources = {"metadata": {"path": str(folder)}}
        self._client = NotebookClient(
            self._notebook, timeout=_LONG, kernel_name="python3", resources=resources, shutdown_kernel="immediate"
        )
        self._variables = {**os.environ, **variables}
        self._orders: queue.Queue[int | None] = queue.Queue()
        self._ends: queue.Queue[BaseException | None] = queue.Queue()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="notebook")
        self._thread.start()

    def source(self, cell: int) -> str:
        """The code of a cell, counted from 1 as a person does."""
        return str(self._notebook.cells[self._cells[cell - 1]].source)

    def add(self, source: str) -> int:
        """A cell more; its number."""
        self._notebook.cells.append(nbformat.v4.new_code_cell(source))
        self._cells.append(len(self._notebook.cells) - 1)
        return len(self._cells)

    def press_run(self, cell: int) -> None:
        """Run a cell; does not wait."""
        self._notebook.cells[self._cells[cell - 1]].outputs = []
        self._orders.put(self._cells[cell - 1])

    def press_stop(self) -> None:
        """What the stop button does: SIGINT to the kernel's processes."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def wait_until_done(self) -> None:
        """Wait for the cell that runs; raises what it raised."""
        if (error := self._ends.get(timeout=_LONG)) is not None:
            raise error

    @property
    def pid(self) -> int:
        """Process id of the kernel."""
        return int(self._client.km.provisioner.process.pid)

    def shown(self, cell: int) -> str:
        """What is below a cell now: printed text and HTML."""
        outputs: list[Any] = list(self._notebook.cells[self._cells[cell - 1]].outputs)
        return "\n".join(
            output["text"] if output["output_type"] == "stream" else str(output.get("data", {}).get("text/html", ""))
            for output in outputs
        )

    def until(self, cell: int, pattern: str) -> re.Match[str]:
        """Wait for something to be shown below a cell."""
        wait_for(
            lambda: re.search(pattern, self.shown(cell)) or not self._ends.empty(),
            lambda: f"{pattern!r} did not come: {self.shown(cell)}",
        )
        found = re.search(pattern, self.shown(cell))
        assert found is not None, f"the cell has ended without {pattern!r}: {self.shown(cell)} {self._ends.queue}"
        return found

    def close(self) -> None:
        """End the kernel."""
        self._orders.put(None)
        self._thread.join(_LONG)

    async def _run(self) -> None:
        async with self._client.async_setup_kernel(env=self._variables):
            while (at := await asyncio.to_thread(self._orders.get)) is not None:
                try:
                    await self._client.async_execute_cell(self._notebook.cells[at], at)
                except BaseException as error:
                    self._ends.put(error)
                else:
                    self._ends.put(None)
