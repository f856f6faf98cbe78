"""Any nested batch travels and arrives as it was; what cannot travel is named."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.wire.pair import equal, opened, sent

from distributed_training.runtime.errors import DataError
from distributed_training.wire import Batch, PeerError, RawTensor, pack_batch
from distributed_training.wire.dtypes import BY_NAME, DTYPES, DType
from distributed_training.wire.layouts import Layout
from distributed_training.wire.limits import MAX_DEPTH, MAX_LEAVES
from distributed_training.wire.tensors import Origin, describe

IDS = np.arange(3)
BY_TORCH: dict[torch.dtype, str] = {getattr(torch, dtype.name): dtype.name for dtype in DTYPES}


def travelled(data: Any, adapt: Any = None, **restore: Any) -> Any:
    """What arrives on the other side."""
    server, worker = opened()
    worker.send_batches(1, [pack_batch(0, 0, IDS, data, adapt=adapt)])
    server.receive_data(sent(worker))
    (batch,) = server.events()
    assert isinstance(batch, Batch)
    assert batch.ids.tolist() == IDS.tolist()
    return batch.data(**restore)


def from_torch(item: Any) -> RawTensor | None:
    """What an adapter for torch does."""
    if not isinstance(item, torch.Tensor):
        return None
    flat = item.contiguous().reshape(-1)
    memory = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
    return RawTensor(BY_TORCH[item.dtype], tuple(item.shape), memory)


def to_torch(dtype: DType, shape: tuple[int, ...], memory: memoryview, origin: int) -> torch.Tensor:
    """Its way back."""
    kind = getattr(torch, dtype.name)
    if not memory:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=torch.uint8).view(kind).reshape(shape)


ARRAYS = hnp.arrays(
    dtype=st.sampled_from([dtype.numpy for dtype in DTYPES if dtype.numpy is not None]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(), max_size=100)
    | st.binary(max_size=100)
)
BATCHES = st.recursive(
    ARRAYS | VALUES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=8) | st.integers(-(2**63), 2**63 - 1), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(data=BATCHES)
def test_any_nested_batch_arrives_as_it_was(data: Any) -> None:
    assert equal(travelled(data), data)


@settings(max_examples=50, deadline=None)
@given(data=st.lists(st.text(st.characters())) | st.lists(st.binary()) | st.lists(st.integers() | st.floats()))
def test_columns_arrive_as_they_were(data: list[Any]) -> None:
    if any(type(item) is int and not -(2**63) <= item < 2**64 for item in data):
        with pytest.raises(DataError, match="does not fit 64 bits"):
            describe(data)
    else:
        assert equal(travelled(data), data)
        assert equal(travelled(tuple(data)), tuple(data))


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@dataclass
class Sample:
    image: Any
    label: int


class Colour(IntEnum):
    RED = 3


class HuggingFace(UserDict):
    pass


class TestCollections:
    def test_a_named_tuple_stays_one(self) -> None:
        back = travelled(Pair(np.ones(2), [1, "a"]))
        assert type(back).__name__ == "Pair"
        assert back._fields == ("inputs", "targets")
        assert equal(tuple(back), (np.ones(2), [1, "a"]))

    def test_as_the_callers_own_class_where_it_gives_one(self) -> None:
        given = {"Pair": Pair, "Sample": Sample}
        back = travelled((Pair(1, 2), Sample(np.ones(2), 3)), types=given)
        assert type(back[0]) is Pair
        assert type(back[1]) is Sample
        assert back[1].label == 3

    def test_not_as_a_class_with_other_fields(self) -> None:
        back = travelled(Pair(1, 2), types={"Pair": namedtuple("Pair", "other fields")})
        assert back._fields == ("inputs", "targets")
        assert travelled(Sample(1, 2), types={"Sample": Pair}) == {"image": 1, "label": 2}

    def test_a_dataclass_becomes_a_dict(self) -> None:
        assert travelled(Sample(None, 3)) == {"image": None, "label": 3}

    @pytest.mark.parametrize("kind", [OrderedDict, HuggingFace])
    def test_what_is_like_a_dict_becomes_one(self, kind: type) -> None:
        back = travelled(kind({"b": 1, "a": np.ones(1)}))
        assert type(back) is dict
        assert list(back) == ["b", "a"]

    def test_fields_with_odd_names_are_renamed(self) -> None:
        odd = namedtuple("odd", ["ok", "class"], rename=True)
        assert travelled(odd(1, 2)) == (1, 2)

    def test_empty_ones(self) -> None:
        data = {"l": [], "t": (), "d": {}, "n": namedtuple("Nothing", [])()}
        assert travelled(data) == data

    def test_subclasses_of_values_become_the_values(self) -> None:
        back = travelled([Colour.RED, np.str_("s"), np.bytes_(b"b"), bytearray(b"c"), memoryview(b"d"), None])
        assert equal(back, [3, "s", b"b", b"c", b"d", None])

    def test_numbers_of_numpy_stay_numbers_of_numpy(self) -> None:
        back = travelled({"a": np.float32(1.5), "b": np.int8(-3), "c": np.bool_(True), "d": np.float64(2)})
        assert equal(back, {"a": np.float32(1.5), "b": np.int8(-3), "c": np.bool_(True), "d": np.float64(2)})


class TestArrays:
    @pytest.mark.parametrize(
        "array",
        [
            np.arange(12).reshape(3, 4).T,
            np.arange(12)[::3],
            np.arange(3, dtype=">i4"),
            np.float64(3) * np.ones(()),
            np.zeros((0, 5), np.float16),
            np.array([True, False]),
            np.array([1 + 2j], np.complex64),
        ],
    )
    def test_any_memory_order(self, array: np.ndarray) -> None:
        back = travelled(array)
        assert back.shape == array.shape
        assert np.array_equal(back, array)
        assert back.dtype == array.dtype.newbyteorder("<")

    def test_contiguous_memory_is_not_copied(self) -> None:
        array = np.arange(1000, dtype=np.float32)
        (buffer,) = describe(array).buffers
        assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)

    @pytest.mark.parametrize(
        "array", [np.array(["text"]), np.array([object()]), np.zeros(2, "M8[s]"), np.zeros(2, "i4,f4")]
    )
    def test_arrays_of_other_things_are_refused(self, array: np.ndarray) -> None:
        with pytest.raises(DataError, match=r"array of type .* at \['x'\]\[1\], which cannot be sent"):
            describe({"x": [1, array]})


class TestTorch:
    def test_every_dtype_that_torch_computes_with_is_known(self) -> None:
        every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        left_out = {d for d in every if str(d).startswith(("torch.q", "torch.bits"))}
        left_out |= {d for d in every if str(d)[6:].removeprefix("u").removeprefix("int") in "1234567"}
        assert every - left_out == set(BY_TORCH)

    def test_every_dtype_arrives_bit_for_bit(self) -> None:
        for kind, name in BY_TORCH.items():
            size = BY_NAME[name].size
            assert size == kind.itemsize
            raw = torch.randint(0, 2 if kind is torch.bool else 256, (6 * size,), dtype=torch.uint8)
            tensor = raw.view(kind).reshape(2, 3)
            back = travelled((tensor, "x"), adapt=from_torch, make=to_torch)[0]
            assert back.dtype is kind
            assert back.shape == tensor.shape
            assert torch.equal(back.reshape(-1).view(torch.uint8), raw)

    def test_without_an_adapter_they_arrive_as_bytes(self) -> None:
        tensor = torch.arange(4).to(torch.bfloat16)
        back = travelled([tensor], adapt=from_torch)[0]
        assert (back.dtype, back.shape, back.origin) == ("bfloat16", (4,), Origin.TENSOR)
        assert len(back.memory) == 8

    def test_an_unknown_type_of_an_adapter_is_refused(self) -> None:
        with pytest.raises(DataError, match="tensor of type qint8"):
            describe(object(), lambda item: RawTensor("qint8", (1,), memoryview(b"x")))


class TestRefused:
    @pytest.mark.parametrize("thing", [object(), {1, 2}, 1j, int, lambda: 0])
    def test_other_objects(self, thing: Any) -> None:
        with pytest.raises(DataError, match=r"an object of type \S+ at \['a'\]\.inputs, which cannot be sent"):
            describe({"a": Pair(thing, 0)})

    @pytest.mark.parametrize("key", [None, 1.5, (1,), 2**63])
    def test_other_keys(self, key: Any) -> None:
        with pytest.raises(DataError, match="use strings or numbers"):
            describe({key: 1})

    def test_a_list_within_itself(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        with pytest.raises(DataError, match=f"nested deeper than {MAX_DEPTH}"):
            describe(endless)

    def test_too_many(self) -> None:
        with pytest.raises(DataError, match="more than 1024"):
            describe([None] * (MAX_LEAVES + 1))
        with pytest.raises(DataError, match="more than 1024 tensors and values"):
            describe([[None] * MAX_LEAVES, None])
        with pytest.raises(DataError, match="more than 1024 collections"):
            describe([[[]] * MAX_LEAVES])
        with pytest.raises(DataError, match="a Wide of 256 fields at"):
            describe([namedtuple("Wide", [f"f{n}" for n in range(256)])(*range(256))])
        with pytest.raises(DataError, match="dimensions in all"):
            pack_batch(0, 0, IDS, [np.zeros([1] * 32)] * 65)

    def test_the_most_that_is_allowed(self) -> None:
        data = [None] * MAX_LEAVES
        assert travelled(data) == data


def layout(tree: Any) -> Layout:
    return Layout(tree)


NONSENSE: list[Any] = [
    None, [], 3, [None], ["0"], [99], [-1], [0], [0, 18, 1], [0, 18, 1, 3], [0, 18, -1, 0], [0, 18, 33, 0],
    [0, 77, 1, 0], [0, None, 1, 0], [0, [], 1, 0], [0, 18, 1, 2], [1, 1], [2, 0], [4, 0], [4, 2, 0], [4, 0, 4],
    [4, True, 0], [4, [], 0], [5, 1], [7], [7, 1], [7, ["a"]], [7, ["a", "a"], [1], [1]], [7, [[]], [1]],
    [7, [1.5], [1]], [7, {"a": 1}, [1]], [8, "A"], [8, "A", ["x"]], [8, "A", ["x", "x"], [1], [1]],
    [8, "1A", ["x"], [1]], [8, "A", ["if"], [1]], [8, None, [], []], [8, "A", [[]], [1]],
    [9, "A", ["x y"], [1]], [9, "A", [3], [1]], [8, "𝐢𝐟", ["x"], [1]], [8, "A", ["ﬁ", "fi"], [1], [1]],
]  # fmt: skip


class TestTreesFromThePeer:
    def test_nonsense_is_refused(self) -> None:
        for tree in NONSENSE:
            with pytest.raises(PeerError):
                layout(tree)

    def test_limits(self) -> None:
        deep: list[Any] = [1]
        for _ in range(MAX_DEPTH + 1):
            deep = [5, deep]
        wide = [8, "A", [f"f{n}" for n in range(256)], *[[1]] * 256]
        for tree in (deep, wide, [5, *[[1]] * (MAX_LEAVES + 1)], [5, *[[5]] * MAX_LEAVES]):
            with pytest.raises(PeerError):
                layout(tree)

    def test_sizes_are_checked(self) -> None:
        wrong: list[Any] = [-1, 1.0, True, None, 2**41]
        for dims in ([], [1, 2, 3], *[[side, 1] for side in wrong], [2**40, 2**40]):
            with pytest.raises(PeerError):
                layout([0, 18, 2, 1]).sizes(dims)

    def test_an_empty_tensor_with_absurd_sides(self) -> None:
        with pytest.raises(PeerError):
            layout([0, 18, 3, 1]).sizes([0, 2**40, 2**40])
        assert layout([0, 18, 3, 1]).sizes([0, 2**20, 2**30]) == [0]

    @pytest.mark.parametrize(
        ("tree", "dims", "buffers"),
        [
            ([2], [2], [b"\xff\xff"]),
            ([4, 0, 0], [1, 1], [b"\1\0\0\0", b"\xff"]),
            ([4, 0, 0], [1, 1], [b"\2\0\0\0", b"a"]),
            ([4, 0, 1], [2, 1], [b"\xff\xff\xff\xff\2\0\0\0", b"a"]),
            ([4, 0, 1], [0, 1], [b"", b"a"]),
            ([0, 1, 1, 1], [2], [b"\0\2"]),
        ],
    )
    def test_payloads_that_cannot_be_read(self, tree: Any, dims: list[int], buffers: list[bytes]) -> None:
        with pytest.raises(PeerError):
            layout(tree).restore(dims, [], list(map(memoryview, buffers)), lambda *a: a, {})

    def test_no_class_is_found_by_name(self) -> None:
        back = layout([9, "Path", ["x"], [1]]).restore([], ["/etc"], [], lambda *a: a, {})
        assert back == {"x": "/etc"}
        assert isinstance(back, Mapping)
