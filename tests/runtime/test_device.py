"""The device of a setting, and the facts of a machine."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from distributed_training import __version__
from distributed_training.runtime.device import choose_device, choose_devices, machine_facts
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.world import World


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


class TestChoice:
    def test_auto_takes_a_gpu_when_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, gpus=0)
        assert choose_device() == choose_device("auto") == torch.device("cpu")
        pretend(monkeypatch, gpus=1)
        assert choose_device("auto") == torch.device("cuda")

    def test_a_device_that_is_there_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, gpus=2)
        for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
            assert choose_device(name) == torch.device(name)

    @pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cpu cuda"])
    def test_a_word_that_is_no_device_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"training.device='{name}' is no device; try auto, cpu or cuda"):
            choose_device(name)

    @pytest.mark.parametrize("name", ["cuda", "cuda:0"])
    def test_a_gpu_that_torch_does_not_see_is_refused(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, gpus=0)
        with pytest.raises(ConfigError, match=r"sees no GPU; try auto or cpu"):
            choose_device(name)

    def test_a_gpu_number_that_is_too_high_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, gpus=2)
        with pytest.raises(ConfigError, match=r"training.device='cuda:2', but there are 2 GPUs, from cuda:0 on"):
            choose_device("cuda:2")


def rank(number: int, launcher: str = "mpirun") -> World:
    return World(number, 4, local_rank=number, local_size=4, master="127.0.0.1", launcher=launcher)


class TestSeveral:
    @pytest.mark.parametrize(
        ("gpus", "wanted", "world", "expected"),
        [
            (4, None, World(), (0, 1, 2, 3)),  # alone: all
            (4, 2, World(), (0, 1)),
            (1, 2, World(), (0,)),  # no more than there are
            (8, None, rank(3), (3,)),  # under a launcher: one each
            (8, 2, rank(3), (6, 7)),
            (2, 2, rank(3), (0, 1)),  # each rank sees GPUs of its own
            (2, 1, rank(3), (1,)),  # ranks share what there is
        ],
    )
    def test_each_process_takes_its_own(
        self, monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: int | None, world: World, expected: tuple[int, ...]
    ) -> None:
        pretend(monkeypatch, gpus)
        assert choose_devices("auto", wanted, world) == (torch.device("cuda", expected[0]), expected)

    @pytest.mark.parametrize(("gpus", "name", "wanted"), [(0, "auto", 2), (2, "auto", 0), (2, "cpu", None)])
    def test_otherwise_the_cpu(self, monkeypatch: pytest.MonkeyPatch, gpus: int, name: str, wanted: int | None) -> None:
        pretend(monkeypatch, gpus)
        assert choose_devices(name, wanted, World()) == (torch.device("cpu"), ())


class TestFacts:
    def test_of_a_cpu_machine(self) -> None:
        facts = machine_facts(torch.device("cpu"))
        assert facts["device"] == "cpu"
        assert facts["torch"] == torch.__version__
        assert facts["distributed_training"] == __version__
        assert facts["python"] == ".".join(str(part) for part in sys.version_info[:3])
        assert facts["cpu_cores"] == os.cpu_count()
        assert facts["torch_threads"] == torch.get_num_threads()
        assert facts["host"]
        assert facts["system"]
        assert "gpu" not in facts

    def test_of_a_gpu_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(name="Imaginary 9000", total_memory=24 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        facts = machine_facts(torch.device("cuda", 1))
        assert facts["device"] == "cuda:1"
        assert facts["gpu"] == "Imaginary 9000"
        assert facts["gpu_memory_gib"] == 24
        assert facts["cuda"] == torch.version.cuda
