"""`dtrain plan` from the shell: numbers of GPUs, and mistakes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from distributed_training.cli.counts import counts_and_words
from distributed_training.config.errors import ConfigError


def test_numbers_of_gpus_as_people_write_them() -> None:
    assert counts_and_words(["1"], ["a.yaml", "8", "64", "training.lr=1"]) == ((1, 8, 64), ["a.yaml", "training.lr=1"])
    assert counts_and_words(["64,8,1"], None) == ((1, 8, 64), [])
    assert counts_and_words(["1", "8"], ["x=1"]) == ((1, 8), ["x=1"])
    assert counts_and_words(None, ["8"]) == ((), ["8"])
    for wrong in ("0", "two", "-1", "1.5"):
        with pytest.raises(ConfigError, match="--gpus"):
            counts_and_words([wrong], None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bandwidth", "fast"], "--bandwidth fast: no bandwidth"),
        (["--gpus", "0"], "--gpus 0: give numbers from 1 on"),
        (["--latency", "20"], "--latency 20: no time"),
        (["nope.yaml"], "nope.yaml: no such file"),
        (["--strategies", "dpd"], "--strategies dpd: unknown; did you mean"),
        (["trainin.lr=3"], "unknown setting trainin.lr"),
    ],
)
def test_mistakes(dtrain: Callable, words: list[str], said: str) -> None:
    found = dtrain("plan", *words)

    assert found.code == 2
    assert said in found.err
    assert "Traceback" not in found.err
