"""The measurements of a plan: processes that run the real training for some steps, and ranks that talk."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed_training.bench.turn_process import Start, TurnProcess
from distributed_training.config import Config
from distributed_training.planning.child import BEFORE_CAPTURED, Task
from distributed_training.planning.cluster import Links
from distributed_training.planning.profile import Profile
from distributed_training.planning.sweep import RESTLESS
from distributed_training.planning.ways import Way
from distributed_training.runtime.errors import BenchError, OutOfMemoryError
from distributed_training.strategies import needs
from distributed_training.verify.running import Outcome, end_program, finish_program, run_program, start_program

_BY_TURNS = "distributed_training.planning.child:by_turns"
_MIDDLE = 0.6745  # of a normal distribution: half of all values are nearer than so many sigma
_AROUND = 2  # turns before and after what is at work also while it is not its turn
_LAUNCHES = 3  # of it: where its threads settle differs from launch to launch, and its steps by a tenth with that
_KILLED = ("exit code -9", "exit code 137")


@dataclass
class Laboratory:
    """Where and how measurements are made."""

    config: Config
    folder: Path
    threads: int | None
    """CPU threads of each process; None: as the machine has it (GPUs)."""
    timeout: float
    say: Callable[[str], None]
    seconds: float = 1.0
    """To time each batch size for."""
    _runs: int = 0

    def profile(self, wanted: Mapping[int, Sequence[int]]) -> Profile:
        """Time and memory of one device by batch size, with so many processes beside each other."""
        profile: Profile | None = None
        for copies, batches in sorted(wanted.items()):
            beside = f", {copies} at once" if copies > 1 else ""
            self.say(f"measuring the model with {_numbers(batches)} samples a step{beside}")
            answers = self._copies(copies, sorted(batches))
            if profile is None:
                profile = Profile(answers[0]["model"], settled=answers[0]["settled"])
                self.config = self.config.replace(**profile.settled)
            profile.times[copies] = slowest([answer["batches"] for answer in answers])
            profile.jitter[copies] = jitter_of([one["series"] for a in answers for one in a["batches"].values()])
            profile.trouble = profile.trouble or answers[0]["trouble"]
        assert profile is not None
        found = [one for times in profile.times.values() for one in times.values()]
        profile.spread = max(one["spread"] for one in found)
        if profile.device == "cpu":
            profile.had_core = min(one["had_core"] for one in found)
        return profile

    def links(self, way: Way, ranks: int) -> Links | None:
        """How fast so many ranks talk on this machine; None where the strategy's library is missing or it failed."""
        if not way.installed:
            return None
        self.say(f"measuring how fast {ranks} ranks talk ({way.strategy})")
        found: list[dict[str, Any]] = []
        for _ in range(_LAUNCHES if way.strategy in RESTLESS else 1):
            one = self._sweep(way, ranks)
            if one is None:
                break
            found.append(one)
        return read_links(middle_of(found), way) if found else None

    def _sweep(self, way: Way, ranks: int) -> dict[str, Any] | None:
        folder = self._new_folder()
        out = folder / "links.json"
        words = [str(out), way.strategy, self.config.training.device, str(self.timeout)]
        outcome = self._run(way, ranks, ["-m", "distributed_training.planning.sweep", *words], folder)
        if outcome.problem or not out.is_file():
            self.say(f"  not measured: {outcome.problem}: {_last(outcome)}")
            return None
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return found

    def reference(self, copies: int, batch: int, steps: int, stack: ExitStack) -> list[TurnProcess]:
        """Processes that do `single`'s steps beside each other whenever it is their turn, until the stack is left."""
        config = self._settings({"strategy.name": "single", "strategy.compression": "none"}, 1)
        task = Task(config=config.to_dict(), batches=[batch], memory=False, details=False, steps=steps)
        start = Start(_BY_TURNS, asdict(task), variables=self._variables())
        processes = [stack.enter_context(TurnProcess(f"single {n + 1}", start, self.timeout)) for n in range(copies)]
        for process in processes:
            process.wait_for_imports()
        at_once(processes)  # they set up
        return processes

    def ranks(
        self,
        way: Way,
        ranks: int,
        batch: int,
        plan: tuple[int, int],
        beside: Callable[[], float],
        accumulation: int | None = None,
    ) -> tuple[dict[str, float] | None, str]:
        """(what so many real ranks took, "") or (None, why not).

        Args:
            plan: turns, and steps in each.
            beside: what is measured by turns with them.
            accumulation: micro-batches of a step, if not as the config says.
        """
        launches, (turns, steps) = 1, plan
        restless = way.strategy in RESTLESS
        if restless:  # it has no turns: between them it would be at work, too
            launches, turns, steps = _LAUNCHES, 1, turns * steps
        task, launcher = self.rank_task(way, batch, steps, accumulation), _launcher(way)
        start = Start(_BY_TURNS, asdict(task), 1 if launcher == "none" else ranks, launcher, self._variables())
        took: list[float] = []
        peaks: list[float] = []
        others = [beside() for _ in range(_AROUND)] if restless else []
        try:
            for _ in range(launches):
                with TurnProcess(way.label, start, self.timeout) as process:
                    peaks.append(process.ready()["peak"])
                    for _ in range(turns):
                        took.append(process.turn()["step"])
                        if not restless:
                            others.append(beside())
                if restless:
                    others += [beside() for _ in range(_AROUND)]
        except BenchError as error:
            first, *said = str(error).removeprefix(f"{way.label}: ").splitlines()
            return None, " ".join([first, *[line.strip() for line in said[-1:]]])
        found = {"step": statistics.median(took), "peak": statistics.median(peaks), "beside": statistics.median(others)}
        if not restless:  # each turn by the pace of the moment
            found["paced"] = statistics.median(own / pace for own, pace in zip(took, others, strict=True))
        return found, ""

    def rank_task(self, way: Way, batch: int, steps: int, accumulation: int | None = None) -> Task:
        """What real ranks do: the user's training, some steps of it."""
        settings: dict[str, Any] = dict(way.settings)
        if way.compression == "powersgd":
            settings["strategy.powersgd_start_step"] = 2  # or a short run would not see it
        return Task(
            config=self._settings(settings, accumulation or self.config.training.gradient_accumulation).to_dict(),
            batches=[batch],
            details=False,
            steps=steps,
            warmup=3 if self.threads is not None else BEFORE_CAPTURED,
        )

    def _words(self, task: Task, folder: Path) -> list[str]:
        """The program of a process that does a task."""
        (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
        return ["-m", "distributed_training.planning.child", str(folder / "task.json")]

    def _copies(self, copies: int, batches: list[int]) -> list[dict[str, Any]]:
        folder = self._new_folder()
        single = {"strategy.name": "single", "strategy.compression": "none"}
        processes = []
        with ExitStack() as stack:
            for number in range(copies):
                device = {"training.device": f"cuda:{number}"} if copies > 1 and self.threads is None else {}
                task = Task(
                    config=self._settings({**single, **device}, 1).to_dict(),
                    batches=batches,
                    folder=str(folder),
                    name=str(number),
                    copies=copies,
                    seconds=self.seconds,
                )
                own = folder / f"copy-{number}"
                own.mkdir()
                process = start_program("none", 1, self._words(task, own), self._variables(), own)
                stack.callback(end_program, process)
                processes.append((process, own))
            end = time.monotonic() + self.timeout
            outcomes = [finish_program(one, own, max(0.0, end - time.monotonic())) for one, own in processes]
        answers = []
        for number, outcome in enumerate(outcomes):
            file = folder / f"answer-{number}.json"
            answer = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"batches": {}}
            if not answer["batches"]:
                raise self._failed(outcome, batches[0])
            small = [int(size) for size in answer["batches"]]
            if outcome.problem and small != batches:  # killed for a large one before anything was timed
                self.say(f"  not possible with more than {small[-1]} samples a step: {outcome.problem}")
                return [{**one, "trouble": outcome.problem} for one in self._copies(copies, small)]
            answer["batches"] = {size: one for size, one in answer["batches"].items() if one["step"]}
            if not answer["batches"]:
                raise self._failed(outcome, batches[0])
            if outcome.problem:
                answer["trouble"] = f"a batch of more than {max(map(int, answer['batches']))}: {outcome.problem}"
            answers.append(answer)
        return answers

    def _failed(self, outcome: Outcome, batch: int) -> Exception:
        if outcome.problem in _KILLED:
            return OutOfMemoryError(
                f"a step of {batch} samples was killed, for want of memory most likely: it cannot be measured on "
                "this machine; plan where there is more memory, or try training.gradient_checkpointing=true"
            )
        text = "\n    ".join(outcome.output)
        kind = OutOfMemoryError if "OutOfMemoryError" in text or "even with one sample" in text else BenchError
        return kind(f"a step of {batch} samples could not be measured ({outcome.problem}); it said:\n    {text}")

    def _settings(self, settings: Mapping[str, Any], accumulation: int) -> Config:
        """The training, without anything that a measurement should not touch."""
        quiet: dict[str, Any] = {
            "run.progress": "off",
            "run.stop_after_steps": None,
            "training.type": "auto",
            "training.epochs": 1_000_000,
            # Of a training without end `auto` would have kernels compiled, which takes minutes for all batch sizes.
            "training.compile": "on" if self.config.training.compile == "on" else "off",
            "training.gradient_accumulation": min(accumulation, self.config.training.batch_size),
            "checkpoint.resume": "never",
            "checkpoint.every_epochs": 0,
            "checkpoint.every_steps": None,
            "early_stopping.enabled": False,
            "tracking.trackers": [],
            "record.folder": None,
            "data.validation_fraction": self.config.data.validation_fraction,
        }
        return self.config.replace(**{**quiet, **settings})

    def _run(self, way: Way, ranks: int, words: list[str], folder: Path) -> Outcome:
        return run_program(_launcher(way), ranks, words, self._variables(), folder, self.timeout)

    def _variables(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads)} if self.threads is not None else {}

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self.folder / str(self._runs)
        folder.mkdir(parents=True)
        return folder


