"""Crash-safe checkpoints that any strategy can read."""

from distributed_training.checkpoint.files import CheckpointInfo, read_state, verify
from distributed_training.checkpoint.store import CheckpointStore, best_of, find_checkpoint

__all__ = ["CheckpointInfo", "CheckpointStore", "best_of", "find_checkpoint", "read_state", "verify"]
