"""What each precision means on a device."""

from __future__ import annotations

import pytest
import torch

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies.precision import Precision, resolve_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_a_cpu_has_these(name: str) -> None:
    assert resolve_precision(name, CPU) == name


def test_auto_is_fp32_on_a_cpu() -> None:
    assert resolve_precision("auto", CPU) == "fp32"


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"tf32 needs an NVIDIA GPU; use fp32 or bf16"):
        Precision("tf32", CPU)


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16")])
def test_auto_is_what_a_gpu_computes_fast(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_precision("auto", GPU) == name
    assert resolve_precision("tf32", GPU) == "tf32"


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_computes_in_that_type_every_time_it_is_entered(name: str, dtype: torch.dtype) -> None:
    autocast = Precision(name, CPU).autocast
    for _ in range(2):
        with autocast:
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize(("name", "scaled"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_scales_the_loss(name: str, scaled: bool) -> None:
    assert (Precision(name, CPU).scaler is not None) == scaled


def test_a_cpu_leaves_the_switches_alone() -> None:
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    precision = Precision("bf16", CPU)
    precision.apply()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
    precision.restore()


@pytest.mark.parametrize(("name", "matmul", "cudnn"), [("fp32", "highest", False), ("tf32", "high", True)])
def test_the_switches_of_a_gpu_are_set_and_put_back(name: str, matmul: str, cudnn: bool) -> None:
    """The switches are the process's, so they can be looked at without a GPU."""
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    precision = Precision(name, GPU)
    precision.apply()
    try:
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, cudnn)
    finally:
        precision.restore()
        precision.restore()
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
