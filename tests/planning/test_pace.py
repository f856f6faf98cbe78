"""What becomes of a profile when the machine is measured again, and the noise that is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.planning.made_up import profile

from distributed_training.config import Config
from distributed_training.planning.measuring import Laboratory
from distributed_training.planning.pace import Pace, steps_for


def pace(folder: Path, device: str = "cpu") -> Pace:
    return Pace(Laboratory(Config(), folder, 1, 60.0, lambda line: None), profile(device))


def test_a_profile_comes_to_the_middle_of_all_turns(tmp_path: Path) -> None:
    found = pace(tmp_path)
    before = {batch: found._profile.parts(batch, 1).whole for batch in (8, 16)}
    found.seen = {(1, 16): [1.4 * before[16], 1.5 * before[16], 9.0], (1, 12): [100.0], (2, 16): [100.0]}

    found._profile.own = {"deepspeed 2": 0.02}

    assert found.rebase() == {1: pytest.approx(1.5)}
    assert found._profile.own == {"deepspeed 2": pytest.approx(0.03)}
    assert found._profile.parts(16, 1).whole == pytest.approx(1.5 * before[16])
    assert found._profile.parts(8, 1).whole == pytest.approx(1.5 * before[8]), "the machine is slower for all sizes"


def test_without_turns_nothing_changes(tmp_path: Path) -> None:
    found = pace(tmp_path)
    before = found._profile.parts(16, 1)

    assert found.rebase() == {1: 1.0}
    assert found._profile.parts(16, 1) == before
    assert found.noise is None


def test_noise_is_how_far_steps_are_from_their_own_median(tmp_path: Path) -> None:
    found = pace(tmp_path)
    found.seen = {(1, 16): [1.0, 1.0, 1.1], (2, 8): [2.0, 1.8, 2.0]}

    assert found.noise == (pytest.approx(0.0), pytest.approx(0.1))


def test_a_gpu_keeps_its_pace(tmp_path: Path) -> None:
    with pace(tmp_path, "cuda") as found:
        assert found.now(2, 16) == 1.0

    assert found.seen == {}


def test_a_turn_has_a_few_steps_at_least() -> None:
    assert [steps_for(seconds) for seconds in (10.0, 0.11, 1e-4)] == [3, 5, 60]
