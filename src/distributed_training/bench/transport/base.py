"""What all ways have in common: the batches, a process that sends, and the counting."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Take = Callable[[torch.Tensor, torch.Tensor], bool]
"""Given a batch that arrived; False once enough were counted."""
Run = Callable[["Case", Take], None]

_WARM_SECONDS, _WARM_BATCHES = 0.3, 8
_PATIENCE = 20.0  # seconds without a batch, start included
_DIE_WITH_PARENT = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Case:
    """Batches of one size: rows of float32 with an int64 label each."""

    width: int
    samples: int
    rows: int = 64

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The dataset. The first number of each row is its label, so that what arrives can be checked."""
        numbers = np.random.default_rng(0)
        inputs = numbers.random((self.samples, self.width), np.float32)
        targets = numbers.integers(0, 1000, self.samples)
        inputs[:, 0] = targets
        return inputs, targets

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """One batch, for those that only carry bytes: they send it again and again and gather nothing."""
        inputs, targets = Case(self.width, self.rows, self.rows).arrays()
        return inputs, targets

    def message(self) -> bytes:
        """The batch as one piece of bytes."""
        inputs, targets = self.batch()
        return inputs.tobytes() + targets.tobytes()

    def tensors(self, memory: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Such a piece as tensors, without a copy."""
        size = self.rows * self.width
        inputs = np.frombuffer(memory, np.float32, size).reshape(self.rows, self.width)
        return torch.from_numpy(inputs), torch.from_numpy(np.frombuffer(memory, np.int64, self.rows, 4 * size))


CASES = {
    "26 KB": Case(100, 8192),
    "393 KB": Case(1536, 8192),
    "9.6 MB": Case(37_500, 1024),
}


class Counter:
    """Counts batches over some seconds, after a warm-up."""

    def __init__(self, case: Case, seconds: float) -> None:
        self._case, self._seconds = case, seconds
        self._first = self._start = 0.0
        self._count = 0
        self.rate = 0.0
        """Batches a second, once `take` has returned False."""

    def take(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        """Count a batch."""
        now = time.perf_counter()
        self._count += 1
        if self._start:
            if now - self._start < self._seconds:
                return True
            self.rate = self._count / (now - self._start)
            return False
        if not self._first:
            self._first = now
        if now - self._first >= _WARM_SECONDS and self._count >= _WARM_BATCHES:
            self._check(inputs, targets)
            self._start, self._count = time.perf_counter(), 0
        return True

    def _check(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """A way that brings something else than was sent is not worth measuring."""
        case = self._case
        right = tuple(inputs.shape) == (case.rows, case.width) and inputs.dtype == torch.float32
        if not right or not torch.equal(inputs[:, 0].long(), targets):
            raise AssertionError(f"a batch of {tuple(inputs.shape)} {inputs.dtype} came damaged")


def measure(run: Run, case: Case, seconds: float) -> float:
    """Batches a second of one way."""
    torch.set_num_threads(1)
    signal.alarm(int(_PATIENCE + 20 * seconds))  # nothing here may hang: the process ends
    counter = Counter(case, seconds)
    run(case, counter.take)
    signal.alarm(0)
    return counter.rate


@contextmanager
def process(function: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """A fork of this process that runs a function; it is ended when its use is over."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(0)
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            function(*arguments)
        except (BrokenPipeError, ConnectionError, KeyboardInterrupt):
            pass
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect(port: int) -> socket.socket:
    """A connection to a process that may not listen yet."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
