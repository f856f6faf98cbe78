"""Turns that leave nothing behind: each is a fork of a process that has imported torch and done nothing else.

So no turn meets the threads, the memory or the CUDA context of another, and none pays for imports.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

from distributed_training.bench.turn_worker import Orders
from distributed_training.runtime.errors import BenchError

_TOLD = 2000  # characters of a traceback


def run(orders: Orders, *, target: str) -> None:
    """For `TurnProcess`: every order is given to `target` (`module:function`) as keyword arguments, in a fork.

    The function returns what is answered: a dict of plain values.
    """
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    orders.ready()
    for order in orders:
        answer = in_fork(lambda order=order: function(**order))  # type: ignore[misc]
        if "error" in answer:
            raise BenchError(answer["error"])
        orders.answer(**answer)


def in_fork(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function returns in a fork of this process; `{"error": ...}` where it raised or died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = function()
        except BaseException:
            answer = {"error": traceback.format_exc()[-_TOLD:]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    found: dict[str, Any] = json.loads(text) if text else {"error": "it ended without an answer"}
    return found
