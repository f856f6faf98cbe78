"""The local loader: the plan's batches, bit for bit the same with workers, from any step on, and never a hang."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.contract.dataset import assert_equal

from distributed_training.data import loader as loader_module
from distributed_training.data import steps as steps_module
from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.base import Batch, Dataset
from distributed_training.data.loader import Loader
from distributed_training.data.plan import Plan
from distributed_training.data.torch_dataset import as_dataset
from distributed_training.runtime.errors import DataError

MAIN = os.getpid()


class Noisy:
    """A user's dataset with augmentation from all three global generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([sample, random.random(), np.random.rand(), torch.rand(()).item()]), sample


class Faulty:
    """Samples of which number 5 does something bad."""

    def __init__(self, bad: Any) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, sample: int) -> torch.Tensor:
        if sample == 5:
            self.bad()
        return torch.tensor(sample)


class Counted:
    """Samples that count how often they are loaded, by whichever process."""

    def __init__(self) -> None:
        self.loaded = multiprocessing.Value("i", 0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, sample: int) -> torch.Tensor:
        with self.loaded.get_lock():
            self.loaded.value += 1
        return torch.tensor(sample)

    def settle(self, least: int) -> int:
        """How many, once there are so many and nothing more is loaded."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            before = self.loaded.value
            time.sleep(0.3)
            if self.loaded.value == before >= least:
                return before
        raise AssertionError(f"{self.loaded.value} were loaded")


def numbers(count: int) -> ArrayDataset:
    return ArrayDataset((torch.arange(count), torch.arange(count) * 2), name="numbers")


def noisy(workers: int = 0, **plan: Any) -> Loader:
    return Loader(as_dataset(Noisy()), Plan(23, 4, seed=7, **plan), num_workers=workers, deadline=60)


def faulty(bad: Any, workers: int, deadline: float = 60) -> Loader:
    return Loader(as_dataset(Faulty(bad)), Plan(12, 4, shuffle=False), num_workers=workers, deadline=deadline)


def assert_same(one: list[tuple[int, Batch]], other: list[tuple[int, Batch]]) -> None:
    assert [step for step, _ in one] == [step for step, _ in other]
    for (_, a), (_, b) in zip(one, other):
        assert a.ids.tolist() == b.ids.tolist()
        assert type(a.data) is type(b.data)
        assert_equal(a.data, b.data)


def both_at_work(batches: Iterator[tuple[int, Batch]]) -> list[tuple[int, Batch]]:
    """A batch of each of two workers. One that is ended before its first batch is out leaves a temporary folder."""
    return [next(batches), next(batches)]


def processes() -> list[psutil.Process]:
    """Processes of this one; those that start ranks for other tests stay for the whole session."""
    found = psutil.Process().children()
    words = [" ".join(one.as_dict(["cmdline"])["cmdline"] or []) for one in found]
    return [one for one, said in zip(found, words) if "rank_server.py" not in said]


def children() -> int:
    return len(processes())


@pytest.fixture(params=[0, 2], ids=["in-process", "workers"])
def workers(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param
    assert children() == 0 or request.param


class TestOrder:
    def test_batches_come_in_the_order_of_the_plan(self, workers: int) -> None:
        plan = Plan(23, 4, seed=1)
        with closing(Loader(numbers(23), plan, num_workers=workers)) as loader:
            seen = list(loader.batches(2))
        assert [step for step, _ in seen] == list(range(6)) == list(range(loader.steps_per_epoch))
        for step, batch in seen:
            assert batch.ids.tolist() == plan.ids(2, step).tolist() == batch.data[0].tolist()
            assert batch.size == len(batch.ids)
            assert isinstance(batch.data, tuple), "as the dataset gave it, from workers too"

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_long_epochs_are_complete(self, drop_last: bool) -> None:
        """Ids are computed for many steps at once: nothing may be lost where one lot ends."""
        plan = Plan(1301, 10, drop_last=drop_last)
        seen = [batch for _, batch in Loader(numbers(1301), plan).batches(0)]
        assert len(seen) == plan.steps_per_epoch > 2 * steps_module._STEPS_AT_ONCE
        assert all(batch.ids.tolist() == plan.ids(0, step).tolist() for step, batch in enumerate(seen))
        assert len(np.unique(np.concatenate([b.ids for b in seen]))) == (1300 if drop_last else 1301)

    def test_changing_a_batch_in_place_reaches_no_other_batch(self, workers: int) -> None:
        """Small samples are gathered for several steps at once, and each batch is a view of that."""
        with closing(Loader(numbers(23), Plan(23, 4), num_workers=workers)) as loader:
            for _, batch in loader.batches(0):
                assert batch.data[1].tolist() == (batch.ids * 2).tolist()
                batch.data[1].fill_(-1)
                batch.ids[:] = -1

    @pytest.mark.parametrize("arrays", [torch.arange(300), {"x": torch.arange(300)}, [torch.arange(300)]])
    def test_a_resume_in_the_middle_of_what_is_gathered_together_is_the_tail(self, arrays: Any) -> None:
        loader = Loader(ArrayDataset(arrays), Plan(300, 3))
        whole = list(loader.batches(0))
        for start in (1, 63, 64, 65, 99):
            assert_same(whole[start:], list(loader.batches(0, start)))

    def test_every_sample_in_order_on_request(self) -> None:
        shuffled = Loader(numbers(10), Plan(10, 4, drop_last=True), deadline=9)
        ordered = shuffled.in_order()
        assert np.concatenate([b.ids for _, b in ordered.batches(3)]).tolist() == list(range(10))
        assert ordered.in_order() is ordered
        assert shuffled.plan.shuffle, "the loader itself is as before"

    def test_describes_plan_and_data(self) -> None:
        described = Loader(numbers(10), Plan(10, 4)).describe()
        assert described == {**Plan(10, 4).describe(), "dataset": numbers(10).fingerprint()}
        assert described != Loader(numbers(10), Plan(10, 4, seed=1)).describe()
        assert described["dataset"] != Loader(numbers(11), Plan(11, 4)).describe()["dataset"]


class TestSameWithWorkers:
    def test_batches_are_bit_identical_with_the_users_own_randomness(self) -> None:
        with closing(noisy(workers=2)) as parallel:
            for epoch in (0, 1):  # the second epoch with the same processes
                assert_same(list(noisy().batches(epoch)), list(parallel.batches(epoch)))

    def test_augmentation_differs_by_epoch_and_sample(self) -> None:
        first, second = (
            {int(row[0]): row[1:].tolist() for _, batch in noisy().batches(epoch) for row in batch.data[0]}
            for epoch in (0, 1)
        )
        values = [*first.values(), *second.values()]
        assert len({tuple(v) for v in values}) == 46

    def test_augmentation_does_not_depend_on_the_batch_size(self) -> None:
        small, large = (
            {
                int(row[0]): row.tolist()
                for _, batch in Loader(as_dataset(Noisy()), Plan(23, size, seed=7)).batches(1)
                for row in batch.data[0]
            }
            for size in (2, 23)
        )
        assert small == large

    def test_global_generators_are_left_alone(self, workers: int) -> None:
        def state() -> tuple[Any, ...]:
            return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

        before = state()
        with closing(noisy(workers)) as loader:
            list(loader.batches(0))
            list(loader.batches(1))
        assert state() == before

    def test_what_users_draw_meanwhile_does_not_change_the_batches(self) -> None:
        expected = list(noisy().batches(0))
        seen = []
        for step, batch in noisy().batches(0):
            random.random(), np.random.rand(), torch.rand(3)
            seen.append((step, batch))
        assert_same(expected, seen)


class TestResume:
    def test_any_step_on_is_the_tail_of_the_epoch(self, workers: int) -> None:
        whole = list(noisy().batches(1))
        with closing(noisy(workers)) as loader:
            for start in range(len(whole) + 1):
                assert_same(whole[start:], list(loader.batches(1, start)))

    def test_a_new_call_in_the_middle_starts_cleanly(self, workers: int) -> None:
        with closing(noisy(workers)) as loader:
            abandoned = loader.batches(0)
            next(abandoned), next(abandoned)
            assert_same(list(noisy().batches(1)), list(loader.batches(1)))
            abandoned = loader.batches(2)
            next(abandoned)
            assert_same(list(noisy().batches(2, 3)), list(loader.batches(2, 3)))

    def test_going_on_with_an_old_call_takes_nothing_from_the_new_one(self, workers: int) -> None:
        with closing(noisy(workers)) as loader:
            old = loader.batches(0)
            next(old)
            new = loader.batches(1)
            seen = [next(new)]
            next(old, None)
            assert_same(list(noisy().batches(1)), seen + list(new))

    def test_an_iteration_ends_when_the_loader_is_closed(self) -> None:
        loader = noisy(workers=2)
        batches = loader.batches(0)
        both_at_work(batches)
        loader.close()
        assert list(batches) == []


class TestNextEpoch:
    """Workers load the beginning of the next epoch while the end of this one is dealt with."""

    def test_it_is_begun_where_training_goes_on_and_only_there(self) -> None:
        for epochs, ahead in ((2, True), (1, False), (None, False)):
            samples = Counted()
            with closing(Loader(as_dataset(samples), Plan(12, 2, seed=3), num_workers=1)) as loader:
                loader.epochs = epochs
                list(loader.batches(0))
                # Two batches of two samples are asked of a worker ahead of time.
                assert samples.settle(12 + 4 * ahead) == 12 + 4 * ahead, epochs

    def test_no_sample_is_loaded_twice_for_it(self) -> None:
        samples = Counted()
        with closing(Loader(as_dataset(samples), Plan(12, 2, seed=3), num_workers=2)) as loader:
            loader.epochs = 3
            for epoch in range(3):
                list(loader.batches(epoch))
            assert samples.settle(36) == 36

    @pytest.mark.parametrize("start", [0, 3])
    def test_batches_are_those_of_the_plan(self, start: int) -> None:
        with closing(noisy(workers=2)) as loader:
            loader.epochs = 3
            assert_same(list(noisy().batches(0, start)), list(loader.batches(0, start)))
            assert_same(list(noisy().batches(1)), list(loader.batches(1)))
            again = loader.batches(1)  # not what the workers have begun with
            first = [next(again), next(again)]
            assert_same(list(noisy().batches(1)), first + list(again))
            assert_same(list(noisy().batches(2)), list(loader.batches(2)))
            loader.epochs = 5
            assert_same(list(noisy().batches(3)), list(loader.batches(3)))
            assert_same(list(noisy().batches(4)), list(loader.batches(4)))

    def test_an_epoch_of_which_nothing_is_left_changes_nothing(self) -> None:
        steps = noisy().steps_per_epoch
        with closing(noisy(workers=2)) as loader:
            loader.epochs = 3
            batches = loader.batches(0)
            both_at_work(batches)
            assert list(loader.batches(0, steps)) == []
            assert_same(list(noisy().batches(0, 2)), list(loader.batches(0, 2)))

    def test_a_bad_sample_in_it_is_told_in_its_turn(self) -> None:
        tries = multiprocessing.Value("i", 0)

        def fail_from_the_second_time_on() -> None:
            tries.value += 1
            if tries.value > 1:
                raise ValueError("no such file")

        with closing(faulty(fail_from_the_second_time_on, workers=1)) as loader:
            loader.epochs = 2
            assert len(list(loader.batches(0))) == 3
            later = loader.batches(1)
            assert next(later)[0] == 0
            with pytest.raises(DataError, match=r"sample 5: ValueError: no such file.*at epoch 1, step 1"):
                next(later)
            tries.value = 0
            assert_same(list(faulty(lambda: None, 0).batches(1)), list(loader.batches(1)))


class TestProcesses:
    def test_workers_stay_for_the_next_epoch_and_end_on_close(self) -> None:
        loader = noisy(workers=2)
        assert children() == 0, "no process before the first batch"
        pids = []
        for epoch in (0, 1):
            list(loader.batches(epoch))
            pids.append(sorted(child.pid for child in processes()))
        assert pids[0] == pids[1]
        assert len(pids[0]) == 2
        loader.close()
        assert children() == 0
        loader.close()

    def test_closing_in_the_middle_ends_the_workers(self) -> None:
        loader = noisy(workers=2)
        batches = loader.batches(0)
        both_at_work(batches)
        assert children() == 2
        loader.close()
        assert children() == 0

    def test_a_closed_loader_can_be_used_again(self) -> None:
        loader = noisy(workers=1)
        list(loader.batches(0))
        loader.close()
        assert_same(list(noisy().batches(1)), list(loader.batches(1)))
        loader.close()

    def test_ctrl_c_does_not_reach_the_workers(self) -> None:
        with closing(noisy(workers=2)) as loader:
            batches = loader.batches(0)
            seen = both_at_work(batches)
            for child in processes():
                os.kill(child.pid, signal.SIGINT)
            assert_same(list(noisy().batches(0)), seen + list(batches))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: see tests/gpu")
    def test_nothing_is_pinned_without_a_gpu(self, workers: int) -> None:
        with closing(Loader(numbers(4), Plan(4, 2), num_workers=workers, pin_memory=True)) as loader:
            assert [batch.data[0].is_pinned() for _, batch in loader.batches(0)] == [False, False]


class TestTrouble:
    def test_an_empty_dataset_is_refused(self) -> None:
        with pytest.raises(DataError, match="ArrayDataset: the dataset is empty"):
            Loader(ArrayDataset((torch.zeros(0, 2),)), Plan(0, 1))

    def test_a_batch_larger_than_the_dataset_is_refused(self) -> None:
        with pytest.raises(DataError, match=r"batch of 32 is larger .* 10 samples; set training.batch_size to 10"):
            Loader(numbers(10), Plan(10, 32))

    def test_a_failing_sample_is_named(self, workers: int) -> None:
        def fail() -> None:
            raise KeyError("no such label")

        with closing(faulty(fail, workers)) as loader:
            batches = loader.batches(0)
            assert next(batches)[0] == 0
            with pytest.raises(DataError, match=r"Faulty: sample 5: KeyError: 'no such label'") as caught:
                next(batches)
            assert [step for step, _ in loader.batches(0, 2)] == [2], "the other batches can still be had"
        assert f"{__file__}:" in str(caught.value), "the user's own line is named"
        if workers:
            assert "epoch 0, step 1" in str(caught.value)
        else:
            assert isinstance(caught.value.__cause__, KeyError)

    def test_an_error_outside_a_sample_is_reported_from_workers_too(self) -> None:
        class Broken(Dataset):
            def __len__(self) -> int:
                return 4

            def fetch(self, ids: np.ndarray) -> Any:
                raise OSError("disk on fire")

            def fingerprint(self) -> str:
                return ""

        with (
            closing(Loader(Broken(), Plan(4, 2), num_workers=1)) as loader,
            pytest.raises(DataError, match="OSError: disk on fire"),
        ):
            next(loader.batches(0))

    def test_a_killed_worker_is_noticed_at_once(self) -> None:
        def die() -> None:
            assert os.getpid() != MAIN
            time.sleep(0.3)  # the other worker is at work by then
            os.kill(os.getpid(), signal.SIGKILL)

        with closing(faulty(die, workers=2)) as loader:
            started = time.monotonic()
            with pytest.raises(DataError, match=r"a loader process died .*lower data.num_workers"):
                list(loader.batches(0))
            assert time.monotonic() - started < 10
        assert children() == 0

    def test_a_sample_slower_than_the_deadline_is_an_error(self) -> None:
        with closing(faulty(lambda: time.sleep(2.5), workers=1, deadline=1)) as loader:
            started = time.monotonic()
            with pytest.raises(DataError, match=r"no batch .* within 1 s; .*run.deadline"):
                list(loader.batches(0))
            assert time.monotonic() - started < 2.5

    def test_other_errors_are_passed_on(self) -> None:
        """What torch raises for reasons of its own is not dressed up as a dead worker."""
        error = RuntimeError("something else")
        assert loader_module._worker_error(error, 1.0) is error
