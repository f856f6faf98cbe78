"""Asks a Ray cluster for what it cannot give, then for what it can: `ray_mistakes.py ADDRESS HIDDEN NOBODY WORD...`.

HIDDEN is a folder that the nodes do not see, NOBODY an address where nobody listens, WORD... a program that fails.
Writes what came of it to the file `answers.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distributed_training.config.errors import DistributedTrainingError
from distributed_training.launch.ray_cluster import connected
from distributed_training.launch.ray_launch import Job, Workers, run
from distributed_training.launch.ray_workers import run_ranks

ADDRESS, HIDDEN, NOBODY, FAILING = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:]
VERSION = ["-m", "distributed_training", "version"]
ROOT = Path.cwd() / "runs"


def job(workers: Workers, **options: Any) -> Job:
    return Job(VERSION, workers, **{"address": ADDRESS, "root": ROOT, **options})


MISTAKES = {
    "nobody": job(Workers(1), address=NOBODY, deadline=1.0),
    "many": job(Workers(8)),
    "large": job(Workers(1, cpus=64)),
    "gpus": job(Workers(1, gpus=2)),
    "spread": job(Workers(4, placement="STRICT_SPREAD")),
    "together": job(Workers(3, placement="STRICT_PACK")),
    "folder": job(Workers(1), directory=HIDDEN / "inner", root=None),
    "config": job(Workers(1), files=[HIDDEN / "config.yaml"]),
    "root": job(Workers(1), root=HIDDEN / "runs"),
}


def told(mistake: Job) -> list[Any]:
    try:
        return [run(mistake).code, "no error"]
    except DistributedTrainingError as error:
        return [error.exit_code, str(error)]


SEEING = """
import os, pathlib, runpy, sys
pathlib.Path(f"gpus-of-{os.environ['RANK']}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Path("seeing.py").write_text(SEEING)
(HIDDEN / "inner").mkdir()
(HIDDEN / "config.yaml").write_text("training: {epochs: 1}\n")
answers = {"nobody": told(MISTAKES["nobody"])}  # before there is a connection
with connected(ADDRESS):
    answers |= {name: told(mistake) for name, mistake in MISTAKES.items() if name != "nobody"}
    said = "'rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], 'sees', os.environ['CUDA_VISIBLE_DEVICES']"
    Path("fine.py").write_text(f"import os\nprint({said})\n")
    shown: list[str] = []
    done = run_ranks(["fine.py"], 2, resources={"GPU": 0.5}, show=lambda stream, text: shown.append(text))
    answers["fine"] = [done.code, done.report, "".join(shown)]
    failed = run(Job(["seeing.py", *FAILING], Workers(2, gpus=0.5), root=ROOT))
    answers["failing"] = [failed.code, failed.report]
Path("answers.json").write_text(json.dumps(answers))
