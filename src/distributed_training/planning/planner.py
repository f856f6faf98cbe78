"""Make a plan: measure the model here, predict every strategy on every number of ranks, recommend."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed_training.config import Config
from distributed_training.config.check import did_you_mean
from distributed_training.config.errors import ConfigError
from distributed_training.planning.cluster import Cluster
from distributed_training.planning.measuring import Laboratory
from distributed_training.planning.memory import Memory, MemoryModel
from distributed_training.planning.own_time import measure_own_time
from distributed_training.planning.pace import Pace, steps_for
from distributed_training.planning.predictions import Advice, Curve, Plan, Prediction
from distributed_training.planning.profile import Profile
from distributed_training.planning.recommend import advise
from distributed_training.planning.step_time import TimeModel
from distributed_training.planning.units import bandwidth_text, time_text
from distributed_training.planning.ways import BY_LABEL, WAYS, Way, chosen_way, ways_for
from distributed_training.runtime.device import choose_device

_SPARE = 0.05  # of the memory: fragmentation
_MOST_SIZES = 4  # batch sizes measured for each number of processes
_FURTHEST = 1024  # ranks of the curves
_DRAWN = ("ddp", "ddp+powersgd", "zero1", "zero3")
_ALONE = 0.9  # share of the time that a process runs where nothing else wants its core
_TURNS = 4  # of each strategy that is measured, to compare


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the user asks for, and says of the machines."""

    gpus: tuple[int, ...] = (1, 8, 64)
    per_node: int | None = None
    """Ranks on one machine; None: as many as this machine has GPUs, or cores."""
    bandwidth: float | None = None
    intra_bandwidth: float | None = None
    latency: float | None = None
    device_memory: float | None = None
    price: float | None = None
    scaling: str = "strong"
    """strong: the batch of the config is divided; weak: each rank has it."""
    strategies: tuple[str, ...] = ()
    """Labels to compare; empty: all."""
    measure: bool = False
    """Also run what this machine can run, to compare."""
    timeout: float = 600.0
    command: str = "dtrain plan"
    say: Callable[[str], None] = lambda line: None


