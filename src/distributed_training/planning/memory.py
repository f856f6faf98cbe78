"""How much memory a rank needs at most in a step, under each strategy.

On one device a step was measured as a timeline: the most memory until each gradient was there. What is known of it by
counting (weights, optimizer state, the gradients that are there by then) is taken off; what is left are activations and
temporary buffers, which every strategy has as well. What a strategy holds of the known parts is put back:

    peak = weights + optimizer state + max over the timeline (activations(t) + gradients(t) + gathered weights(t))

so that a strategy which keeps all gradients all the time is not charged for activations that are gone by then.
"""

from __future__ import annotations

from dataclasses import dataclass

from distributed_training.planning.profile import BACKWARD_OVER, UPDATE, Profile
from distributed_training.planning.ways import Way

_LARGE = 4 << 20  # see strategies.large_gradients
_FUSION = 128 << 20  # Horovod's buffer for small gradients
_MPI_GROUPS, _MPI_SLOTS = 2, 3 * (512 << 10)  # groups of ddp, and bytes of shared memory for each rank of a machine
_DEEPSPEED_BUCKET = 500_000_000 * 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment it needs most."""

    weights: float
    optimizer: float
    gradients: float
    """Gradients and the buckets in which they travel."""
    gathered: float
    """Whole weights and buffers of a strategy that divides them."""
    activations: float
    """And the batch, and temporary buffers."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.optimizer + self.gradients + self.gathered + self.activations


@dataclass(frozen=True)
class _Held:
    """What a strategy holds at one moment."""

    gradients: float
    gathered: float = 0.0


