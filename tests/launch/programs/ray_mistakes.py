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
    "gpus": job(Workers(1, gpus=1)),
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


(HIDDEN / "inner").mkdir()
(HIDDEN / "config.yaml").write_text("training: {epochs: 1}\n")
answers = {"nobody": told(MISTAKES["nobody"])}  # before there is a connection
with connected(ADDRESS):
    answers |= {name: told(mistake) for name, mistake in MISTAKES.items() if name != "nobody"}
    Path("fine.py").write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n")
    shown: list[str] = []
    done = run_ranks(["fine.py"], 2, show=lambda stream, text: shown.append(text))
    answers["fine"] = [done.code, done.report, "".join(shown)]
    failed = run(Job(FAILING, Workers(2), root=ROOT))
    answers["failing"] = [failed.code, failed.report]
Path("answers.json").write_text(json.dumps(answers))
