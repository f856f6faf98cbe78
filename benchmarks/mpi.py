"""Our MPI backend beside Gloo, plain MPI_Allreduce and Horovod, in one run.

    python benchmarks/mpi.py [PART ...] [--rounds 15]

Parts: allreduce, overlap, waiting, ddp, zero, horovod, hosts, int8, leak, and gpu where it is named.

Two ranks. What is compared takes turns in the same ranks, except Horovod, which is a job of its own; the time of a turn
is that of rank 0, and every turn begins with a barrier. `waiting`, `hosts` and `int8` need root: two network namespaces
are two machines there. `leak` is no comparison: the memory of a rank before and after 100,000 all-reduces. `gpu` needs
CUDA. Writes benchmarks/results/mpi.json and .md, ratios with their targets; other parts stay as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi_ranks import KB, MANY, MB, SLOW, Figures

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PROGRAM = Path(__file__).with_name("mpi_ranks.py")
RATE, FASTER = "100mbit", "1gbit"
LAUNCHES = 3


def command_of(name: str, rounds: int, out: Path) -> list[str]:
    """What a rank runs."""
    return [sys.executable, str(PROGRAM), name, str(rounds), str(out)]


def mpirun(words: list[str]) -> list[str]:
    """The launcher of the environment, with what every launch of ours has."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    own = Path(sys.executable).with_name("mpirun")
    return [str(own) if own.exists() else "mpirun", *as_root, "--bind-to", "none", "-np", "2", *words]


def variables(**more: str) -> dict[str, str]:
    """The environment of a launcher."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **more}


def run(command: list[str], out: Path, **more: str) -> Figures:
    """Run a launcher to its end; what rank 0 left."""
    done = subprocess.run(command, env=variables(**more), capture_output=True, text=True, timeout=3600)
    if not out.exists():
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


def here(name: str, rounds: int, folder: Path, **more: str) -> Figures:
    """Two ranks on this machine."""
    out = folder / f"{name}.json"
    out.unlink(missing_ok=True)
    return run([*mpirun(["--host", "localhost:2"]), *command_of(name, rounds, out)], out, **more)


@contextmanager
def machines() -> Iterator[tuple[Any, Any]]:
    """Two network namespaces with a cable between them."""
    sys.path.insert(0, str(ROOT))
    from tests.launch.networks import two_machines

    with two_machines() as pair:
        yield pair


def across(name: str, rounds: int, folder: Path, rate: str | None = None) -> Figures:
    """One rank on each of two machines, over a link of this rate."""
    out, agent = folder / f"{name}.json", ROOT / "tests" / "launch" / "programs" / "agent_to_namespace.py"
    with machines() as pair:
        for machine in pair if rate else ():
            shape = f"tc qdisc add dev eth0 root tbf rate {rate} burst 64kb latency 100ms"
            subprocess.run([*machine.inside, *shape.split()], check=True, timeout=30)
        (folder / "hosts").write_text("".join(f"{machine.name} slots=1\n" for machine in pair))
        words = ["--hostfile", str(folder / "hosts"), "-x", "OMP_NUM_THREADS"]
        before = [sys.executable, str(agent), "--here", pair[0].name]
        command = [*before, *mpirun(words), *command_of(name, rounds, out)]
        return run(command, out, PRTE_MCA_plm_ssh_agent=f"{sys.executable} {agent}")


def horovod(rounds: int, folder: Path) -> Figures:
    """DDP on ours and Horovod: two jobs that are there at a time and take turns; started anew three times."""
    from distributed_training.bench.measure import Measured, interleave, ratio

    parts = []
    for number in range(LAUNCHES):
        own = folder / str(number)
        own.mkdir()
        jobs = {side: start_side(side, own) for side in ("ours", "Horovod")}
        counts = {side: itertools.count() for side in jobs}
        turns = {side: lambda s=side, o=own, j=jobs, c=counts: one_turn(s, j[s], o, next(c[s])) for side in jobs}
        try:
            parts.append(interleave(turns, max(3, rounds // LAUNCHES)))
        finally:
            (own / "end").touch()
            for job in jobs.values():
                try:
                    job.wait(30)
                except subprocess.TimeoutExpired:
                    job.kill()
    measured = {side: Measured([v for part in parts for v in part[side].values]) for side in parts[0]}
    return {f"{side}, ms a step": one.median * 1e3 for side, one in measured.items()} | {
        "spread": measured["ours"].spread,
        "to Horovod": ratio(measured, "Horovod", "ours"),
    }


def start_side(side: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start one of two jobs under its own launcher."""
    program = [sys.executable, str(PROGRAM), "--turns", side, str(folder)]
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2"]
    launcher = mpirun(["--host", "localhost:2"]) if side == "ours" else horovodrun
    with (folder / f"{side}.log").open("wb") as log:
        return subprocess.Popen([*launcher, *program], env=variables(), stdout=log, stderr=subprocess.STDOUT)


