"""Users' torch datasets and preprocessing: read sample by sample, random by sample, failing by name."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract, assert_equal
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate
from torch.utils.data import Dataset as TorchBase

from distributed_training.data.arrays import ArrayDataset
from distributed_training.data.collating import collate_samples
from distributed_training.data.nested import tensors_in
from distributed_training.data.torch_dataset import (
    PreprocessedDataset,
    TorchDataset,
    as_dataset,
    fetch,
)
from distributed_training.runtime.errors import DataError


class Squares(TorchBase):
    """Plain samples."""

    classes = ["even", "odd"]

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        if not 0 <= sample < self.count:
            raise IndexError(sample)
        return torch.tensor([float(sample), sample**2]), sample % 2


class Noisy(Squares):
    """With a random part from all three global generators."""

    def __getitem__(self, sample: int) -> Any:
        return torch.tensor([sample, random.random(), np.random.rand(), torch.rand(()).item()]), sample % 2


class Batched(Squares):
    """Asked for whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []

    def __getitems__(self, samples: list[int]) -> list[Any]:
        self.asked.append(samples)
        return [self[sample] for sample in samples]


class Pair(NamedTuple):
    inputs: torch.Tensor
    target: int


class Named(Squares):
    def __getitem__(self, sample: int) -> Any:
        return Pair(*super().__getitem__(sample))


class Texts(Squares):
    def __getitem__(self, sample: int) -> Any:
        return {"text": "x" * (sample + 1), "label": sample}


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


class TestPlainDataset(DatasetContract):
    @pytest.fixture
    def dataset(self) -> TorchDataset:
        return TorchDataset(Squares())

    def test_is_the_default_collation_of_its_samples(self, dataset: TorchDataset) -> None:
        assert_equal(dataset.fetch(ids(3, 1)), default_collate([Squares()[3], Squares()[1]]))

    def test_knows_the_number_of_classes(self, dataset: TorchDataset) -> None:
        assert dataset.num_classes == 2
        assert TorchDataset([torch.zeros(1)]).num_classes is None

    def test_fingerprint_tells_content_and_length_apart(self, dataset: TorchDataset) -> None:
        others = [TorchDataset(Squares(21)), TorchDataset(Noisy()), TorchDataset(Subset(Squares(), range(19, -1, -1)))]
        prints = {dataset.fingerprint(), *(other.fingerprint() for other in others)}
        assert len(prints) == 4

    def test_nothing_has_a_fingerprint_too(self) -> None:
        assert TorchDataset([]).fingerprint() == TorchDataset([]).fingerprint()


class TestRandomDataset(DatasetContract):
    @pytest.fixture
    def dataset(self) -> TorchDataset:
        return TorchDataset(Noisy())

    def test_randomness_does_not_depend_on_the_batch(self, dataset: TorchDataset) -> None:
        whole = dataset.fetch_keyed(np.arange(20), 5)[0]
        for batch in (ids(7), ids(19, 7, 0), np.arange(20)[::-1].copy()):
            assert torch.equal(dataset.fetch_keyed(batch, 5)[0], whole[torch.from_numpy(batch)])

    def test_randomness_differs_by_key(self, dataset: TorchDataset) -> None:
        one, other = dataset.fetch_keyed(ids(3), 5)[0], dataset.fetch_keyed(ids(3), 6)[0]
        assert (one[:, 1:] != other[:, 1:]).all()

    def test_a_subset_draws_what_the_whole_dataset_draws(self, dataset: TorchDataset) -> None:
        part = TorchDataset(Subset(Noisy(), [9, 4]))
        assert_equal(part.fetch_keyed(ids(1), 5), dataset.fetch_keyed(ids(4), 5))

    def test_samples_of_concatenated_datasets_keep_their_own_randomness(self) -> None:
        both = TorchDataset(ConcatDataset([Noisy(), Noisy()]))
        assert_equal(both.fetch_keyed(ids(25, 3), 5)[0][0], both.fetch_keyed(ids(25), 5)[0][0])


