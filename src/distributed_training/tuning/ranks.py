"""A trial on several workers: its ranks are placed by Ray, and rank 0 leaves what it has to say in a file.

`python -m distributed_training.tuning.ranks CONFIG DIRECTORY REPORTS EVERY FEED` is what each rank runs: what `dtrain
train` does, without a look at the environment, which all trials share.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.errors import RanksError
from distributed_training.tuning.trial import Task, Told

_REPORTS, _CONFIG = "reports.jsonl", "trial.yaml"


def train_on_ranks(config: Config, run_dir: Path, task: Task, name: str) -> None:
    """Train in as many ranks as the search gives each trial, and report what they say."""
    import ray

    from distributed_training.launch.ray_workers import run_ranks

    place = run_dir.with_name(f".{run_dir.name}")  # the run directory itself is the run's to make
    place.mkdir(parents=True, exist_ok=True)
    config.save(place / _CONFIG)
    told = Told(task, name)
    reports = _Reports(place / _REPORTS, told)
    words = [str(place / _CONFIG), str(run_dir), str(place / _REPORTS), str(task.exchange_every or ""), task.feed or ""]
    output: list[str] = []
    outcome = run_ranks(
        ["-m", "distributed_training.tuning.ranks", *words],
        task.workers,
        resources=task.resources,
        placement_group=ray.util.get_current_placement_group(),
        directory=task.directory,
        variables={"OMP_NUM_THREADS": str(config.run.threads or 1)},
        wish=reports.read,
        show=lambda stream, text: output.append(text),
        deadline=config.run.deadline,
    )
    reports.read()
    told.leave()
    if outcome.code:
        last = "".join(output).strip().splitlines()[-20:]
        raise RanksError("\n".join([outcome.report or f"the ranks ended with code {outcome.code}", *last]))


class _Reports:
    """Reads what rank 0 writes, tells Ray, and wishes the ranks to end when Ray does."""

    def __init__(self, file: Path, told: Told) -> None:
        file.unlink(missing_ok=True)
        self._file, self._told = file, told
        self._read = 0

    def read(self) -> signal.Signals | None:
        """Tell what came since the last time; SIGTERM once the trial is to end."""
        if not self._told.ended and self._file.is_file():
            with self._file.open("rb") as lines:
                lines.seek(self._read)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    said = json.loads(line)
                    checkpoint = Path(said["checkpoint"]) if said["checkpoint"] else None
                    if self._told(said["metrics"], checkpoint):
                        break
        return signal.SIGTERM if self._told.ended else None


def main(words: list[str]) -> None:
    """One rank of a trial."""
    from distributed_training.config.load import export_dotenv, read_yaml
    from distributed_training.runtime.threads import keep_waits_short

    keep_waits_short()
    from distributed_training.training.job import build_job
    from distributed_training.tuning.reporter import Reporter
    from distributed_training.tuning.shared_feed import SharedData

    file, run_dir, reports, every, feed = words
    export_dotenv()
    config = Config.from_dict(read_yaml(Path(file)), source=file)

    def write(metrics: dict[str, Any], checkpoint: Path | None) -> str:
        line = json.dumps({"metrics": metrics, "checkpoint": str(checkpoint or "")})
        with Path(reports).open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        return ""

    with SharedData(feed or None, config) as shared, build_job(config, Path(run_dir), shared.splits) as job:
        job.trainer.callbacks.append(Reporter(write, int(every) if every else None))
        job.train()


if __name__ == "__main__":
    main(sys.argv[1:])
