"""Our backend for torch.distributed over MPI, written in C++: one communication thread, shared memory inside a host."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from distributed_training.native.build import load_extension

BACKEND = "dtrain_mpi"
"""Its name in torch.distributed: `dist.init_process_group("dtrain_mpi", ...)`. torch has one of its own called mpi."""


def register() -> Any:
    """Make the backend known to torch, for CPU and CUDA tensors; gives the extension, built first if need be."""
    extension = load_extension()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    return extension


def _create(options: Any, _: Any) -> Any:
    """Called by torch for every group and sub-group."""
    return load_extension().create_backend(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        options.global_ranks_in_group,
    )