def make_plan(config: Config, options: PlanOptions) -> Plan:
    """Measure, predict, recommend."""
    _check(options)
    device = choose_device(config.training.device).type
    here = _capacity(device)
    with tempfile.TemporaryDirectory(prefix="dtrain-plan-") as folder:
        per_node = options.per_node or here
        threads = max(1, len(os.sched_getaffinity(0)) // min(per_node, here)) if device == "cpu" else None
        lab = Laboratory(config, Path(folder), threads, options.timeout, options.say)
        profile = lab.profile(_wanted(config, options, per_node, here))
        with Pace(lab, profile) as pace:
            cluster, assumed = _cluster(options, profile, per_node, here, lab)
            planning = _Planning(config, options, profile, cluster)
            measure_own_time([way for n in options.gpus for way in planning.ways(n)], lab, pace, profile)
            predictions = [planning.predict(way, ranks) for ranks in options.gpus for way in planning.ways(ranks)]
            if options.measure:
                predictions += planning.held_out()
                _measure(predictions, lab, pace, min(here, per_node), config.training.gradient_accumulation)
                factors = pace.rebase()
                predictions = [planning.again(one, factors.get(one.ranks, 1.0)) for one in predictions]
    advice = [planning.advise([one for one in predictions if one.ranks == n and not one.check]) for n in options.gpus]
    return Plan(
        title=f"{profile.model['name']}, {profile.model['parameters'] / 1e6:,.1f}M parameters",
        command=options.command,
        model=profile.model,
        cluster=cluster,
        assumed=assumed,
        predictions=predictions,
        advice=advice,
        curves=planning.curves(),
        notes=_notes(profile, threads, options) + _noise(pace),
        global_batch=config.training.batch_size,
        epochs=config.training.epochs,
        scaling=options.scaling,
    )


class _Planning:
    """The formulas, put together for one model and one cluster."""

    def __init__(self, config: Config, options: PlanOptions, profile: Profile, cluster: Cluster) -> None:
        self._config, self._options, self._profile, self._cluster = config, options, profile, cluster
        strategy = config.strategy
        self._memory = MemoryModel(profile, strategy.bucket_mb, cluster.per_node)
        settings = {"bucket_mb": strategy.bucket_mb, "powersgd_rank": float(strategy.powersgd_rank)}
        self._time = TimeModel(profile, cluster, self._memory, settings)
        self._alone = self._throughput(BY_LABEL["single"], 1, options.scaling)

    def ways(self, ranks: int) -> list[Way]:
        """The ways to compare on so many ranks."""
        found = ways_for(ranks, self._profile.device, self._cluster.per_node)
        wanted = self._options.strategies
        return [way for way in found if not wanted or way.label in wanted or ranks == 1]

    def held_out(self) -> list[Prediction]:
        """One device with a batch between those that were measured: shows how good the lines between them are."""
        sizes = sorted(self._profile.times[1])
        between = round(math.sqrt(sizes[-2] * sizes[-1]))
        if between in sizes:
            return []
        return [replace(self.predict(BY_LABEL["single"], 1, (between, between, 1)), check=True)]

    def predict(self, way: Way, ranks: int, batches: tuple[int, int, int] | None = None) -> Prediction:
        """One row. `batches`: samples of a step, of a rank in a step, micro-batches."""
        whole, batch, parts = batches or self._batches(ranks, self._options.scaling)
        memory, time = self._memory.predict(way, ranks, batch, parts), self._time.predict(way, ranks, batch, parts)
        needed = self._needed(memory)
        steps = -(-self._profile.model["samples"] // whole)
        return Prediction(
            way,
            ranks,
            batch,
            whole,
            memory,
            time,
            needed,
            needed <= self._cluster.device_memory,
            (whole / time.whole) / (ranks * self._alone),
            steps * time.whole / 3600,
            self._options.price,
        )

    def again(self, one: Prediction, factor: float) -> Prediction:
        """The same prediction from what is known by now; `factor`: by what the measured times have grown since."""
        batches = one.global_batch, one.batch, min(self._config.training.gradient_accumulation, one.batch)
        new = self.predict(one.way, one.ranks, (one.global_batch, one.batch, 1) if one.check else batches)
        measured = {key: getattr(one, key) for key in ("measured_memory", "measured_step", "check", "trouble")}
        return replace(new, **measured, pace=one.pace / factor if one.measured_step is not None else 1.0)

    def advise(self, rows: list[Prediction]) -> Advice:
        """What to take for a number of ranks."""

        def again(way: Way, parts: int) -> tuple[float, bool]:
            needed = self._needed(self._memory.predict(way, rows[0].ranks, rows[0].batch, parts))
            return needed, needed <= self._cluster.device_memory

        return advise(rows, chosen_way(self._config), self._config.training.gradient_accumulation, again)

    def curves(self) -> list[Curve]:
        """Throughput over numbers of ranks, as far as they have something to do."""
        drawn = [label for label in _DRAWN if not self._options.strategies or label in self._options.strategies]
        chosen = chosen_way(self._config)
        if chosen is not None and chosen.family != "single" and chosen.label not in drawn:
            drawn.append(chosen.label)
        counts = sorted({2**n for n in range(_FURTHEST.bit_length())} | set(self._options.gpus))
        curves = []
        for label in drawn or list(self._options.strategies):
            for kind in ("strong", "weak"):
                able = [n for n in counts if kind == "weak" or n <= self._config.training.batch_size]
                way = lambda n, label=label: BY_LABEL["single" if n == 1 else label]  # noqa: E731
                points = [(n, self._throughput(way(n), n, kind)) for n in able]
                curves.append(Curve(label, kind, points))
        return curves

    def _throughput(self, way: Way, ranks: int, scaling: str) -> float:
        whole, batch, parts = self._batches(ranks, scaling)
        return whole / self._time.predict(way, ranks, batch, parts).whole

    def _batches(self, ranks: int, scaling: str) -> tuple[int, int, int]:
        """(samples of a step, of a rank in a step, micro-batches)."""
        training = self._config.training
        whole = training.batch_size * (ranks if scaling == "weak" else 1)
        own = -(-whole // ranks)
        return whole, own, min(training.gradient_accumulation, own)

    def _needed(self, memory: Memory) -> float:
        return memory.total * (1 + _SPARE) + self._profile.model["process_bytes"]


def _check(options: PlanOptions) -> None:
    unknown = [label for label in options.strategies if label not in BY_LABEL]
    if unknown:
        raise ConfigError(
            f"--strategies {unknown[0]}: unknown{did_you_mean(unknown[0], BY_LABEL)} (known: {', '.join(BY_LABEL)})"
        )
    if options.scaling not in ("strong", "weak"):
        raise ConfigError(f"--scaling {options.scaling}: strong (the batch is divided) or weak (each GPU has it)")
    if not options.gpus or min(options.gpus) < 1:
        raise ConfigError("--gpus: give numbers from 1 on, such as --gpus 1 8 64")


def _capacity(device: str) -> int:
    """Ranks that this machine can really run."""
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0))


def _wanted(config: Config, options: PlanOptions, per_node: int, here: int) -> dict[int, list[int]]:
    """Batch sizes to measure, by the processes that are to run beside each other."""
    training = config.training
    wanted: dict[int, set[int]] = {}
    for ranks in sorted({1, *options.gpus}):
        own = training.batch_size if options.scaling == "weak" else -(-training.batch_size // ranks)
        micro = -(-own // min(training.gradient_accumulation, own))
        wanted.setdefault(min(ranks, per_node, here), set()).add(micro)
    return {copies: _spread_out(sizes) for copies, sizes in wanted.items()}


def _spread_out(sizes: set[int]) -> list[int]:
    """At least two, for a line; at most a few, the largest and the smallest among them."""
    if len(sizes) == 1:
        only = next(iter(sizes))
        return sorted({only, only // 2 if only > 1 else 2})
    found = sorted(sizes)
    while len(found) > _MOST_SIZES:
        gaps = [found[i + 1] / found[i - 1] for i in range(1, len(found) - 1)]
        del found[1 + gaps.index(min(gaps))]
    return found


def _cluster(
    options: PlanOptions, profile: Profile, per_node: int, here: int, lab: Laboratory
) -> tuple[Cluster, list[str]]:
    """The machines, from what the user says and what can be measured; and what had to be assumed."""
    base = Cluster()
    several = max(options.gpus) > 1
    local = min(max(options.gpus), per_node, here)
    links = {}
    if local > 1 and options.intra_bandwidth is None:
        for way in map(BY_LABEL.__getitem__, ("ddp", "mpi", "horovod")):
            if options.strategies and not _talks(options, way.label):
                continue
            found = lab.links(way, local)
            if found is not None:
                links[found.backend] = found
    assumed = []
    if several and not links and options.intra_bandwidth is None and min(per_node, max(options.gpus)) > 1:
        assumed.append(f"{bandwidth_text(base.intra_bandwidth)} between GPUs of a machine (--intra-bandwidth)")
    if max(options.gpus) > per_node:
        if options.bandwidth is None:
            assumed.append(f"{bandwidth_text(base.bandwidth)} between machines (--bandwidth)")
        if options.latency is None:
            assumed.append(f"{time_text(base.latency)} for a message between machines (--latency)")
    if several and not links:
        assumed.append("transfers cost the computation beside them nothing")
    measured = next(iter(links.values()), None)
    share = profile.model["device_memory"] / (min(per_node, here) if profile.device == "cpu" else 1)
    cluster = replace(
        base,
        per_node=per_node,
        bandwidth=options.bandwidth or base.bandwidth,
        intra_bandwidth=options.intra_bandwidth or base.intra_bandwidth,
        latency=options.latency or base.latency,
        overlap=measured.overlap if measured is not None else base.overlap,
        links=links,
        device_memory=options.device_memory or share,
        price=options.price,
    )
    return cluster, assumed


def _talks(options: PlanOptions, label: str) -> bool:
    """Whether one of the strategies asked for talks as this one does."""
    backend = BY_LABEL[label].backend
    return any(BY_LABEL[name].backend == backend for name in options.strategies)


def _measure(predictions: Sequence[Prediction], lab: Laboratory, pace: Pace, here: int, accumulation: int) -> None:
    """Run for real what this machine can run, by turns with `single`'s steps of the same size."""
    checked = pace.largest(1)
    for one in predictions:
        if one.ranks > here or not one.way.installed:
            continue
        lab.say(f"running {one.way.label} on {one.ranks} for comparison")
        # A batch that was not measured is to be predicted: its pace is that of one that was.
        micro = checked if one.check else -(-one.batch // min(accumulation, one.batch))
        turns = _TURNS, steps_for(one.time.whole)
        beside = functools.partial(pace.now, one.ranks, micro)
        found, one.trouble = lab.ranks(one.way, one.ranks, one.global_batch, turns, beside)
        if found is not None:
            one.measured_memory, one.measured_step, one.pace = found["peak"], found["step"], found["beside"]
            predicted = time_text(one.time.whole * one.pace)
            lab.say(f"  {time_text(one.measured_step)} a step, predicted {predicted}")


def _noise(pace: Pace) -> list[str]:
    found = pace.noise
    if found is None:
        return []
    text = (
        "noise: steps of single, measured again by turns with each strategy, were off their own median by "
        f"{found[0]:.1%} in the middle and by {found[1]:.1%} at most; errors below that mean nothing"
    )
    return [text]


def _notes(profile: Profile, threads: int | None, options: PlanOptions) -> list[str]:
    notes = [f"measured with {', '.join(map(str, profile.measured_batches))} samples a step on {profile.device}"]
    if threads is not None:
        notes.append(f"a rank is a process with {threads} thread{'s' if threads > 1 else ''} on this kind of machine")
        beside = max(profile.times)
        if beside > 1:
            notes.append(f"times for several ranks on a machine were measured with {beside} processes at once")
    if profile.settled:
        notes.append(_settled(profile.settled))
    if profile.trouble:
        notes.append(f"larger batches could not be measured and are extrapolated: {profile.trouble}")
    if profile.spread > 0.1:
        notes.append(f"the machine was busy: steps differed by {profile.spread:.0%}, so times are rough")
    if profile.had_core < _ALONE:
        notes.append(
            f"the machine was busy: a process that was measured had a core for {profile.had_core:.0%} of the time; "
            "steps and their errors say little, memory is as good as ever"
        )
    absent = sorted({way.strategy for way in WAYS if not way.installed})
    if absent:
        notes.append(f"not installed here, so predicted but not recommended: {', '.join(absent)}")
    if options.measure and profile.device == "cpu":
        notes.append("memory on the CPU is what is in use; freed memory that the process keeps comes on top")
    return notes


def _settled(chosen: Mapping[str, str]) -> str:
    """A choice that ranks of several GPUs would not come to by themselves has to be given to them."""
    text = f"left at auto, and chosen as training on one GPU does: {', '.join(f'{k}={v}' for k, v in chosen.items())}"
    usual = {"training.precision": "bf16", "training.channels_last": "on"}
    if any(value != usual[name] for name, value in chosen.items()):
        text += "; several GPUs measure nothing and take bf16 with channels innermost: give them these settings"
    return text
