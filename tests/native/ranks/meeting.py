"""How the programs of these tests form a group: as a user of torch.distributed would, with a store in a file."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distributed_training.native.mpi import BACKEND, register


def meet(seconds: float = 60.0) -> Any:
    """Start MPI and make torch's default group of all ranks on our backend; gives the extension."""
    extension = register()
    rank, size = extension.init(seconds)
    folder = extension.broadcast_bytes(os.environ["TMPDIR"].encode(), 0, seconds).decode()
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    return extension