class TestSubset:
    def test_is_looked_through_at_any_depth(self) -> None:
        inner = Subset(Squares(), [10, 11, 12, 13])
        dataset = TorchDataset(Subset(inner, [3, 0]))
        assert len(dataset) == 2
        assert dataset.name == "Squares"
        assert dataset.num_classes == 2
        assert dataset.fetch(ids(0, 1))[0][:, 0].tolist() == [13, 10]

    def test_of_a_batched_dataset_asks_for_whole_batches(self) -> None:
        batched = Batched()
        assert TorchDataset(Subset(batched, [5, 6, 7])).fetch(ids(2, 0))[0][:, 0].tolist() == [7, 5]
        assert batched.asked == [[7, 5]]

    def test_of_tensors_gives_its_rows(self) -> None:
        dataset = as_dataset(Subset(TensorDataset(torch.arange(10), torch.arange(10) * 2), [8, 3]))
        assert [t.tolist() for t in dataset.fetch(ids(0, 1))] == [[8, 3], [16, 6]]

    def test_a_users_subset_with_its_own_items_is_not_bypassed(self) -> None:
        class Negative(Subset):
            def __getitem__(self, index: Any) -> Any:
                x, y = super().__getitem__(index)
                return -x, y

            def __getitems__(self, indices: list[int]) -> list[Any]:
                return [self[index] for index in indices]

        dataset = TorchDataset(Negative(Squares(), [4, 2]))
        assert len(dataset) == 2
        assert dataset.fetch(ids(0, 1))[0][:, 0].tolist() == [-4, -2]


class TestWholeBatches:
    def test_getitems_is_asked_once(self) -> None:
        batched = Batched()
        batch = TorchDataset(batched).fetch(ids(3, 1, 4))
        assert batched.asked == [[3, 1, 4]]
        assert_equal(batch, TorchDataset(Squares()).fetch(ids(3, 1, 4)))

    def test_a_stack_of_datasets_works(self) -> None:
        dataset = as_dataset(StackDataset(x=Squares(), y=Squares()))
        assert dataset.fetch(ids(2))["y"][0].tolist() == [[2, 4]]

    def test_randomness_is_keyed_by_batch(self) -> None:
        class NoisyBatches(Noisy):
            def __getitems__(self, samples: list[int]) -> list[Any]:
                return [self[sample] for sample in samples]

        dataset = TorchDataset(NoisyBatches())
        assert_equal(dataset.fetch_keyed(ids(3, 4), 1), dataset.fetch_keyed(ids(3, 4), 1))

    def test_a_failing_batch_is_named(self) -> None:
        with pytest.raises(DataError, match=r"Batched: samples 2, ...: IndexError: 99"):
            TorchDataset(Batched()).fetch(ids(2, 99))


class TestErrors:
    def test_name_the_sample(self) -> None:
        with pytest.raises(DataError, match="Squares: sample 99: IndexError: 99") as caught:
            TorchDataset(Squares()).fetch(ids(0, 99))
        assert isinstance(caught.value.__cause__, IndexError)

    def test_name_the_sample_of_the_inner_dataset(self) -> None:
        with pytest.raises(DataError, match="Squares: sample 77"):
            TorchDataset(Subset(Squares(), [1, 77])).fetch(ids(1))

    def test_name_the_samples_that_do_not_fit_together(self) -> None:
        ragged = [torch.zeros(1), torch.zeros(2)]
        with pytest.raises(DataError, match=r"list: collating samples \[0, 1\]"):
            TorchDataset(ragged).fetch(ids(0, 1))

    def test_a_users_data_error_is_kept_as_it_is(self) -> None:
        class Own(Squares):
            def __getitem__(self, sample: int) -> Any:
                raise DataError("photo_17.jpg: broken")

        with pytest.raises(DataError, match=r"^photo_17.jpg: broken$"):
            TorchDataset(Own()).fetch(ids(0))

    def test_generators_are_put_back_after_an_error(self) -> None:
        before = torch.get_rng_state()
        with pytest.raises(DataError):
            TorchDataset(Noisy(), collate=lambda rows: 1 / 0).fetch(ids(0))
        assert torch.equal(before, torch.get_rng_state())


