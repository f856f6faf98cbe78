"""Process-wide settings of torch and the C library, made once before training."""

from __future__ import annotations

import os

import torch

from distributed_training.config import Config
from distributed_training.runtime.allocator import keep_freed_memory


def prepare_process(config: Config, device: torch.device) -> None:
    """Threads, allocator and determinism as configured. Idempotent."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if device.type == "cpu" and config.run.allocator == "auto":
        keep_freed_memory()
    if config.training.deterministic:
        # cuBLAS reads this when its handle is made, which has not happened yet on a fresh process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    elif device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # batches have one shape: let cuDNN measure once