class MemoryModel:
    """Predicts from a profile."""

    def __init__(self, profile: Profile, bucket_mb: float = 25.0, per_node: int = 2) -> None:
        model = profile.model
        self._profile, self._bucket, self._per_node = profile, bucket_mb * 2**20, per_node
        self._bytes: list[float] = model["bytes"]
        self._states: list[float] = model["state_bytes"]
        self._units: list[int] = model["units"]
        self._whole = float(sum(self._bytes))
        self._fixed = float(model["frozen_bytes"] + model["buffer_bytes"])
        self._cpu = profile.device == "cpu"
        half = model["precision"] in ("bf16", "fp16") and not self._cpu and not model["has_batchnorm"]
        self._gathered_share = 0.5 if half else 1.0

    def predict(self, way: Way, ranks: int, batch: float, accumulation: int = 1) -> Memory:
        """Of the rank that needs most; `batch` are its samples in a step."""
        timeline = self._profile.timeline(batch / accumulation)
        weights, optimizer = self._static(way, ranks)
        known = self._whole + self._fixed + sum(self._states)
        worst: Memory | None = None
        done, there = [], 0.0
        for number, peak in timeline:
            if number >= 0:
                done.append(number)
                there += self._bytes[number]
            activations = max(0.0, peak - known - there)
            held = self._held(way, ranks, done, number, accumulation)
            now = Memory(weights, optimizer, held.gradients, held.gathered, activations)
            if worst is None or now.total > worst.total:
                worst = now
        assert worst is not None
        return worst

    def _static(self, way: Way, ranks: int) -> tuple[float, float]:
        """(weights, optimizer state) that are there all the time."""
        states = float(sum(self._states))
        if way.family == "zero1":
            return self._whole + self._fixed, self._largest_part(ranks)
        if way.family == "fsdp":
            shards = [self._shard(number, ranks) for number in range(len(self._bytes))]
            share = [state * part / whole for state, part, whole in zip(self._states, shards, self._bytes) if whole]
            return sum(shards) + self._fixed, sum(share)
        if way.family == "deepspeed":  # a copy of the weights in fp32 that is updated, divided in every stage
            own = self._whole / ranks if way.stage == 3 else self._whole
            return own + self._fixed + self._whole / ranks, states / ranks
        return self._whole + self._fixed, states

    def _largest_part(self, ranks: int) -> float:
        """Optimizer state of the rank that has most: whole parameters, the largest first to whoever has least."""
        filled, state = [0.0] * ranks, [0.0] * ranks
        for number in sorted(range(len(self._bytes)), key=lambda n: -self._bytes[n]):
            least = filled.index(min(filled))
            filled[least] += self._bytes[number]
            state[least] += self._states[number]
        return max(state)

    def largest_share(self, ranks: int) -> float:
        """Of the optimizer's work, under zero1: that of the rank with most."""
        return self._largest_part(ranks) / sum(self._states) if sum(self._states) else 1 / ranks

    def _shard(self, number: int, ranks: int) -> float:
        """Of a parameter divided by rows: the first ranks have one more."""
        shape = self._profile.model["shapes"][number]
        rows = shape[0] if shape else 1
        return self._bytes[number] * -(-rows // ranks) / rows if rows else 0.0

    def _held(self, way: Way, ranks: int, done: list[int], number: int, accumulation: int) -> _Held:
        arrived = sum(self._bytes[n] for n in done)
        newest = self._bytes[number] if number >= 0 else 0.0
        if way.family == "fsdp":
            return self._held_divided(way, ranks, done, number)
        if way.family == "deepspeed":
            if way.stage == 3:
                return _Held(self._whole, self._whole + min(_DEEPSPEED_BUCKET, self._whole))
            return self._held_by_deepspeed(way, ranks, arrived, newest, number)
        if way.family in ("ddp", "zero1"):
            return self._held_in_buckets(way, done, number, newest)
        if accumulation > 1:  # of the micro-batches before it, all are there from the start
            arrived = self._whole + newest
        if way.family == "horovod":
            loose = sum(self._bytes[n] for n in self.without_bucket(way))
            # On a CPU its buffer is the library's own: made once, and no memory of the step.
            return _Held(arrived, 0.0 if self._cpu else min(_FUSION, self._whole - loose))
        if way.family == "dp":  # gradients of all copies come together on the first GPU
            return _Held(arrived, self._whole)
        return _Held(arrived)

    def _held_by_deepspeed(self, way: Way, ranks: int, arrived: float, newest: float, number: int) -> _Held:
        """Stages 1 and 2: a full bucket is copied into one piece that travels, and of its sum a part is kept.

        The bucket of most models is full when the backward pass is over and activations are gone. On a CPU those of its
        pages count that were written.
        """
        bucket, over = min(_DEEPSPEED_BUCKET, self._whole), number == BACKWARD_OVER
        if number == UPDATE:  # of the sums, which are put together in one piece once more
            return _Held(2 * self._whole / ranks)
        if way.stage == 1:  # gradients lie where they came until all are there
            return _Held(arrived, bucket if over or not self._cpu else 0.0)
        if self._whole > bucket:
            return _Held(arrived / ranks, 2 * bucket)
        return _Held(bucket, bucket) if over else _Held(newest, arrived if self._cpu else bucket)

    def _held_in_buckets(self, way: Way, done: list[int], number: int, newest: float) -> _Held:
        """DDP keeps its buckets from step to step. On a CPU large gradients have none, and come and go."""
        large = set(self.without_bucket(way))
        buckets = sum(size for n, size in enumerate(self._bytes) if n not in large)
        loose = sum(self._bytes[n] for n in done if n in large)
        on_its_way = newest if number not in large else 0.0
        extra = 0.0
        if way.compression == "powersgd":
            extra = self._whole + min(self._bucket, self._whole)  # what was left out so far, and a copy of a bucket
        elif way.compression in ("bf16", "fp16") and sum(self._bytes[n] for n in done) > self._bucket:
            extra = self._bucket / 2  # a bucket on its way, in half the bytes
        if way.backend == "mpi" and self._cpu:
            extra += _MPI_GROUPS * _MPI_SLOTS * self._per_node
        return _Held(buckets + loose + on_its_way, extra)

    def without_bucket(self, way: Way) -> list[int]:
        """Parameters whose gradients travel from where they lie; see `strategies.large_gradients`."""
        if way.family == "horovod":  # it sends each gradient by itself, small ones through its buffer
            return [n for n, size in enumerate(self._bytes) if size >= _LARGE]
        if not self._cpu or way.plain_buckets:
            return []
        limit = min(_LARGE, self._bucket)
        smallest = min(range(len(self._bytes)), key=lambda n: self._bytes[n])
        return [n for n, size in enumerate(self._bytes) if size >= limit and n != smallest]

    def _held_divided(self, way: Way, ranks: int, done: list[int], number: int) -> _Held:
        """FSDP: units are gathered one after the other, their gradients divided when a unit is done."""
        sizes: dict[int, float] = {}
        missing: dict[int, int] = {}
        for n, unit in enumerate(self._units):
            sizes[unit] = sizes.get(unit, 0.0) + self._bytes[n]
            missing[unit] = missing.get(unit, 0) + (n not in done)
        finished = {unit for unit, count in missing.items() if not count}
        parts = sum(self._shard(n, ranks) for n in done if self._units[n] in finished)
        if number < 0:
            return _Held(parts)
        now = self._units[number]
        whole = sum(self._bytes[n] for n in done if self._units[n] not in finished)
        if now in finished:  # its weights are given up, then its gradients put together in one piece for the way
            whole += 2 * sizes[now]
            sizes[now] = 0.0
        own = sizes.get(-1, 0.0)
        if way.stage == 2:
            gathered = sum(size for unit, size in sizes.items() if unit not in finished or unit == now)
            if len(done) == 1:  # the forward pass: the unit gathered last is still in one piece, too
                gathered += max(sizes.values())
        else:
            ahead = [size for unit, size in sizes.items() if unit not in finished and unit not in (-1, now)]
            # The reduction of a unit goes on while the next one is at work and the one after it is gathered.
            gathered = own + (sizes[now] if now != -1 else 0.0) + sum(sorted(ahead)[-2:])
        return _Held(parts + whole, gathered * self._gathered_share)
