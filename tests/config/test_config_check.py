"""Single values: what becomes which type, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from distributed_training.config import ConfigError
from distributed_training.config.check import coerce, did_you_mean


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("12", int, 12),
        ("12.0", int, 12),
        ("1e3", int, 1000),
        (12.0, int, 12),
        (str(2**63 - 1), int, 2**63 - 1),
        ("-3", int, -3),
        ("1e-3", float, 0.001),
        (1, float, 1.0),
        ("yes", bool, True),
        ("Off", bool, False),
        (1, bool, True),
        (7, str, "7"),
        (Path("/data"), str, "/data"),
        ("null", int | None, None),
        ("", str | None, None),
        ("4", int | None, 4),
        ("[a, b]", list[str], ["a", "b"]),
        ("1, 2", list[float], [1.0, 2.0]),
        (0.5, list[float], [0.5]),
        ((1, 2), list[int], [1, 2]),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("min", Literal["min", "max"], "min"),
        (False, Literal["on", "off"], "off"),
    ],
)
def test_coerced(value: object, annotation: Any, expected: object) -> None:
    result = coerce(value, annotation, "key")
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1.5, int, "a whole number, not float"),
        (True, int, "a whole number, not bool"),
        ("many", int, "a whole number, not str"),
        (float("inf"), int, "a whole number, not float"),
        (None, float, "a number, not NoneType"),
        (True, float, "a number, not bool"),
        ("maybe", bool, "true or false, not str"),
        (True, str, "text, not bool"),
        (["a"], str, "text, not list"),
        (5, dict[str, Any], "a mapping, not int"),
        ("mix", Literal["min", "max"], "one of min, max; did you mean min?"),
        (["a"], list[float], "a number, not str"),
        (5, Path, "Path, not int"),
    ],
)
def test_refused_with_key_and_expectation(value: object, annotation: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        coerce(value, annotation, "section.key")
    assert str(caught.value).startswith("section.key")
    assert str(caught.value).endswith(expected)


def test_did_you_mean() -> None:
    assert did_you_mean("batchsize", ["batch_size", "epochs"]) == "; did you mean batch_size?"
    assert did_you_mean("xyz", ["batch_size", "epochs"]) == ""
