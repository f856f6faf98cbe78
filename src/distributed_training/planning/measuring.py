"""The measurements of a plan: processes that run the real training for some steps, and ranks that talk."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.planning.child import BEFORE_CAPTURED, Task
from distributed_training.planning.cluster import Links
from distributed_training.planning.profile import Profile
from distributed_training.planning.ways import Way
from distributed_training.runtime.errors import BenchError, OutOfMemoryError
from distributed_training.strategies import needs
from distributed_training.verify.running import Outcome, run_program

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
                profile = Profile(answers[0]["model"])
            profile.times[copies] = _middle([answer["batches"] for answer in answers])
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
        folder = self._new_folder()
        out = folder / "links.json"
        words = [str(out), way.strategy, self.config.training.device, str(self.timeout)]
        outcome = self._run(way, ranks, ["-m", "distributed_training.planning.sweep", *words], folder)
        if outcome.problem or not out.is_file():
            self.say(f"  not measured: {outcome.problem}: {_last(outcome)}")
            return None
        return read_links(json.loads(out.read_text(encoding="utf-8")), way)

    def ranks(self, way: Way, ranks: int, batch: int, steps: int) -> tuple[dict[str, Any] | None, str]:
        """(what so many real ranks took, "") or (None, why not)."""
        folder = self._new_folder()
        settings: dict[str, Any] = dict(way.settings)
        if way.compression == "powersgd":
            settings["strategy.powersgd_start_step"] = 2  # or a short run would not see it
        task = Task(
            config=self._settings(settings, self.config.training.gradient_accumulation).to_dict(),
            batches=[batch],
            folder=str(folder),
            details=False,
            steps=steps,
            warmup=3 if self.threads is not None else BEFORE_CAPTURED,
        )
        (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
        words = ["-m", "distributed_training.planning.child", str(folder / "task.json")]
        outcome = self._run(way, ranks, words, folder)
        answers = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("answer-*.json"))]
        expected = 1 if needs(way.strategy).launcher == "none" else ranks
        if outcome.problem or len(answers) < expected:
            return None, f"{outcome.problem}: {_last(outcome)}"
        found = [answer["batches"][str(batch)] for answer in answers]
        return {key: max(one[key] for one in found) for key in ("step", "peak")}, ""

    def _copies(self, copies: int, batches: list[int]) -> list[dict[str, Any]]:
        folder = self._new_folder()
        config = self._settings({"strategy.name": "single", "strategy.compression": "none"}, 1)

        def one(number: int) -> Outcome:
            device = {"training.device": f"cuda:{number}"} if copies > 1 and self.threads is None else {}
            task = Task(
                config=config.replace(**device).to_dict() if device else config.to_dict(),
                batches=batches,
                folder=str(folder),
                name=str(number),
                copies=copies,
                seconds=self.seconds,
            )
            own = folder / f"copy-{number}"
            own.mkdir()
            (own / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
            words = ["-m", "distributed_training.planning.child", str(own / "task.json")]
            return run_program("none", 1, words, self._variables(), own, self.timeout)

        with ThreadPoolExecutor(copies) as pool:
            outcomes = list(pool.map(one, range(copies)))
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
        launcher = needs(way.strategy).launcher
        return run_program(launcher, ranks, words, self._variables(), folder, self.timeout)

    def _variables(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.threads)} if self.threads is not None else {}

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self.folder / str(self._runs)
        folder.mkdir(parents=True)
        return folder


def read_links(found: Mapping[str, Any], way: Way) -> Links:
    """What a sweep found. A way that chooses its backend looks for it by that name, not by the one torch knows."""
    times = {name: [(float(size), float(took)) for size, took in points] for name, points in found["times"].items()}
    return Links(int(found["ranks"]), times, float(found["overlap"]), way.backend or str(found["backend"]))


def _middle(answers: list[dict[str, dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Of copies beside each other: the mean of their times, for ranks wait for each other in turn; the rest of one."""
    merged: dict[int, dict[str, Any]] = {}
    for size in set.intersection(*(set(answer) for answer in answers)):
        found = [answer[size] for answer in answers]
        one = dict(found[0])
        one["step"] = statistics.fmean(f["step"] for f in found)
        one["spread"], one["had_core"] = max(f["spread"] for f in found), min(f["had_core"] for f in found)
        names = {name for f in found for name in f["parts"]}
        one["parts"] = {name: statistics.fmean(f["parts"].get(name, 0.0) for f in found) for name in names}
        merged[int(size)] = one
    return merged


def _numbers(batches: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(batches)))


def _last(outcome: Outcome) -> str:
    return next((line for line in reversed(outcome.output) if line.strip()), "it said nothing")
