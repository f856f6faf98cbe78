"""What can be set about a feed, for each of its two sides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distributed_training.runtime.errors import ConfigError

MEBI = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FeedSettings:
    """The GPU side."""

    memory: int = 1024 * MEBI
    """Bytes of batches that may be on their way or wait here at any time."""
    deadline: float = 300.0
    """Seconds without the next batch, loaders being there, after which training ends with an error."""
    absence: float = 24 * 3600.0
    """Seconds that training waits for loaders when there are none."""
    authentication: float = 5.0
    """Seconds in which a new connection has to prove that it belongs to this run."""
    silence: float = 30.0
    """Seconds without a sign of life after which a loader counts as gone. It is pinged three times as often."""
    lease: float = 30.0
    """Seconds that a loader of unknown speed has for its steps before another one gets them, too."""
    shortest_lease: float = 2.0
    """A loader of known speed has a few times what it should need, but at least this."""
    connections: int = 256
    """Connections at a time."""
    half_open: int = 32
    """Connections at a time that have not proved yet that they belong to this run."""
    per_address: int = 256
    """Connections at a time from one address."""
    max_steps_ahead: int = 4096
    """Steps that may be prepared ahead of training, if memory allows."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """When a dataset raises on a sample: end training naming it, or train without it and write it down."""
    shared_memory: bool = True
    """Whether a loader on this machine may hand over batches in shared memory."""
    cache: Literal["off", "memory", "disk"] = "off"
    """Whether and where samples are kept, so that later epochs need no transfer."""
    cache_bytes: int = 4096 * MEBI
    """Bytes that kept samples may take."""
    cache_folder: Path | None = None
    """Where they are kept on disk."""
    checkpoints_home: Literal["auto", "on", "off"] = "auto"
    """Whether a loader that wants it gets a copy of the run. auto: one on another machine."""
    max_checkpoint: int = 65536 * MEBI
    """Bytes of the largest checkpoint that is taken from a loader."""
    ca_file: str = ""
    """Certificates of the authorities that vouch for a tunnel's, in place of those that the system knows; where this
    side dials."""

    def __post_init__(self) -> None:
        if self.memory < MEBI:
            raise ConfigError(f"memory={self.memory}: a feed needs at least 1 MiB for its batches")
        if self.cache == "disk" and self.cache_folder is None:
            raise ConfigError("cache=disk needs a cache_folder")
        for name in ("deadline", "absence", "authentication", "silence", "lease", "shortest_lease"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """The CPU side."""

    memory: int = 512 * MEBI
    """Bytes of batches that one worker may hold ready."""
    patience: float = 3600.0
    """Seconds that a worker tries to reach the GPU side before it gives up."""
    first_pause: float = 0.1
    """Seconds before the second attempt to connect; doubled up to `longest_pause`."""
    longest_pause: float = 5.0
    silence: float = 60.0
    """Seconds without a sign of life after which the GPU side counts as gone, and the worker dials again."""
    compression: Literal["auto", "always", "off"] = "auto"
    """Compress while it makes the link measured faster, whenever it makes batches smaller, or never."""
    shared_memory: bool = True
    """Hand over batches in shared memory where the GPU side is on this machine."""
    ca_file: str = ""
    """Certificates of the authorities that vouch for a tunnel's, in place of those that the system knows."""
