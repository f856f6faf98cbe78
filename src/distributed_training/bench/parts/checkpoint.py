"""What a checkpoint costs: how long training stands still, until it is safe on the disk, and to load it again."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from distributed_training.bench.choosing import choose
from distributed_training.bench.figures import Figure, PartResult, Plot
from distributed_training.bench.options import BenchOptions
from distributed_training.bench.turn_process import Start, TurnProcess
from distributed_training.config import Config
from distributed_training.runtime.device import choose_device
from distributed_training.runtime.errors import BenchError

NAME = "checkpoint"
ABOUT = (
    "A state of random numbers is saved and loaded again. `ours` is written in the background, hashed, synced and "
    "committed by a rename; `torch.save` and `raw` (a plain write of as many bytes) are synced too, and stop training "
    "until they are done. `copy` is one copy in memory, which a save in the background cannot do without. Loading "
    "finds the file in the page cache; ours compares every byte with its hash first."
)
WAYS = ("copy", "raw", "torch.save", "ours")
CASES = {"40MB": 40, "400MB": 400, "2GB": 2048}
_QUANTITIES = {  # key of an answer -> quantity, and the variant that it is compared with
    "stopped": ("time that training stands still", "torch.save"),
    "durable": ("time until durable", "raw"),
    "loading": ("time to load", "torch.save"),
}


def run(options: BenchOptions) -> PartResult:
    """Measure below `run.root`, on the disk where checkpoints go."""
    device = choose_device(options.device).type
    usual = ["40MB"] if options.quick else ["400MB"]
    ways = choose(options.variants, WAYS, WAYS, "--variants")
    result = PartResult(name=NAME, title="Checkpoints", about=ABOUT)
    root = Path((options.config or Config()).run.root)
    result.notes.append(f"Files were written below `run.root`; the state was in the memory of the {device}.")
    for case in choose(options.cases, CASES, usual, "--cases"):
        result.figures += _case(case, ways, device, root, options)
    result.plots = [
        Plot(title=f"{quantity[0].upper()}{quantity[1:]}", quantity=quantity, show="values")
        for quantity, _ in _QUANTITIES.values()
    ]
    return result


def _case(case: str, ways: list[str], device: str, root: Path, options: BenchOptions) -> list[Figure]:
    made = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="bench-", dir=root)
    except OSError as error:
        raise BenchError(f"{root}: no files can be written there ({error.strerror}); set run.root") from None
    arguments = {"folder": scratch.name, "megabytes": CASES[case], "device": device, "timeout": options.timeout}
    start = Start("distributed_training.bench.saving:run", arguments)
    try:
        with scratch, TurnProcess(case, start, options.timeout) as process:
            process.ready()
            turns = {way: functools.partial(process.turn, way=way) for way in ways}
            answers = options.turns(turns, case)
    finally:
        for folder in made:  # leave no empty folder behind
            folder.rmdir()
    return _figures(case, answers)


def _figures(case: str, answers: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    figures = []
    for key, (quantity, reference) in _QUANTITIES.items():
        figures += [
            Figure(
                values=[answer[key] * 1e3 for answer in found],
                part=NAME,
                case=f"a state of {case}",
                quantity=quantity,
                variant=way,
                unit="ms",
                better="lower",
                reference=reference if reference in answers else None,
            )
            for way, found in answers.items()
            if key in found[0]
        ]
    return figures
