"""Both sides of a split on one machine: the GPU side here, the loader as a process of its own. For a first look."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from typing import IO

from distributed_training.runtime.errors import FeedError
from distributed_training.split.serving import Serving
from distributed_training.training.progress import console

_ENDING = 10.0  # seconds that the loader has to end by itself
_LAST = 5  # lines of the loader that an error repeats


class LoaderBeside:
    """`dtrain feed` as a process beside this one, its lines on the same screen. Ends with the training."""

    def __init__(self, serving: Serving, words: list[str]) -> None:
        """`words` are those that describe the config on the command line."""
        self._serving, self._done = serving, False
        command = [sys.executable, "-m", "distributed_training", "feed", *words, "--to", serving.listening.link]
        self._process = subprocess.Popen(
            [*command, "--end-with-parent"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # Ctrl-C is for the training, which then still needs the samples of its last step
        )
        self._last: deque[str] = deque(maxlen=_LAST)
        assert self._process.stdout is not None
        self._thread = threading.Thread(target=self._show, args=(self._process.stdout,), name="loader", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _show(self, lines: IO[str]) -> None:
        """Show what the loader says; where it ends before the training does, so does the training."""
        for line in lines:
            self._last.append(line.rstrip())
            console().print(f"loader | {line.rstrip()}", highlight=False, markup=False, soft_wrap=True)
        code = self._process.wait()
        if not self._done and code:
            said = " | ".join(self._last)
            self._serving.listening.server.hub.stop(FeedError(f"the loader ended with code {code}: {said}"))

    def close(self) -> None:
        """Have it ended. It has heard that the training is over; if that does not help, it is told again."""
        self._done = True
        try:
            self._process.wait(_ENDING if self._serving.finished else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._thread.join(_ENDING)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> LoaderBeside:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
