"""`run.stop_after_steps` ends a training at a step, and a resume goes on from there."""

from __future__ import annotations

from pathlib import Path

from tests.training.examples import assert_same_weights, loader, model, trainer


def test_it_ends_at_that_step_and_goes_on_later(tmp_path: Path) -> None:
    whole, parts = model(), model()
    trainer(whole).train(loader(), epochs=2)
    for steps in (4, 4, 6, 11):  # 6 steps an epoch; the second 4 has nothing left to do
        result = trainer(parts, run_dir=tmp_path, run__stop_after_steps=steps).train(loader(), epochs=2, resume="auto")
        assert (result.status, result.steps) == ("stopped early", steps)
        assert result.reason == f"run.stop_after_steps={steps}"
    result = trainer(parts, run_dir=tmp_path, run__stop_after_steps=99).train(loader(), epochs=2, resume="auto")
    assert (result.status, result.steps) == ("completed", 12)
    assert_same_weights(whole, parts)
