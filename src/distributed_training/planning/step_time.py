"""How long a step takes under each strategy: computation as measured, and what of the talking is not hidden behind it.

Gradients travel in buckets while the backward pass goes on. When each is ready was measured; buckets are sent one after
the other as soon as their last gradient is there:

    start_i = max(ready_i, end_{i-1}),  end_i = start_i + T(bytes_i),  exposed = max(0, end_last - backward)

Where computing and sending want the same cores, only a part of a transfer is hidden (`Cluster.overlap`, measured):

    waited = overlap * exposed + (1 - overlap) * sum of T

Ranks that compute the same do not take the same time. At each of k places in a step where they wait for each other they
wait for the slowest of N, whose lateness adds up with the root of k (docs/planning.md, A step).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

from distributed_training.planning.cluster import Cluster
from distributed_training.planning.communication import Network
from distributed_training.planning.memory import MemoryModel
from distributed_training.planning.profile import Profile
from distributed_training.planning.ways import Way
from distributed_training.strategies.formulas import bytes_sent, step_bytes

_FIRST_BUCKET = 1 << 20  # DDP's first one is small, to begin early
_CYCLE = 1e-3  # seconds after which Horovod looks whether something is ready
_PERSISTENT = 100_000  # numbers of the largest parameter that DeepSpeed's stage 3 keeps whole between two updates
_KEPT = 1e9  # numbers that its stage 3 keeps gathered from the forward to the backward pass
_NUMBER = 8.0  # bytes
_WORTH_A_MESSAGE = 32 << 20  # see strategies.ddp
_POWERSGD_PASSES = 8  # times that a gradient is read or written to be approximated


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and what they are made of."""

    compute: float
    """Forward, backward, update."""
    copies: float
    """Between gradients and buckets, shards and whole weights; of DeepSpeed all that it adds by itself."""
    waited: float
    """For other ranks: the part of talking that is not hidden."""
    talked: float
    """All of talking, hidden or not."""
    rest: float
    """Data, loop."""
    sent: float
    """Bytes that a rank sends."""

    @property
    def whole(self) -> float:
        """Of the step."""
        return self.compute + self.copies + self.waited + self.rest