class TestAsDataset:
    def test_ours_is_taken_as_it_is(self) -> None:
        ours = ArrayDataset(torch.zeros(3))
        assert as_dataset(ours) is ours

    def test_tensors_and_arrays_are_gathered_without_python_per_sample(self) -> None:
        for samples in (TensorDataset(torch.arange(3), torch.arange(3)), torch.arange(3), np.arange(3)):
            assert isinstance(as_dataset(samples), ArrayDataset)
            assert isinstance(as_dataset(samples, default_collate), ArrayDataset)
        assert [t.tolist() for t in as_dataset(TensorDataset(torch.arange(3), -torch.arange(3))).fetch(ids(2))] == [
            [2],
            [-2],
        ]

    def test_a_users_collation_is_kept(self) -> None:
        def collate(rows: list[Any]) -> Any:
            return {"sum": torch.stack([row[0].sum() for row in rows])}

        assert as_dataset(Squares(), collate).fetch(ids(3, 2))["sum"].tolist() == [12, 6]
        tensors = TensorDataset(torch.ones(4, 2))
        assert as_dataset(tensors, collate).fetch(ids(0))["sum"].tolist() == [2]

    def test_anything_with_items_and_length_will_do(self) -> None:
        assert as_dataset([torch.tensor(5), torch.tensor(6)]).fetch(ids(1)).tolist() == [6]

    def test_what_cannot_be_indexed_is_refused(self) -> None:
        with pytest.raises(DataError, match="generator has no __getitem__ and __len__"):
            as_dataset(x for x in range(3))


def negate(sample: Any) -> Any:
    return -sample[0], sample[1]


def jitter(sample: Any, rng: np.random.Generator) -> Any:
    return sample[0] + rng.random(), sample[1]


def global_jitter(sample: Any) -> Any:
    return sample[0] + random.random() + np.random.rand() + torch.rand(()), sample[1]


class TestPreprocessed(DatasetContract):
    @pytest.fixture(params=[negate, jitter, global_jitter])
    def dataset(self, request: pytest.FixtureRequest) -> PreprocessedDataset:
        return PreprocessedDataset(ArrayDataset((torch.arange(20.0), torch.arange(20)), num_classes=20), request.param)


