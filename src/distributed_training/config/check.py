"""Checks of single values: types by annotation, ranges by name. All raise ConfigError with the key in front."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, Union

from distributed_training.config.errors import ConfigError

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def positive(key: str, value: float | None) -> None:
    """Refuse zero, negative and non-finite values."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{key}={value!r} must be greater than 0")


def at_least(key: str, value: float | None, low: float) -> None:
    """Refuse values below `low`."""
    if value is not None and not value >= low:
        raise ConfigError(f"{key}={value!r} must be at least {low}")


def between(key: str, value: float | None, low: float, high: float) -> None:
    """Refuse values outside [low, high]."""
    if value is not None and not low <= value <= high:
        raise ConfigError(f"{key}={value!r} must be between {low} and {high}")


def seconds_of(key: str, text: str) -> float:
    """A time such as 90s, 30m, 1h30m or 2d in seconds; a number alone is seconds."""
    given = text.strip().lower()
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd]?)", given)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != given or seconds <= 0:
        raise ConfigError(f"{key}={text!r} must be a time such as 90s, 30m, 1h30m or 2d")
    return seconds


def check_types(section: Any, prefix: str) -> None:
    """Bring every field of a dataclass to its annotated type, or raise with the key and what was expected."""
    hints = typing.get_type_hints(type(section))
    for f in dataclasses.fields(section):
        setattr(section, f.name, coerce(getattr(section, f.name), hints[f.name], f"{prefix}.{f.name}"))


def coerce(value: Any, annotation: Any, key: str) -> Any:
    """`value` as the annotated type. Text from the environment becomes a number or bool; nothing is ever rounded."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("null", "none", "")):
            return None
        return coerce(value, next(a for a in args if a is not type(None)), key)
    if origin is Literal:
        if isinstance(value, bool):  # YAML reads the words on, off, yes and no as booleans
            value = next((a for a in args if a in (_YES if value else _NO)), value)
        if value in args:
            return value
        raise ConfigError(f"{key}={value!r} must be one of {', '.join(map(str, args))}{did_you_mean(str(value), args)}")
    if origin is list:
        if isinstance(value, str):
            value = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            value = [value]
        return [coerce(v, args[0], f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        if isinstance(value, dict):
            return dict(value)
        raise _wrong_type(key, value, "a mapping")
    if annotation in _SCALARS:
        return _SCALARS[annotation](value, key)
    if annotation is Any or isinstance(value, annotation):
        return value
    raise _wrong_type(key, value, annotation.__name__)


def did_you_mean(word: str, known: Iterable[Any]) -> str:
    """'; did you mean X?' for the nearest known word, or nothing."""
    close = difflib.get_close_matches(word, [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _wrong_type(key: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{key}={value!r} must be {expected}, not {type(value).__name__}")


def _as_bool(value: Any, key: str) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _YES:
        return True
    if word in _NO:
        return False
    raise _wrong_type(key, value, "true or false")


def _as_int(value: Any, key: str) -> int:
    if isinstance(value, bool):
        raise _wrong_type(key, value, "a whole number")
    try:
        number = float(value) if not isinstance(value, int) else value
        if number == int(number):
            # Straight from the text where possible: a float has no room for a large seed.
            return int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdigit() else int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise _wrong_type(key, value, "a whole number")


def _as_float(value: Any, key: str) -> float:
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise _wrong_type(key, value, "a number")


def _as_str(value: Any, key: str) -> str:
    if isinstance(value, (str, int, float, os.PathLike)) and not isinstance(value, bool):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    raise _wrong_type(key, value, "text")


_SCALARS: dict[Any, Any] = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}
