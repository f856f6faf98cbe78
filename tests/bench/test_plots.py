"""Which plots a history gives, and that they are real images."""

from __future__ import annotations

import io
import math
import sys
import threading

import pytest

from distributed_training.bench.canvas import DARK, LIGHT
from distributed_training.bench.history import History, Series
from distributed_training.bench.plots import direction, draw, epoch_marks, families, smoothed, split_of
from distributed_training.runtime.errors import MissingDependencyError

pytest.importorskip("matplotlib")
PIL = pytest.importorskip("PIL.Image")


def history(**values: list[float]) -> History:
    return History(series={name: Series(list(range(1, len(v) + 1)), v) for name, v in values.items()})


def files(found: History) -> list[str]:
    return [family.file for family in families(found)]


def test_metrics_of_one_kind_share_a_plot() -> None:
    found = families(
        history(
            lr=[0.1], epoch=[0.5], val_loss=[1.0], train_loss=[2.0], val_accuracy=[0.5], samples_per_second=[9.0],
            val_perplexity=[7.0], grad_norm=[1.0],
        )
    )  # fmt: skip
    assert [(family.file, family.metrics) for family in found] == [
        ("loss", ("train_loss", "val_loss")),
        ("accuracy", ("val_accuracy",)),
        ("perplexity", ("val_perplexity",)),
        ("learning_rate", ("lr",)),
        ("throughput", ("samples_per_second",)),
        ("gradient_norm", ("grad_norm",)),
    ]


def test_what_cannot_be_drawn_has_no_plot() -> None:
    assert files(history(train_loss=[math.nan, math.inf], lr=[0.1])) == ["learning_rate"]
    assert files(History()) == []


def test_file_names_are_safe_and_different() -> None:
    named = history(
        **{"../../etc/x": [1.0], "/": [1.0], "a b": [1.0], "a/b": [1.0], "learning rate": [1.0], "lr": [1.0]}
    )
    found = files(named)
    assert found == ["etc_x", "metric", "a_b", "a_b_", "learning_rate_", "learning_rate"]


def test_splits_and_directions() -> None:
    assert split_of("val_loss") == ("val", "loss")
    assert split_of("lr") == ("", "lr")
    assert split_of("train_") == ("", "train_")
    assert [direction(m) for m in ("val_loss", "val_top5_accuracy", "test_f1", "lr", "mse")] == [
        "min",
        "max",
        "max",
        None,
        "min",
    ]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("wide", [True, False])
def test_a_plot_is_a_real_image(theme: object, wide: bool) -> None:
    made = history(train_loss=[2.0, 1.0, math.nan, 0.5], val_loss=[1.5, 1.2], epoch=[0.5, 1.0, 1.5, 2.0])
    made.resumed_at = [2]
    image = PIL.open(io.BytesIO(draw(made, families(made)[0], theme, wide=wide)))  # type: ignore[arg-type]
    image.load()
    assert image.format == "PNG"
    assert image.size == ((1512, 633) if wide else (1008, 561))
    background = tuple(int(theme.background[i : i + 2], 16) for i in (1, 3, 5))  # type: ignore[attr-defined]
    colors = image.convert("RGB").getcolors(maxcolors=1 << 20)
    assert max(colors)[1] == background
    assert len(colors) > 50


@pytest.mark.parametrize(
    "values",
    [
        {"train_loss": [1.0]},
        {"train_loss": [0.0, 0.0]},
        {"train_loss": [-5.0, 3.0]},
        {"val_loss": [1e-9, 1e9, math.nan]},
        {"val_accuracy": [0.0, 1.0]},
        {"val_accuracy": [10.0, 95.0]},
        {"samples_per_second": [0.0]},
        {"a $x_{1 \\frac <b>": [1.0, 2.0]},
        {"train_loss": [math.sin(i) + 2 for i in range(20_000)], "epoch": [i / 100 for i in range(20_000)]},
    ],
    ids=["one point", "flat", "negative", "huge range", "percent", "percent already", "zero", "hostile name", "long"],
)
def test_odd_data_can_be_drawn(values: dict[str, list[float]]) -> None:
    made = history(**values)
    assert draw(made, families(made)[0]).startswith(b"\x89PNG")


def test_step_zero_only_can_be_drawn() -> None:
    made = History(series={"train_loss": Series([0], [1.0])})
    assert draw(made, families(made)[0]).startswith(b"\x89PNG")


def test_pyplot_is_not_used_and_any_thread_may_draw() -> None:
    loaded = "matplotlib.pyplot" in sys.modules
    made, images = history(train_loss=[1.0, 0.5]), []
    thread = threading.Thread(target=lambda: images.append(draw(made, families(made)[0])))
    thread.start()
    thread.join()
    assert images[0].startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_epoch_marks_lie_where_epochs_end() -> None:
    assert epoch_marks(Series([5, 10, 15, 20], [0.5, 1.0, 1.5, 2.0])) == [(1, 10.0), (2, 20.0)]
    assert epoch_marks(Series([8, 12], [0.8, 1.2])) == [(1, pytest.approx(10.0))]
    many = epoch_marks(Series(list(range(3001)), [s / 100 for s in range(3001)]))
    assert [mark for mark, _ in many] == [5, 10, 15, 20, 25, 30]
    assert epoch_marks(None) == []
    assert epoch_marks(Series([1], [1.0])) == []


def test_smoothing_keeps_level_length_and_gaps() -> None:
    assert smoothed([3.0] * 100) == pytest.approx([3.0] * 100)
    noisy = [1.0, 3.0] * 200
    assert all(abs(value - 2.0) < 0.5 for value in smoothed(noisy))
    gap = smoothed([1.0, 1.0, math.nan, 1.0, 1.0])
    assert math.isnan(gap[2])
    assert gap[3] == 1.0


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = history(train_loss=[1.0])
    with pytest.raises(MissingDependencyError, match=r"distributed-training\[plots\]"):
        draw(made, families(made)[0])
