"""The loop: what is logged when, and where checkpoints fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.examples import Losses, config, events, loader, model, trainer

from distributed_training.training import Callback, Trainer
from distributed_training.training.loop import LossMeter


def logged(run_dir: Path | None, key: str) -> list[tuple[int, float]]:
    assert run_dir is not None
    return [(event["step"], event[key]) for event in events(run_dir, "metrics") if key in event]


def test_training_losses_are_means_since_the_last_log(in_tmp: Path) -> None:
    losses = Losses()
    own = Trainer(model(), config=config(training__log_every=3), callbacks=[losses], run_dir="run")
    result = own.train(loader(), epochs=1)
    seen, sizes = losses.seen, [8, 8, 8, 8, 8, 4]
    means = [
        sum(seen[step + 1] * sizes[step] for step in steps) / sum(sizes[step] for step in steps)
        for steps in (range(3), range(3, 6))
    ]
    assert logged(result.run_dir, "train_loss") == [(3, pytest.approx(means[0])), (6, pytest.approx(means[1]))]
    assert result.metrics["train_loss"] == pytest.approx(means[1])


def test_epoch_and_rate_are_logged_with_the_loss(in_tmp: Path) -> None:
    settings = config(training__schedule="constant", training__warmup_epochs=1, training__lr=0.6)
    result = Trainer(model(), config=settings, run_dir="run").train(loader(), epochs=2)
    assert [value for _, value in logged(result.run_dir, "epoch")] == pytest.approx([k / 6 for k in range(1, 13)])
    assert [value for _, value in logged(result.run_dir, "lr")] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5] + [0.6] * 7)
    assert all(value > 0 for _, value in logged(result.run_dir, "samples_per_second"))


def test_the_norm_is_logged_where_it_was_computed(in_tmp: Path) -> None:
    result = Trainer(model(), config=config(training__gradient_clip=1.0), run_dir="run").train(loader(), epochs=1)
    assert len(logged(result.run_dir, "grad_norm")) == 6


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [6, 12, 18]),
        ({"checkpoint__every_epochs": 2}, [12, 18]),
        ({"checkpoint__every_epochs": 0}, [18]),
        ({"checkpoint__every_epochs": 0, "checkpoint__every_steps": 5}, [5, 10, 15, 18]),
        ({"checkpoint__every_steps": 3}, [3, 6, 9, 12, 15, 18]),
    ],
)
def test_checkpoints_fall_where_the_config_says(in_tmp: Path, changes: dict[str, Any], steps: list[int]) -> None:
    result = Trainer(model(), config=config(checkpoint__keep=99, **changes), run_dir="run").train(loader(), epochs=3)
    assert result.run_dir is not None
    assert [event["step"] for event in events(result.run_dir, "checkpoint")] == steps
    assert [path.name for path in sorted(result.run_dir.glob("checkpoints/*"))] == [f"step-{s:010d}" for s in steps]


def test_only_callbacks_that_look_at_steps_are_asked() -> None:
    class Idle(Callback):
        pass

    own = trainer(None, Idle())
    own.train(loader(), epochs=1)
    assert own.cursor.global_step == 6


def test_a_skipped_step_counts_as_a_step_without_a_loss(in_tmp: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(24, 6), torch.randint(3, (24,))
    x[9] = float("nan")
    losses = Losses()
    own = Trainer(
        model(),
        config=config(training__batch_size=8, training__log_every=3, data__shuffle=False),
        callbacks=[losses],
        run_dir="run",
    )
    result = own.train((x, y), epochs=1)
    assert (result.skipped_steps, result.steps) == (1, 3)
    assert "the inputs of sample 9 are not finite" in caplog.text
    assert result.metrics["train_loss"] == pytest.approx((losses.seen[1] + losses.seen[3]) / 2)
    assert all(torch.isfinite(value).all() for value in own.model.state_dict().values())


def test_labels_out_of_range_are_checked_beforehand_on_a_gpu() -> None:
    """The check of the first epoch, driven here on the CPU."""
    from distributed_training.runtime.errors import DataError
    from distributed_training.training import loop

    class Gpu(loop.Loop):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._checked_epoch = 0

    own = trainer(data__shuffle=False, training__batch_size=8)
    own.num_classes = 3
    y = torch.zeros(24).long()
    y[5] = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distributed_training.training.session.Loop", Gpu)
        with pytest.raises(DataError, match="sample 5 has label 3, but the model has classes 0 to 2"):
            own.train((torch.randn(24, 6), y), epochs=1)


class TestLossMeter:
    def test_is_the_mean_over_samples(self) -> None:
        meter = LossMeter()
        meter.add(torch.tensor(1.0), 1, None)
        meter.add(torch.tensor(2.0), 3, torch.tensor(5.0))
        read = meter.read()
        assert read["train_loss"] == pytest.approx(7 / 4)
        assert read["grad_norm"] == 5.0

    def test_starts_anew_after_a_read(self) -> None:
        meter = LossMeter()
        meter.add(torch.tensor(1.0), 1, None)
        meter.read()
        meter.add(torch.tensor(3.0), 1, None)
        assert meter.read()["train_loss"] == 3.0

    def test_nothing_is_nan(self) -> None:
        assert LossMeter().read()["train_loss"] != LossMeter().read()["train_loss"]

    def test_long_waits_do_not_pile_up_losses(self) -> None:
        meter = LossMeter()
        for _ in range(3000):
            meter.add(torch.tensor(2.0), 2, None)
        assert len(meter._losses) < 2000
        assert meter.read()["train_loss"] == 2.0

    def test_goes_on_where_it_was(self) -> None:
        first, second = LossMeter(), LossMeter()
        for value in (1.0, 2.0):
            first.add(torch.tensor(value), 2, None)
        second.load_state(first.state())
        for meter in (first, second):
            meter.add(torch.tensor(6.0), 2, None)
        assert first.read()["train_loss"] == second.read()["train_loss"] == 3.0


def test_two_epochs_equal_a_loop_written_by_hand() -> None:
    """The same samples in the planned order, the same arithmetic."""
    from distributed_training.data import Plan

    net, reference = model(), model()
    own = Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), device="cpu", run_dir=False)
    own.train(loader(), epochs=2)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    dataset = loader().dataset
    for epoch in range(2):
        for step in range(6):
            x, y = dataset[torch.from_numpy(Plan(44, 8).ids(epoch, step))]
            optimizer.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            optimizer.step()
    for a, b in zip(net.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
