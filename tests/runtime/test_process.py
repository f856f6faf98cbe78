"""Process-wide settings: made as configured, and only those."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed_training.config import Config
from distributed_training.runtime import process
from distributed_training.runtime.process import prepare_process

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bool]]:
    """Calls of the allocator's setting, which cannot be undone; all others are put back."""
    calls: list[bool] = []
    monkeypatch.setattr(process, "keep_freed_memory", lambda: calls.append(True))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch makes it when asked for determinism
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    yield calls
    torch.set_num_threads(threads)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)


def config(**sections: dict[str, object]) -> Config:
    return Config.from_dict(sections)


def test_threads_are_set_only_on_request() -> None:
    before = torch.get_num_threads()
    prepare_process(config(), CPU)
    assert torch.get_num_threads() == before
    prepare_process(config(run={"threads": 2}), CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("setting", "device", "times"), [("auto", CPU, 1), ("default", CPU, 0), ("auto", CUDA, 0)])
def test_freed_memory_is_kept_on_the_cpu_unless_told_otherwise(
    kept: list[bool], setting: str, device: torch.device, times: int
) -> None:
    prepare_process(config(run={"allocator": setting}), device)
    assert len(kept) == times


def test_deterministic_training_asks_torch_and_cublas_for_it() -> None:
    for _ in range(2):
        prepare_process(config(training={"deterministic": True}), CUDA)
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert not torch.backends.cudnn.benchmark


def test_a_users_cublas_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    prepare_process(config(training={"deterministic": True}), CPU)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(("device", "measured"), [(CUDA, True), (CPU, False)])
def test_convolutions_are_measured_on_gpus_only(device: torch.device, measured: bool) -> None:
    prepare_process(config(), device)
    assert torch.backends.cudnn.benchmark is measured
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