def one_turn(side: str, job: subprocess.Popen[bytes], folder: Path, number: int) -> float:
    """Let a job take its turn; the seconds of a step."""
    path = folder / f"{side}-{number}"
    path.touch()
    deadline = time.monotonic() + 300
    while not path.with_suffix(".time").exists():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{side}: {(folder / f'{side}.log').read_text()[-4000:]}")
        time.sleep(0.02)
    return float(path.with_suffix(".time").read_text())


PARTS: dict[str, Callable[[int, Path], Figures]] = {
    "allreduce": lambda rounds, folder: here("allreduce", rounds, folder),
    "overlap": lambda rounds, folder: here("overlap", rounds, folder),
    "waiting": lambda rounds, folder: across("waiting", rounds, folder, FASTER),
    "ddp": lambda rounds, folder: here("ddp", rounds, folder),
    "zero": lambda rounds, folder: here("zero", rounds, folder),
    "horovod": horovod,
    "hosts": lambda rounds, folder: across("hosts", rounds, folder),
    "int8": lambda rounds, folder: across("int8", rounds, folder, RATE),
    "gpu": lambda rounds, folder: here("gpu", rounds, folder),
    "leak": lambda rounds, folder: {
        "through shared memory": here("leak", rounds, folder),
        "over MPI": here("leak", rounds, folder, DTRAIN_MPI_SHARED_MEMORY="0"),
    },
}
TITLES = {
    "allreduce": "All-reduce of float32, two ranks on one machine",
    "overlap": "Overlap: DDP of the 25M MLP on our backend",
    "waiting": "Overlap: the same with eight times the batch, between two machines over a link of 1 Gbit/s",
    "ddp": "DDP on our backend and on Gloo",
    "zero": "ZeRO 1, 2 and 3 on our backend and on Gloo",
    "horovod": "DDP on our backend and Horovod, the 25M MLP, two jobs by turns",
    "hosts": "All-reduce between two machines (network namespaces), one rank on each",
    "int8": f"All-reduce of {SLOW // MB} MB over a link of 100 Mbit/s, by what travels",
    "gpu": "All-reduce of float32 on one GPU that two ranks share",
    "leak": f"{MANY:,} all-reduces of 4 KB, every other one asynchronous: resident memory of rank 0",
}


def target_of(part: str, row: str, column: str) -> float | None:
    """What a ratio should be at least; None where nothing is aimed at."""
    size = int(row) if row.isdigit() else 0
    if column.endswith("to MPI_Allreduce"):
        return 0.95 if part == "hosts" else 2.0 if size >= 32 * MB else 1.0
    if part == "allreduce" and column == "to Gloo":
        return 50.0 if size <= 4 * KB else 4.0 if size >= MB else None
    if column == "to Gloo":
        return 1.3 if row == "ddp, 25M MLP" else 1.0
    return {"to Horovod": 1.2, "int8 to fp32": 3.5}.get(column)


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all but gpu unless given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for mpi.json and mpi.md")
    arguments = parser.parse_args()
    import torch

    from distributed_training.native.build import MPI_SOURCE, load_extension
    from distributed_training.runtime.device import machine_facts

    library = load_extension(MPI_SOURCE).library()  # built before anything is measured
    kept = arguments.results / "mpi.json"
    report: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in arguments.parts or [part for part in PARTS if part != "gpu"]:
        facts = machine_facts(torch.device("cuda" if name == "gpu" else "cpu"))
        facts.pop("host")
        machine = "machine of gpu" if name == "gpu" else "machine"
        report[machine] = {**facts, "rounds": arguments.rounds, "mpi": library}
        with tempfile.TemporaryDirectory() as folder:
            report[name] = PARTS[name](arguments.rounds, Path(folder))
        print("\n".join([f"{name}:", *table(name, report[name])]), flush=True)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(report, indent=2) + "\n")
        kept.with_suffix(".md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = [
        "# The MPI backend",
        "",
        f"Two ranks, one thread each. {_made_by(report, 'machine', '')}",
        "Variants take turns in the same ranks; a ratio is the median over rounds, above 1 ours is faster.",
        "In brackets: what it should be at least.",
    ]
    for part, title in TITLES.items():
        if part in report:
            made_by = [_made_by(report, "machine of gpu", " gpu"), ""] if part == "gpu" else []
            lines += ["", f"## {title}", "", *made_by, *table(part, report[part])]
    return "\n".join(lines) + "\n"


def _made_by(report: dict[str, Any], machine: str, parts: str) -> str:
    """The command that measured, and where."""
    if machine not in report:
        return ""
    facts = report[machine]
    where = [facts["gpu"]] if facts.get("gpu") else []
    where += [f"{facts['cpu_cores']} cores", f"torch {facts['torch']}", facts["mpi"]]
    return f"`python benchmarks/mpi.py{parts} --rounds {facts['rounds']}`: {', '.join(where)}."


def table(part: str, figures: Figures) -> list[str]:
    """Figures by row, or one row of them."""
    rows = figures if all(isinstance(value, dict) for value in figures.values()) else {"": figures}
    columns = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, row in rows.items():
        label = f"{int(name) // KB:,} KB" if name.isdigit() else name
        cells = []
        for column in columns:
            target = target_of(part, name, column)
            cells.append(f"{row[column]:,.3f}" + (f" ({target:g})" if target else ""))
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
