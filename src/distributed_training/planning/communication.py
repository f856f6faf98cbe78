"""How long ranks talk: formulas of collective operations, and measured times where there are some.

A tensor of S bytes over N ranks, g of them on each of n machines, latency a, bandwidth B (docs/planning.md):

    reduce-scatter, all-gather    (N-1) a + (N-1)/N S/B                            each rank passes on S/N, N-1 times
    all-reduce, ring              2 (N-1) a + 2 (N-1)/N S/B                        one after the other
    all-reduce, tree              2 log2(N) a + 2 S/B                              fewer messages, for small tensors
    broadcast                     log2(N) a + S/B

A ring over several machines goes through each machine's network once in each direction, so that every byte of it
crosses the slowest link: the time of the bytes is the larger of inside and between, latencies add up. Libraries for
GPUs go round inside a machine first, so that only n-1 of the messages pay the network's latency.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from distributed_training.planning.cluster import Cluster
from distributed_training.strategies.formulas import PASSES, bytes_sent


@dataclass(frozen=True)
class Network:
    """The network of a job: how long an operation takes."""

    cluster: Cluster
    backend: str = ""

    def seconds(self, operation: str, size: float, ranks: int, measured: str = "") -> float:
        """Of one operation on a tensor of `size` bytes (the whole, where ranks have parts).

        Args:
            measured: the name under which it was measured, where that is another one.
        """
        if ranks == 1 or size <= 0:
            return 0.0
        cluster, local, nodes = self.cluster, self.cluster.local(ranks), self.cluster.nodes(ranks)
        fixed, inside = self._inside(operation, size, local, measured or operation) if local > 1 else (0.0, 0.0)
        if nodes == 1:
            return fixed + inside
        between = bytes_sent(operation, size, ranks) / cluster.bandwidth
        ring = self._latency(operation, nodes, cluster.latency) + max(inside, between)
        if operation == "all_reduce":
            tree = 2 * math.log2(nodes) * cluster.latency + max(inside, 2 * size / cluster.bandwidth)
            ring = min(ring, tree)
        return fixed + ring

    def all_reduce(self, size: float, ranks: int) -> float:
        """The sum of a tensor on every rank."""
        return self.seconds("all_reduce", size, ranks)

    def has(self, measured: str) -> bool:
        """Whether an operation was measured on this machine."""
        links = self.cluster.links.get(self.backend)
        return links is not None and measured in links.times

    def _inside(self, operation: str, size: float, ranks: int, measured: str) -> tuple[float, float]:
        """(latency, time of the bytes) inside a machine: as measured with as many ranks, or by the same bandwidth."""
        cluster, links = self.cluster, self.cluster.links.get(self.backend)
        if links is None or measured not in links.times:
            passed = bytes_sent(operation, size, ranks) / cluster.intra_bandwidth
            return self._latency(operation, ranks, cluster.intra_latency), passed
        points = links.times[measured]
        fixed = min(seconds for _, seconds in points)
        passed = max(0.0, interpolate(points, size) - fixed)
        more = self._latency(operation, ranks, 1.0) / self._latency(operation, links.ranks, 1.0)
        scale = bytes_sent(operation, size, ranks) / bytes_sent(operation, size, links.ranks)
        return fixed * more, passed * scale

    @staticmethod
    def _latency(operation: str, ranks: int, latency: float) -> float:
        if operation == "broadcast":
            return math.ceil(math.log2(ranks)) * latency
        return PASSES[operation] * (ranks - 1) * latency


def interpolate(points: list[tuple[float, float]], at: float) -> float:
    """The value at `at` on lines between points; beyond the last by the slope of the last two, below the first flat."""
    if at <= points[0][0] or len(points) == 1:
        return points[0][1] if len(points) > 1 or at <= points[0][0] else points[0][1] * at / points[0][0]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (at - x1)
