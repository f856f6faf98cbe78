"""The machines that a plan is made for: what the user says of them, and what was measured here."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Links:
    """How fast ranks on one machine talk, as measured: seconds by operation and bytes."""

    ranks: int
    """Of the measurement."""
    times: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """all_reduce, all_gather, reduce_scatter, broadcast: (bytes of the whole tensor, seconds), ascending.
    all_reduce_bf16: (bytes that travel, seconds with the rounding before and after)."""
    overlap: float = 1.0
    """Share of a transfer that costs the computation beside it nothing: 0 where both want the same cores."""
    backend: str = ""
    slowdown: float = 1.0
    """Of a computation by a library that only waits: its threads look for work all the time."""
    message: float | None = None
    """Seconds that a small message of such a library costs the computation beside it."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What ranks run on."""

    per_node: int = 1
    """Ranks (GPUs) of a machine."""
    bandwidth: float = 25e9 / 8
    """Bytes a second of a machine's network, each way."""
    intra_bandwidth: float = 50e9
    """Bytes a second between two GPUs of one machine, each way."""
    latency: float = 20e-6
    """Seconds that a message takes between machines, however small."""
    intra_latency: float = 5e-6
    """The same inside a machine."""
    overlap: float = 1.0
    """Share of a transfer that is free while the device computes."""
    links: dict[str, Links] = field(default_factory=dict)
    """Measured inside this machine, by backend: `gloo`, `nccl`, `mpi`, `horovod`."""
    device_memory: float = 0.0
    """Bytes that one rank may use."""
    price: float | None = None
    """Of one GPU for an hour."""

    def nodes(self, ranks: int) -> int:
        """Machines of so many ranks."""
        return -(-ranks // self.per_node)

    def local(self, ranks: int) -> int:
        """Ranks on a machine of a job of so many."""
        return min(ranks, self.per_node)