def at_once(processes: Sequence[TurnProcess]) -> list[dict[str, Any]]:
    """A turn of all of them beside each other: what each answers."""
    for process in processes:
        process.begin()
    return [process.finish() for process in processes]


def _launcher(way: Way) -> str:
    """Who starts the ranks: ours, which is quicker, except where a library insists on its own."""
    wanted = needs(way.strategy).launcher
    return "dtrain" if wanted == "torchrun" else wanted


def middle_of(sweeps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of several sweeps of the same ranks: the median of each number."""
    first = sweeps[0]
    numbers = {
        name: statistics.median(one[name] for one in sweeps) for name in first if name not in ("backend", "times")
    }
    times = {
        name: [
            (size, statistics.median(one["times"][name][k][1] for one in sweeps)) for k, (size, _) in enumerate(points)
        ]
        for name, points in first["times"].items()
    }
    return {**numbers, "backend": first["backend"], "times": times}


def read_links(found: Mapping[str, Any], way: Way) -> Links:
    """What a sweep found. A way that chooses its backend looks for it by that name, not by the one torch knows."""
    times = {name: [(float(size), float(took)) for size, took in points] for name, points in found["times"].items()}
    return Links(
        ranks=int(found["ranks"]),
        times=times,
        overlap=float(found["overlap"]),
        backend=way.backend or str(found["backend"]),
        slowdown=found["slowdown"],
        message=found.get("message"),
    )


def slowest(answers: list[dict[str, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Of copies beside each other the one that took longest, by batch size: ranks wait for it."""
    merged: dict[int, dict[str, Any]] = {}
    for size in set.intersection(*(set(answer) for answer in answers)):
        found = [answer[size] for answer in answers]
        one = dict(max(found, key=lambda f: float(f["step"])))
        one["spread"], one["had_core"] = max(f["spread"] for f in found), min(f["had_core"] for f in found)
        merged[int(size)] = one
    return merged


def jitter_of(series: Sequence[Sequence[float]]) -> float:
    """How much a step differs from the one before, as a share of it: sigma, by the middle difference.

    A drift over many steps does not count, nor does a single step that was disturbed.
    """
    changes = [abs(b - a) / statistics.median(steps) for steps in series for a, b in itertools.pairwise(steps)]
    return statistics.median(changes) / (_MIDDLE * math.sqrt(2)) if changes else 0.0


def _numbers(batches: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(batches)))


def _last(outcome: Outcome) -> str:
    return next((line for line in reversed(outcome.output) if line.strip()), "it said nothing")
