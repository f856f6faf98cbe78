"""What a field of a message may hold: a type together with the check that sender and receiver both make."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any

from distributed_training.wire.limits import MAX_FACTS, MAX_TEXT

Check = Callable[[Any], Any]
"""Returns the value a field takes, or raises ValueError."""
Fact = str | int | float | bool | None


def _whole(top: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not 0 <= value <= top:
            raise ValueError(f"must be a whole number up to {top}")
        return value

    return check


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ValueError(f"must be a string of at most {MAX_TEXT} characters")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise ValueError("must be a number of seconds")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _digest(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise ValueError("must be 32 bytes")
    return value


def _codes(value: Any) -> tuple[int, ...]:
    if type(value) not in (list, tuple) or len(value) > 16 or not all(type(c) is int and 0 < c < 256 for c in value):
        raise ValueError("must be a short list of codec numbers")
    return tuple(value)


def _facts(value: Any) -> dict[str, Fact]:
    if type(value) is not dict or len(value) > MAX_FACTS:
        raise ValueError(f"must be a table of at most {MAX_FACTS} facts")
    for key, fact in value.items():
        _text(key)
        if type(fact) is str:
            _text(fact)
        elif type(fact) not in (int, float, bool, type(None)):
            raise ValueError("must hold strings, numbers and truth values")
    return value


def one_of(kind: type[IntEnum]) -> Check:
    known: dict[int, IntEnum] = {int(member): member for member in kind}

    def check(value: Any) -> IntEnum:
        if type(value) not in (int, kind) or value not in known:
            raise ValueError(f"must be one of {sorted(known)}")
        return known[value]

    return check


U32 = Annotated[int, _whole(2**32 - 1)]
U63 = Annotated[int, _whole(2**63 - 1)]
Text = Annotated[str, _text]
Seconds = Annotated[float, _seconds]
Truth = Annotated[bool, _flag]
Digest = Annotated[bytes, _digest]
Codecs = Annotated[tuple[int, ...], _codes]
Facts = Annotated[dict[str, Fact], _facts]
