"""Provenance: each value with its source and what it overrode."""

from __future__ import annotations

from collections.abc import Callable

from distributed_training.config import Config, load_config
from distributed_training.config.config import known_keys
from distributed_training.config.explain import explain


def test_a_row_for_every_setting_with_its_meaning() -> None:
    rows = explain(Config())
    assert [row.key for row in rows] == list(known_keys())
    assert all(row.source == "default" and row.meaning and row.overrode == [] for row in rows)


def test_source_and_what_it_overrode_newest_first(write: Callable[..., str]) -> None:
    file = write("training: {lr: 0.1}\nmodel: {args: {hidden: [8]}}")
    config = load_config(file, ["training.lr=0.2"], environ={"DTRAIN_TRAINING__LR": "0.3"})
    rows = {row.key: row for row in explain(config)}
    lr = rows["training.lr"]
    assert (lr.value, lr.source) == (0.2, "command line")
    assert [(o.source, o.value) for o in lr.overrode] == [
        ("environment: DTRAIN_TRAINING__LR", 0.3),
        ("config.yaml", 0.1),
        ("default", 0.002),
    ]
    assert (rows["model.args.hidden"].value, rows["model.args.hidden"].source) == ([8], "config.yaml")
    assert rows["training.epochs"].source == "default"