class TestPreprocessing:
    def base(self) -> ArrayDataset:
        return ArrayDataset((torch.arange(20.0), torch.arange(20) % 3), num_classes=3)

    def test_the_function_sees_one_sample_at_a_time(self) -> None:
        seen: list[Any] = []
        PreprocessedDataset(self.base(), lambda sample: (seen.append(sample), sample)[1]).fetch(ids(4, 5))
        assert [[float(v) for v in sample] for sample in seen] == [[4, 1], [5, 2]]

    def test_what_it_returns_is_the_batch(self) -> None:
        dataset = PreprocessedDataset(self.base(), lambda s: {"x": s[0] * 2, "y": int(s[1])})
        batch = dataset.fetch(ids(4, 5))
        assert batch["x"].tolist() == [8, 10]
        assert batch["y"].tolist() == [1, 2]
        assert len(dataset) == 20
        assert dataset.num_classes == 3

    @pytest.mark.parametrize("function", [jitter, global_jitter])
    def test_randomness_is_by_key_and_sample_alone(self, function: Any) -> None:
        dataset = PreprocessedDataset(self.base(), function)
        whole = dataset.fetch_keyed(np.arange(20), 8)[0]
        assert torch.equal(dataset.fetch_keyed(ids(13, 2), 8)[0], whole[[13, 2]])
        assert (dataset.fetch_keyed(np.arange(20), 9)[0] != whole).all()
        offsets = whole - torch.arange(20.0)
        assert len(offsets.unique()) > 15

    def test_randomness_of_the_dataset_below_is_keyed_too(self) -> None:
        dataset = PreprocessedDataset(TorchDataset(Noisy()), lambda sample: sample)
        assert_equal(dataset.fetch_keyed(ids(3), 4), TorchDataset(Noisy()).fetch_keyed(ids(3), 4))

    def test_global_generators_are_left_alone(self) -> None:
        before = torch.get_rng_state(), random.getstate()
        PreprocessedDataset(self.base(), global_jitter).fetch(ids(1))
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1] == random.getstate()

    def test_dicts_named_tuples_and_texts_come_apart_by_sample(self) -> None:
        arrays = ArrayDataset({"x": torch.arange(4), "y": torch.arange(4) * 2})
        assert PreprocessedDataset(arrays, lambda s: s["x"] + s["y"]).fetch(ids(2, 1)).tolist() == [6, 3]
        named = PreprocessedDataset(TorchDataset(Named()), lambda s: s.inputs.sum() + s.target)
        assert named.fetch(ids(3, 2)).tolist() == [13, 6]
        texts = PreprocessedDataset(TorchDataset(Texts()), lambda s: (len(s["text"]), s["label"]))
        assert [t.tolist() for t in texts.fetch(ids(5, 0))] == [[6, 1], [5, 0]]

    def test_a_failing_sample_is_named(self) -> None:
        def pick(sample: Any) -> Any:
            return [10, 20][int(sample[1])]

        with pytest.raises(DataError, match=r"my:pick: sample 2: IndexError"):
            PreprocessedDataset(self.base(), pick, name="my:pick").fetch(ids(0, 2))

    def test_results_that_do_not_fit_together_are_named(self) -> None:
        with pytest.raises(DataError, match="my:grow: batching what it returned"):
            PreprocessedDataset(self.base(), lambda s: torch.zeros(int(s[0])), name="my:grow").fetch(ids(1, 2))

    def test_builtins_without_a_signature_can_be_used(self) -> None:
        assert PreprocessedDataset(ArrayDataset(torch.arange(3)), max).fetch  # max() has no signature
        assert PreprocessedDataset(ArrayDataset(torch.tensor([[3, 4]])), max).fetch(ids(0)).tolist() == [4]

    def test_fingerprint_is_of_the_data_below_and_the_name_of_the_function(self) -> None:
        one, same = (PreprocessedDataset(self.base(), negate, name="my:negate") for _ in range(2))
        other = PreprocessedDataset(self.base(), negate, name="my:other")
        assert one.fingerprint() == same.fingerprint()
        assert len({one.fingerprint(), other.fingerprint(), self.base().fingerprint()}) == 3

    def test_what_it_draws_has_nothing_to_do_with_what_the_dataset_drew(self) -> None:
        class Noise(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return 3

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.rand(4)

        drawn = PreprocessedDataset(as_dataset(Noise()), lambda s: torch.stack([s, torch.rand(4)])).fetch(ids(0, 1))
        assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_fetch_gives_the_key_only_to_those_that_use_it() -> None:
    arrays = ArrayDataset(torch.arange(3))
    assert torch.equal(fetch(arrays, ids(1), 1), fetch(arrays, ids(1), 2))
    assert not torch.equal(fetch(TorchDataset(Noisy()), ids(1), 1)[0], fetch(TorchDataset(Noisy()), ids(1), 2)[0])


@pytest.mark.parametrize(
    "rows",
    [
        [(torch.rand(3), 1), (torch.rand(3), 2)],
        [(torch.rand(2), 1.5, 7), (torch.rand(2), -2.0, 2**40)],
        [{"x": torch.ones(2, dtype=torch.int8), "y": 3}, {"y": 4, "x": torch.zeros(2, dtype=torch.int8)}],
        [(torch.rand(2), True), (torch.rand(2), False)],
        [(torch.rand(2), 1), (torch.rand(2), 2.5)],
        [(torch.rand(2), "a"), (torch.rand(2), "b")],
        [(np.zeros(2), np.float32(1)), (np.ones(2), np.float32(2))],
        [(np.zeros((2, 3), np.int16), np.int64(1)), (np.ones((2, 3), np.int16), np.int64(2))],
        [{"x": np.zeros(2), "y": np.bool_(True)}, {"x": np.zeros(2, np.float32), "y": np.bool_(False)}],
        [(np.zeros(2)[::2], np.str_("a")), (np.ones(2)[::2], np.str_("b"))],
        [[torch.rand(2), 1], [torch.rand(2), 2]],
        [(torch.rand(2), (1, torch.rand(1))), (torch.rand(2), (2, torch.rand(1)))],
        [torch.rand(2), torch.rand(2)],
        [3, 4],
    ],
)
def test_samples_are_put_together_as_torch_does(rows: list[Any]) -> None:
    ours, theirs = collate_samples(rows), default_collate(rows)
    assert type(ours) is type(theirs)
    assert repr(ours) == repr(theirs)
    assert [t.dtype for t in tensors_in(ours)] == [t.dtype for t in tensors_in(theirs)]


@pytest.mark.parametrize("rows", [[(torch.rand(2), 1), (torch.rand(3), 1)], [(1, 2), (1,)], [{"x": 1}, {"y": 2}]])
def test_samples_that_do_not_fit_together_fail_as_in_torch(rows: list[Any]) -> None:
    with pytest.raises((RuntimeError, KeyError)) as ours:
        collate_samples(rows)
    with pytest.raises((RuntimeError, KeyError)) as theirs:
        default_collate(rows)
    assert str(ours.value) == str(theirs.value)
