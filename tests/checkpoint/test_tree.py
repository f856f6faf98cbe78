"""Nested state comes back as it went in, with every tensor once and no pickle."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.checkpoint.tree import put_together, take_apart
from distributed_training.runtime.errors import CheckpointError


def through_json(state: Any) -> Any:
    """What a checkpoint does to a state: the description passes through JSON, the tensors are copied."""
    description, tensors = take_apart(state)
    return put_together(json.loads(json.dumps(description)), {name: t.clone() for name, t in tensors.items()})


def same(one: Any, other: Any) -> bool:
    """Equality that knows tensors, NaN, and the difference between a list and a tuple."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        0,
        2**70,
        -1.5,
        "text \u00e9 \u4e2d",
        b"\x00\xff raw",
        b"",
        float("nan"),
        float("inf"),
        -float("inf"),
        [],
        (),
        {},
        (1, (2, [3, None]), ()),
        {1: "one", 2.5: "two", None: "three", (1, 2): "pair"},
        {"$tensor": "not a tensor", "$items": [1]},
        {"": 1, "a": {"": {}}},
        [[], [()], {"x": []}],
    ],
)
def test_plain_values_come_back(state: Any) -> None:
    assert same(through_json(state), state)


@pytest.mark.parametrize(
    "array",
    [np.arange(6).reshape(2, 3), np.array(1.5), np.zeros((0, 4), np.float32), np.array([True, False]), np.float16([1])],
)
def test_numpy_arrays_come_back_as_arrays(array: np.ndarray) -> None:
    back = through_json({"a": array})["a"]
    assert isinstance(back, np.ndarray)
    assert same(back, np.asarray(array))


def test_an_array_that_may_not_be_written_to_can_be_saved() -> None:
    array = np.arange(4)
    array.flags.writeable = False
    assert same(through_json(array), np.arange(4))


def test_an_array_seen_backwards_can_be_saved() -> None:
    assert same(through_json(np.arange(4)[::-1]), np.arange(4)[::-1].copy())


def test_numpy_numbers_become_plain_numbers() -> None:
    back = through_json({"a": np.int32(3), "b": np.float32(0.5), "c": np.bool_(True)})
    assert back == {"a": 3, "b": 0.5, "c": True}
    assert [type(v) for v in back.values()] == [int, float, bool]


def test_tied_tensors_are_listed_once_and_come_back_tied() -> None:
    weight = torch.randn(3, 2)
    state = {"embedding": weight, "head": weight, "transposed": weight.t(), "part": weight[:2]}
    _, tensors = take_apart(state)
    assert sorted(tensors) == ["embedding", "part", "transposed"]
    back = through_json(state)
    assert back["embedding"] is back["head"]
    assert same(back, {**state})


def test_empty_tensors_are_never_taken_for_one_another() -> None:
    state = {"a": torch.empty(0), "b": torch.empty(0, dtype=torch.int64), "c": torch.empty(3, 0)}
    _, tensors = take_apart(state)
    assert len(tensors) == 3
    assert same(through_json(state), state)


def test_parameters_are_saved_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    back = through_json([parameter * 2, parameter])
    assert not back[0].requires_grad
    assert torch.equal(back[1], torch.ones(2))


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": torch.zeros(2)}, "a/b": torch.ones(2)},
        {1: torch.zeros(2), "1": torch.ones(2)},
        {"": torch.zeros(2), "value": torch.ones(2)},
        {"__metadata__": torch.zeros(2)},
        {(1, 2): torch.zeros(2), "(1, 2)": torch.ones(2)},
    ],
)
def test_tensors_whose_paths_look_alike_stay_apart(state: Any) -> None:
    _, tensors = take_apart(state)
    assert len(tensors) == len(state)
    assert "__metadata__" not in tensors  # that name is taken in a safetensors file
    assert same(through_json(state), state)


@pytest.mark.parametrize(
    ("state", "path", "kind"),
    [
        ({"callbacks": {"mine": [1, object()]}}, "/callbacks/mine/1", "object"),
        ({"a": {1, 2}}, "/a", "set"),
        (lambda: 1, "/", "function"),
        ({"n": 1j}, "/n", "complex"),
        ({"n": np.complex64(1)}, "/n", "complex64"),
        ({"t": np.array(["text"])}, "/t", "ndarray"),
        ({"d": np.datetime64("2020-01-01")}, "/d", "datetime64"),
    ],
)
def test_anything_else_is_refused_with_its_place(state: Any, path: str, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"state at {path} is a.*{kind}"):
        take_apart(state)


_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.builds(
        lambda n, seed: torch.from_numpy(np.random.default_rng(seed).normal(size=n)),
        st.integers(0, 3),
        st.integers(0, 99),
    )
)
_keys = (
    st.text(max_size=4) | st.integers(-3, 3) | st.sampled_from(["$tensor", "$items", "a/b", "value", "__metadata__"])
)
_states = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_states)
@settings(max_examples=150, deadline=None)
def test_any_nesting_comes_back(state: Any) -> None:
    assert same(through_json(state), state)
