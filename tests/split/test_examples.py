"""The two programs of examples/ that make a split work as they are."""

from __future__ import annotations

from tests.launching import ROOT, free_port
from tests.split.conftest import Start

EXAMPLES = ROOT / "examples"


def test_train_gpu_and_train_cpu(start: Start) -> None:
    port = f"{free_port()}"
    gpu, cpu = start(
        [str(EXAMPLES / "train_gpu.py"), "--device=cpu", "--port", port],
        [str(EXAMPLES / "train_cpu.py"), "--epochs=3", "--samples=640", "--gpu-port", port],
    )
    assert "completed after 24 steps, accuracy " in gpu.end()
    assert "loaded " in cpu.end()
