"""Bandwidths, sizes and times as people write them, and back: `25Gbit`, `900GB/s`, `80GB`, `20us`."""

from __future__ import annotations

import math
import re

from distributed_training.config.errors import ConfigError

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2.0**10,
    "mi": 2.0**20,
    "gi": 2.0**30,
    "ti": 2.0**40,
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_NUMBER = r"\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*"


def read_bandwidth(text: str, option: str) -> float:
    """Bytes a second. `Gbit`, `Gb/s`, `Gbps` count bits, as networks do; `GB/s` and `GiB/s` count bytes."""
    found = re.fullmatch(_NUMBER + r"([kKmMgGtT]i?)?(bits?|b|B|bytes?)(?:/s|ps|/sec)?\s*", text)
    if found is None:
        raise ConfigError(f"{option} {text}: no bandwidth; write it as 25Gbit, 100Gb/s or 900GB/s")
    number, prefix, unit = found.groups()
    size = float(number) * _PREFIXES[(prefix or "").lower()] / (8 if unit in ("bit", "bits", "b") else 1)
    return _positive(size, text, option, "25Gbit")


def read_size(text: str, option: str) -> float:
    """Bytes: `80GB` is 80e9, `80GiB` is 80 * 2**30."""
    found = re.fullmatch(_NUMBER + r"([kKmMgGtT]i?)?(?:B|bytes?)?\s*", text)
    if found is None:
        raise ConfigError(f"{option} {text}: no size; write it as 80GB or 141GiB")
    return _positive(float(found[1]) * _PREFIXES[(found[2] or "").lower()], text, option, "80GB")


def read_seconds(text: str, option: str) -> float:
    """Seconds: `20us`, `0.5ms`."""
    found = re.fullmatch(_NUMBER + r"([a-zµμ]+)\s*", text)
    if found is None or found[2] not in _SECONDS:
        raise ConfigError(f"{option} {text}: no time; write it as 20us or 0.5ms")
    return _positive(float(found[1]) * _SECONDS[found[2]], text, option, "20us")


def _positive(value: float, text: str, option: str, example: str) -> float:
    if not value > 0 or not math.isfinite(value):
        raise ConfigError(f"{option} {text}: must be more than nothing, such as {example}")
    return value


def size_text(size: float) -> str:
    """Bytes for people: `1.82 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{_digits(size / factor)} {unit}"
    return f"{size / 1e3:.0f} kB"


def time_text(seconds: float) -> str:
    """A step's time for people: `12.3 ms`."""
    if seconds >= 1:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def bandwidth_text(rate: float) -> str:
    """Bytes a second for people."""
    return f"{size_text(rate)}/s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
