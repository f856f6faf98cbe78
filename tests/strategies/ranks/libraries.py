"""What the ranks of strategies take seconds to import: for a process that forks ranks, see tests/forked_ranks.py."""

from __future__ import annotations

import accelerate
import psutil
import pytest
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.run

from distributed_training.strategies.deepspeed import import_deepspeed

__all__ = ["accelerate", "psutil", "pytest", "torch"]

import_deepspeed(torch.device("cpu"))
