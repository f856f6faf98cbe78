"""The staging buffer is byte for byte the safetensors file that it becomes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from distributed_training.checkpoint.staging import _DTYPE_NAMES, Staging
from distributed_training.runtime.errors import CheckpointError


def image(staging: Staging) -> bytes:
    """The file as it would be written."""
    return b"".join(bytes(part) for part in staging.parts())


def example(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Values that differ from each other in every type."""
    size = torch.Size(shape).numel()
    raw = torch.arange(size * dtype.itemsize, dtype=torch.int64) % 2 if dtype == torch.bool else None
    if raw is not None:
        return raw[:size].to(torch.bool).reshape(shape)
    return (torch.arange(size * dtype.itemsize, dtype=torch.int64) % 100).to(torch.uint8).view(dtype).reshape(shape)


def assert_same(read: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        if tensor.numel():
            one, other = read[name].contiguous().reshape(-1), tensor.contiguous().reshape(-1)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", _DTYPE_NAMES, ids=str)
def test_every_type_is_read_back_by_safetensors(dtype: torch.dtype) -> None:
    tensors = {"matrix": example(dtype, 3, 5), "scalar": example(dtype, 1)[0], "empty": example(dtype, 0, 4)}
    staging = Staging()
    staging.copy(tensors)
    assert_same(load(image(staging)), tensors)


def test_all_types_in_one_file_lie_at_multiples_of_their_size() -> None:
    tensors = {f"t{i}": example(dtype, 2 * i + 1) for i, dtype in enumerate(_DTYPE_NAMES)}
    staging = Staging()
    staging.copy(tensors)
    assert len(staging.header) % 8 == 0
    assert_same(load(image(staging)), tensors)


def test_views_are_written_as_they_look() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "transposed": base.t(),
        "columns": base[:, 1:4],
        "every_other": base[::2, ::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "flipped": base.flip(0),
    }
    staging = Staging()
    staging.copy(tensors)
    assert_same(load(image(staging)), tensors)


def test_nothing_at_all_is_a_valid_file() -> None:
    staging = Staging()
    staging.copy({})
    assert load(image(staging)) == {}


def test_the_copy_is_independent_of_what_was_copied() -> None:
    tensor = torch.ones(4)
    staging = Staging()
    staging.copy({"t": tensor})
    tensor.zero_()
    assert torch.equal(load(image(staging))["t"], torch.ones(4))


def test_the_buffer_is_used_again_while_the_shapes_stay() -> None:
    staging = Staging()
    staging.copy({"a": torch.ones(1000), "b": torch.ones(3, dtype=torch.int64)})
    place = staging._buffer.data_ptr()
    staging.copy({"b": torch.full((3,), 7), "a": torch.zeros(1000)})  # the order of the names does not matter
    assert staging._buffer.data_ptr() == place
    assert_same(load(image(staging)), {"a": torch.zeros(1000), "b": torch.full((3,), 7)})


@pytest.mark.parametrize(
    "after",
    [
        {"a": torch.ones(5)},
        {"a": torch.ones(2, 2)},
        {"a": torch.ones(4, dtype=torch.float64)},
        {"b": torch.ones(4)},
        {"a": torch.ones(4), "b": torch.ones(1)},
        {},
    ],
)
def test_another_layout_makes_another_file(after: dict[str, torch.Tensor]) -> None:
    staging = Staging()
    staging.copy({"a": torch.zeros(4)})
    staging.copy(after)
    assert_same(load(image(staging)), after)


def test_preparing_makes_the_buffer_that_copying_uses() -> None:
    staging = Staging()
    staging.prepare({"a": torch.ones(10)})
    place = staging._buffer.data_ptr()
    staging.copy({"a": torch.ones(10)})
    assert staging._buffer.data_ptr() == place


def test_a_type_that_safetensors_lacks_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"model/w: .*complex128"):
        Staging().copy({"model/w": torch.zeros(2, dtype=torch.complex128)})
