"""Whether other threads help: the quicker way is found by trying both; without a gain none does."""

from __future__ import annotations

import random

from distributed_training.feed.helper_choice import HelperChoice

FRAME = 1 << 20


def shares(
    here: float, aside: float, *, cores: int = 16, size: int = FRAME, frames: int = 3000, quick: bool = False
) -> float:
    """The share of frames that are left to the other thread, where a frame takes so many seconds either way."""
    choice, now, left = HelperChoice(cores), 100.0, 0
    for _ in range(frames):
        if choice.put(now, size, quick=quick):
            left += 1
            now += aside
        else:
            now += here
    return left / frames


def test_the_quicker_way_is_kept() -> None:
    assert shares(0.003, 0.002) > 0.9
    assert shares(0.002, 0.003) < 0.1


def test_without_a_gain_the_loading_thread_sends() -> None:
    assert shares(0.002, 0.002) < 0.1
    assert shares(0.002, 0.00195) < 0.1


def test_there_is_no_choice_without_a_core_to_spare_nor_for_small_frames() -> None:
    assert shares(0.003, 0.001, cores=2) == 0
    assert shares(0.003, 0.001, cores=1, quick=True) == 0
    assert shares(0.003, 0.001, size=64 << 10) == 0


def test_samples_that_are_loaded_need_no_third_core() -> None:
    assert shares(0.003, 0.002, cores=2, quick=True) > 0.9
    assert shares(0.002, 0.003, cores=2, quick=True) < 0.1


def test_what_was_found_is_found_anew_when_it_changes() -> None:
    choice, now = HelperChoice(16), 0.0
    found = []
    for aside in (0.001, 0.01, 0.001):
        for _ in range(4000):
            now += aside if choice.put(now, FRAME) else 0.003
        found.append(choice.helped)
    assert found == [True, False, True]


def test_a_connection_that_begins_slowly_says_nothing_of_a_way() -> None:
    choice, now = HelperChoice(16), 0.0
    for frame in range(1000):
        cold = 0.006 if frame < 10 else 0.0
        now += cold + (0.0022 if choice.put(now, FRAME) else 0.002)
    assert not choice.helped


def test_what_slows_some_turns_down_does_not_decide() -> None:
    numbers = random.Random(0)
    for here, aside in ((0.002, 0.003), (0.003, 0.002)):
        choice, now, slow = HelperChoice(16), 0.0, 1.0
        for frame in range(4000):
            if frame % 20 == 0:
                slow = numbers.choice([1.0, 1.0, 2.0])
            now += slow * (aside if choice.put(now, FRAME) else here)
        assert choice.helped == (aside < here)
