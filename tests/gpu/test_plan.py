"""What a plan is made from, measured on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_training.config import Config
from distributed_training.planning.measuring import Laboratory


@pytest.mark.timeout(400)
def test_all_batch_sizes_are_measured_with_what_training_would_choose(tmp_path: Path) -> None:
    data = {"dataset": "synthetic", "args": {"samples": 2048, "shape": [3, 32, 32], "classes": 10}}
    config = Config.from_dict({"model": {"name": "resnet18"}, "data": data, "run": {"cache": str(tmp_path / "cache")}})
    lab = Laboratory(config, tmp_path, None, 380.0, lambda line: None, seconds=0.3)

    profile = lab.profile({1: [16, 256]})

    assert set(profile.settled) == {"training.precision", "training.channels_last"}
    assert "auto" not in profile.settled.values()
    assert profile.model["precision"] == lab.config.training.precision == profile.settled["training.precision"]
    small, between, large = (max(peak for _, peak in profile.timeline(batch)) for batch in (16, 136, 256))
    assert between == pytest.approx((small + large) / 2, rel=0.01)
    assert large > 2 * small
