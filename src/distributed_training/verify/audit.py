"""A run's ledger against its plan: was every sample used exactly once in every epoch?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distributed_training.checkpoint import find_checkpoint, read_state
from distributed_training.config import Config
from distributed_training.data import Plan
from distributed_training.data.plan import PLAN_VERSION
from distributed_training.data.sources import load_dataset
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.runtime.run_directory import FROM_PYTHON, RunDirectory, read_jsonl
from distributed_training.training.ledger import hash_of

_IDS_AT_ONCE = 1 << 20
Place = tuple[int, int]  # epoch, step


@dataclass(frozen=True)
class Audit:
    """What the ledger proves."""

    plan: Plan
    epochs: int
    """Complete epochs."""
    steps: int
    """Steps of the last epoch, where it is not complete."""
    resumes: int
    """How often the run was resumed."""
    problem: str
    """The first step that is wrong, missing or there twice; empty where all is well."""
    skipped: dict[Place, list[int]] = field(default_factory=dict)
    """Samples that could not be loaded and were left out, as the run's settings allow."""


def audit(run: RunDirectory) -> Audit:
    """Compare each line that counts with the samples that the plan has for its step."""
    config = run.load_config()
    if not run.ledger_file.is_file():
        raise RunDirectoryError(
            f"{run.path}: there is no ledger.jsonl; only runs of a Trainer with files can be audited"
        )
    plan = _plan(run, config)
    lines, skipped, resumes, problem = _lines_that_count(run)
    epochs, steps = divmod(len(lines), plan.steps_per_epoch)
    if not problem:
        problem = _first_difference(lines, skipped, plan) or _too_short(run, config, epochs, steps)
    return Audit(plan, epochs, steps, resumes, problem, skipped)


def _plan(run: RunDirectory, config: Config) -> Plan:
    fed = [line["fed"] for line in read_jsonl(run.ledger_file) if "fed" in line]
    if fed:  # the data was on other machines; what they said of it is in the ledger
        return _plan_from(run, fed[-1])
    if config.data.dataset != FROM_PYTHON:
        samples, training = len(load_dataset(config.data).train), config.training
        return Plan(samples, training.batch_size, training.seed, config.data.shuffle, config.data.drop_last)
    # The data cannot be had here; every checkpoint says how it was divided into steps.
    return _plan_from(run, read_state(find_checkpoint(run.path).path)["source"])


def _plan_from(run: RunDirectory, source: Mapping[str, Any]) -> Plan:
    facts = dict(source)
    facts.pop("dataset", None)
    if not facts:
        raise RunDirectoryError(f"{run.path}: its batches came from an iterable without sample ids; nothing to audit")
    if facts.pop("plan_version") != PLAN_VERSION:
        raise RunDirectoryError(
            f"{run.path}: made with another version of the sample plan than this one, {PLAN_VERSION}"
        )
    return Plan(**facts)


def _lines_that_count(run: RunDirectory) -> tuple[dict[Place, str], dict[Place, list[int]], int, str]:
    """(hash by place, samples left out by place, number of resumes, the first step that is there twice)."""
    counted: dict[Place, str] = {}
    skipped: dict[Place, list[int]] = {}
    resumes = 0
    for line in read_jsonl(run.ledger_file):
        if "fed" in line:
            continue
        if "resume" in line:
            resumes += 1
            start = (line["resume"]["epoch"], line["resume"]["step"])
            counted = {place: ids for place, ids in counted.items() if place < start}
            skipped = {place: ids for place, ids in skipped.items() if place < start}
            continue
        place = (line["epoch"], line["step"])
        if place in counted:
            return counted, skipped, resumes, f"{_named(place)} is there twice, with no resume between"
        counted[place] = line["ids"]
        if "skipped" in line:
            skipped[place] = line["skipped"]
    return counted, skipped, resumes, ""


def _first_difference(lines: dict[Place, str], skipped: dict[Place, list[int]], plan: Plan) -> str:
    """The first step, in the order of the plan, that is missing or used other samples."""
    for place, planned in itertools.islice(_planned(plan), len(lines)):
        if place not in lines:
            return f"{_named(place)} is missing, though later steps are there"
        expected = planned if place not in skipped else planned[~np.isin(planned, skipped[place])]
        if lines[place] != hash_of(expected):
            return f"{_named(place)} used other samples than the plan has for it"
    return ""


def _planned(plan: Plan) -> Iterator[tuple[Place, np.ndarray]]:
    """Every step of every epoch with its samples, without end."""
    at_once, epoch = max(1, _IDS_AT_ONCE // plan.batch_size), 0
    while True:
        for first in range(0, plan.steps_per_epoch, at_once):
            last = min(first + at_once, plan.steps_per_epoch)
            ids = plan.span(epoch, first, last)
            for step in range(first, last):
                start = (step - first) * plan.batch_size
                yield (epoch, step), ids[start : start + plan.batch_size]
        epoch += 1


def _too_short(run: RunDirectory, config: Config, epochs: int, steps: int) -> str:
    """A run that says of itself that it was completed has all its steps in the ledger."""
    ends = [event["status"] for event in run.events() if event.get("event") == "finish"]
    if ends[-1:] == ["completed"] and epochs < config.training.epochs:
        return f"{_named((epochs, steps))} is missing, though the run was completed"
    return ""


def _named(place: Place) -> str:
    return f"step {place[1]} of epoch {place[0]}"