class TimeModel:
    """Predicts from a profile and a cluster."""

    def __init__(self, profile: Profile, cluster: Cluster, memory: MemoryModel, settings: dict[str, float]) -> None:
        """`settings`: bucket_mb and powersgd_rank of the config."""
        self._profile, self._cluster, self._memory = profile, cluster, memory
        self._bucket, self._rank = settings["bucket_mb"] * 2**20, int(settings["powersgd_rank"])
        self._bytes: list[float] = profile.model["bytes"]
        self._whole = float(sum(self._bytes))
        self._copy = float(profile.model["copy_rate"]) / 2  # read and write
        self._backend = "nccl" if profile.device == "cuda" else "gloo"

    def predict(self, way: Way, ranks: int, batch: float, accumulation: int = 1) -> StepTime:
        """A step in which each rank has `batch` samples, in so many micro-batches."""
        parts = self._profile.parts(batch / accumulation, self._cluster.local(ranks))
        if way.family == "single" and parts.captured is not None and accumulation == 1:
            return StepTime(parts.captured, 0.0, 0.0, 0.0, 0.0, 0.0)
        forward, backward = parts.forward * accumulation, parts.backward * accumulation
        if way.family == "single" or ranks == 1:
            return StepTime(forward + backward + parts.update, 0.0, 0.0, 0.0, parts.rest, 0.0)
        # A backend that could not be measured is taken to be as good as the one that was.
        backend = way.backend if way.backend in self._cluster.links else self._backend
        network = Network(self._cluster, backend)
        links = self._cluster.links.get(backend)
        overlap = links.overlap if links is not None else self._cluster.overlap
        slowdown = links.slowdown if links is not None else 1.0
        if way.family == "fsdp":
            talk = self._divided(way, network, ranks, parts.forward, parts.backward, overlap)
        elif way.family == "deepspeed":
            talk = self._deepspeed(way, network, ranks)
        elif way.family == "dp":
            talk = self._one_process(network, ranks)
        elif way.family == "horovod":
            talk = self._in_cycles(way, network, ranks, parts.backward, overlap, batch / accumulation)
        else:
            talk = self._in_buckets(way, network, ranks, parts.backward, overlap, batch / accumulation)
        waited, talked, copies, sent = talk
        own = self._own(way, ranks, batch / accumulation)
        copies = copies if own is None else own
        agreed = self._agreements(way) * network.all_reduce(_NUMBER, ranks)
        compute = (forward + backward + parts.update * self._update_share(way, ranks)) * slowdown
        late = self._late(way, ranks, compute)
        return StepTime(compute, copies, waited + agreed + late, talked + agreed, parts.rest * slowdown, sent)

    def _late(self, way: Way, ranks: int, compute: float) -> float:
        """How long ranks wait for the slowest in a step: by so much as steps differ from each other."""
        here = self._profile.copies(self._cluster.local(ranks))
        slowest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))  # sigmas, of the largest of so many
        return self._profile.jitter.get(here, 0.0) * slowest * math.sqrt(self._meetings(way)) * compute

    def _meetings(self, way: Way) -> int:
        """Places in a step where ranks wait for each other after they have computed for a while."""
        if way.family == "fsdp" and self._profile.device == "cpu":
            return 2 * len(set(self._profile.model["units"]))  # each unit's weights, then its gradients
        return 2 if way.family in ("fsdp", "deepspeed") and way.stage == 3 else 1

    def _agreements(self, way: Way) -> int:
        """Numbers on which ranks agree before an update, one after the other: are all gradients finite."""
        if way.family == "deepspeed":
            return 2  # overflow, and the norm
        if way.family == "fsdp":
            return 1
        # Whole gradients are the same everywhere; each rank looks at its part where they are many.
        shared = self._profile.device == "cpu" and self._whole >= _WORTH_A_MESSAGE
        return int(shared and way.strategy in ("ddp", "zero1", "mpi"))

    def _update_share(self, way: Way, ranks: int) -> float:
        if way.family == "zero1":
            return self._memory.largest_share(ranks)
        return 1 / ranks if way.family == "fsdp" or way.family == "deepspeed" else 1.0

    def _in_buckets(
        self, way: Way, network: Network, ranks: int, backward: float, overlap: float, batch: float
    ) -> tuple[float, float, float, float]:
        """ddp, zero1, accelerate, mpi: (waited, talked, copies, sent)."""
        buckets = self._buckets(way, batch)
        end = talked = sent = 0.0
        passes = 1.0
        rounded = way.compression in ("fp16", "bf16") and network.has("all_reduce_bf16")
        for size, ready, _ in buckets:
            travels = self._compressed(way, size)
            took = network.seconds("all_reduce", travels, ranks, "all_reduce_bf16" if rounded else "")
            end = max(end, ready * backward) + took
            talked += took
            sent += bytes_sent("all_reduce", travels, ranks)
        waited = overlap * max(0.0, end - backward) + (1 - overlap) * talked
        if way.compression == "powersgd":
            passes += _POWERSGD_PASSES
            waited += 2 * network.all_reduce(4.0, ranks)  # two messages a bucket, one after the other
        elif way.compression != "none" and not rounded:
            passes += 1
        if way.family == "zero1":  # updated weights travel when the update is done: nothing to hide behind
            after = ranks * network.seconds("broadcast", self._whole / ranks, ranks)
            waited, talked, sent = waited + after, talked + after, sent + bytes_sent("all_gather", self._whole, ranks)
        bucketed = sum(size for size, _, copied in buckets if copied)
        return waited, talked, passes * bucketed / self._copy, sent

    def _in_cycles(
        self, way: Way, network: Network, ranks: int, backward: float, overlap: float, batch: float
    ) -> tuple[float, float, float, float]:
        """horovod: a thread looks every ms which gradients are ready, and sends them together."""
        loose = set(self._memory.without_bucket(way))
        waiting = deque(sorted((share * backward, number) for number, share in self._profile.ready(batch)))
        links = self._cluster.links.get(network.backend)
        # In a small message that was timed alone, most is waiting for the thread to look: hidden, but in the last one.
        message = hidden = 0.0
        if links is not None and links.message is not None:
            message = links.message
            hidden = max(0.0, min(seconds for _, seconds in links.times["all_reduce"]) - message)
        end = talked = sent = copied = 0.0
        while waiting:
            start = max(waiting[0][0], end) + _CYCLE / 2
            sizes = []
            while waiting and waiting[0][0] <= start:
                number = waiting.popleft()[1]
                sizes.append(self._compressed(way, self._bytes[number]))
                copied += 0.0 if number in loose else self._bytes[number]
            took = max(message, network.all_reduce(sum(sizes), ranks) - hidden)
            end = start + took
            talked += took
            sent += bytes_sent("all_reduce", sum(sizes), ranks)
        waited = overlap * max(0.0, end - backward) + (1 - overlap) * talked + max(hidden, _CYCLE)
        return waited, talked, copied / self._copy, sent

    def _buckets(self, way: Way, batch: float) -> list[tuple[float, float, bool]]:
        """(bytes, share of the backward pass after which it can travel, whether it is a copy), in order of sending."""
        loose = set(self._memory.without_bucket(way))
        limit, size, ready = float(_FIRST_BUCKET), 0.0, 0.0
        found: list[tuple[float, float, bool]] = []
        for number, share in self._profile.ready(batch):
            if number in loose:
                found.append((self._bytes[number], share, False))
                continue
            size, ready = size + self._bytes[number], share
            if size >= limit:
                found.append((size, ready, True))
                limit, size = self._bucket, 0.0
        if size:
            found.append((size, ready, True))
        return sorted(found, key=lambda bucket: bucket[1])

    def _compressed(self, way: Way, size: float) -> float:
        if way.compression in ("fp16", "bf16"):
            return size / 2
        if way.compression != "powersgd":
            return size
        return size * self._powersgd_share()

    def _powersgd_share(self) -> float:
        """Bytes of PowerSGD's factors, to those of the gradients: matrices become two thin ones, the rest stays."""
        travels = 0.0
        for shape, size in zip(self._profile.model["shapes"], self._bytes):
            rows = shape[0] if shape else 1
            columns = math.prod(shape[1:]) if len(shape) > 1 else 1
            thin = min(self._rank, rows, columns) * (rows + columns) / (rows * columns)
            travels += size * (thin if len(shape) > 1 and thin < 0.5 else 1.0)
        return travels / self._whole if self._whole else 1.0

    def _divided(
        self, way: Way, network: Network, ranks: int, forward: float, backward: float, overlap: float
    ) -> tuple[float, float, float, float]:
        """zero2, zero3: weights are gathered ahead of each unit, gradients divided after it."""
        sizes: dict[int, float] = {}
        for unit, size in zip(self._profile.model["units"], self._bytes):
            sizes[unit] = sizes.get(unit, 0.0) + size
        gather = [network.seconds("all_gather", size, ranks) for size in sizes.values()]
        scatter = [network.seconds("reduce_scatter", size, ranks) for size in sizes.values()]
        again = way.stage == 3
        # What belongs to no unit stays gathered: the backward pass begins with it.
        more = [took for unit, took in zip(sizes, gather) if unit != -1] if again else []
        in_backward = sum(scatter) + sum(more)
        # The first unit's weights and the last unit's gradients have nothing to hide behind.
        exposed = gather[0] + max(0.0, sum(gather[1:]) - forward) + scatter[-1]
        exposed += max(0.0, in_backward - scatter[-1] - backward)
        talked = sum(gather) + in_backward
        gathers = 2 if again else 1
        sent = step_bytes(way.stage, self._whole, ranks)
        copies = (gathers + 1) * self._whole / self._copy
        if self._profile.device == "cpu":  # FSDP has no streams there: it waits for each of them
            return talked, talked, copies, sent
        return overlap * min(exposed, talked) + (1 - overlap) * talked, talked, copies, sent

    def _own(self, way: Way, ranks: int, batch: float) -> float | None:
        """What its library adds to a step by itself, as measured with one rank, beside others on the machine."""
        own = self._profile.own.get(way.like_alone or "")
        if own is None:
            return None
        alone, beside = (self._profile.parts(batch, n).whole for n in (1, self._cluster.local(ranks)))
        return own * beside / alone

    def _deepspeed(self, way: Way, network: Network, ranks: int) -> tuple[float, float, float, float]:
        """A bucket of DeepSpeed holds all gradients of most models, so that it travels when the backward pass ends."""
        gather = network.seconds("all_gather", self._whole, ranks)
        if way.stage == 3:
            return self._deepspeed_3(network, ranks)
        talked = network.all_reduce(self._whole, ranks) + gather
        # Its stage 2 sends as stage 1 does: it all-reduces where a reduce-scatter would do.
        return talked, talked, 3 * self._whole / self._copy, step_bytes(1, self._whole, ranks)

    def _deepspeed_3(self, network: Network, ranks: int) -> tuple[float, float, float, float]:
        """Small parameters are gathered after the update, each by itself. Large ones before the forward pass, and once
        more before the backward pass only where they are too many to be kept."""
        small = [size for size in self._bytes if size / 4 <= _PERSISTENT]
        large = self._whole - sum(small)
        times = 2 if self._whole / 4 > _KEPT else 1
        talked = times * network.seconds("all_gather", large, ranks) if large else 0.0
        talked += sum(network.seconds("all_gather", size, ranks) for size in small)
        talked += network.seconds("reduce_scatter", self._whole, ranks)
        gathered = bytes_sent("all_gather", times * large + sum(small), ranks)
        sent = gathered + bytes_sent("reduce_scatter", self._whole, ranks)
        return talked, talked, 4 * self._whole / self._copy, sent

    def _one_process(self, network: Network, ranks: int) -> tuple[float, float, float, float]:
        """dp: in every step the weights go out from the first GPU and all gradients come back to it."""
        out = network.seconds("broadcast", self._whole, ranks)
        back = (ranks - 1) * self._whole / self._cluster.intra_bandwidth
        return out + back, out + back, 0.0, (ranks - 1) * self._whole
