"""The states of the global generators of random, numpy and torch: read, compared and put back.

To read the states of the first two takes long, as they are made into Python numbers one by one. They are read again
only where the memory of the generator has changed; on an interpreter where that cannot be seen, every time.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Which = tuple[bool, bool, bool]
"""Of the three generators, in this order: random, numpy, torch."""

# Taken as they are: those who look at a state are noticed elsewhere, by other functions in the place of these.
_get_python, _get_numpy, _get_torch = random.getstate, np.random.get_state, torch.default_generator.get_state


class _Seen:
    """The last state that was read, with the memory of the generator at that time."""

    def __init__(self, read: Callable[[], Any], memory: Callable[[], Any] | None) -> None:
        self._read, self._memory = read, memory
        self._known: tuple[Any, Any] = (None, None)

    def __call__(self) -> Any:
        """The state: the same object, as long as it is the same."""
        if self._memory is None:
            return self._read()
        memory = self._memory()
        if memory != self._known[0]:
            self._known = (memory, self._read())
        return self._known[1]


def _body(thing: Any, kind: type) -> bytes:
    """All that `kind` keeps in the memory of an object, less what every object has: a count of references."""
    return ctypes.string_at(id(thing) + object.__basicsize__, kind.__basicsize__ - object.__basicsize__)


def _python_memory(generator: Any) -> tuple[bytes, Any]:
    return _body(generator, random.Random.__base__ or random.Random), generator.gauss_next


def _numpy_memory(generator: np.random.RandomState) -> tuple[Any, Any]:
    bits = generator._bit_generator
    if type(bits) is not np.random.MT19937:  # somebody's own: how large its state is, is not known
        return None, object()
    return _body(generator, np.random.RandomState), ctypes.string_at(bits.ctypes.state_address, _MT19937)


_MT19937 = 625 * 4  # bytes: the numbers, and which of them is next


def _memory_tells() -> tuple[bool, bool]:
    """Whether every draw shows in memory: seen with generators of our own."""
    if sys.implementation.name != "cpython":
        return False, False
    python, numpy = random.Random(1), np.random.RandomState(1)
    seen: list[Any] = [_python_memory(python)]
    for draw in (python.random, lambda: python.gauss(0, 1), lambda: python.gauss(0, 1)):  # the second has one left over
        draw()
        seen.append(_python_memory(python))
    also: list[Any] = [_numpy_memory(numpy)]
    for draw in (numpy.random_sample, numpy.standard_normal, numpy.standard_normal):
        draw()
        also.append(_numpy_memory(numpy))
    return len(set(seen)) == len(seen), len(set(also)) == len(also)


_python_tells, _numpy_tells = _memory_tells()
_python_generator: Any = getattr(random.random, "__self__", None)
_numpy_generator: Any = getattr(np.random.random_sample, "__self__", None)
_python_state = _Seen(_get_python, (lambda: _python_memory(_python_generator)) if _python_tells else None)
_numpy_state = _Seen(_get_numpy, (lambda: _numpy_memory(_numpy_generator)) if _numpy_tells else None)


def read_states() -> tuple[Any, Any, bytes]:
    """The states of all three."""
    return _python_state(), _numpy_state(), _get_torch().numpy().tobytes()


def different(before: tuple[Any, Any, bytes], after: tuple[Any, Any, bytes]) -> Which:
    """Which of the states differ."""
    one, other = before[1], after[1]
    numpy = one is not other and (one[2:] != other[2:] or not np.array_equal(one[1], other[1]))
    return before[0] is not after[0] and before[0] != after[0], numpy, before[2] != after[2]


def put_back(states: tuple[Any, Any, bytes], which: Which) -> None:
    """Set the generators that are asked for to these states."""
    if which[0]:
        random.setstate(states[0])
    if which[1]:
        np.random.set_state(states[1])
    if which[2]:
        torch.default_generator.set_state(torch.frombuffer(bytearray(states[2]), dtype=torch.uint8))
