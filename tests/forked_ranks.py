"""Jobs whose ranks are started by hand: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.launching import CHECKS, ROOT, coverage_variables, environment, free_port

COMMON = (
    "torch._dynamo",  # by every optimizer at its first step
    "torch.distributed.optim",
    "omegaconf",  # by every run that reads its settings
    "distributed_training.training.session",
)
"""What every rank imports."""


class RankServer:
    """Starts jobs, one at a time. To be closed.

    Args:
        folder: where the ranks run, unless a job says otherwise.
        modules: what the ranks find imported.
    """

    def __init__(self, folder: Path, modules: Sequence[str] = COMMON) -> None:
        self._folder, self._jobs, self._modules = folder, 0, modules
        self._process = self._begin()

    def _begin(self) -> subprocess.Popen[str]:
        with (self._folder / "server-errors").open("a") as errors:
            return subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / "rank_server.py"), *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                # ranks that are killed leave things there
                env=environment(PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'src'}", TMPDIR=str(self._folder)),
            )

    @property
    def _last_words(self) -> str:
        return f"code {self._process.poll()}: {(self._folder / 'server-errors').read_text()[-4000:]}"

    def start(self, ranks: int, program: list[str], *, only: list[int] | None = None, **variables: str) -> Job:
        """Start `python PROGRAM` on every rank, or on some only."""
        self._jobs += 1
        screen = self._folder / f"screen-{self._jobs}"
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        numbers = list(range(ranks)) if only is None else only
        environments = [{**common, "RANK": str(rank), "PWD": str(self._folder), **variables} for rank in numbers]
        return self.start_all(environments, program, screen)

    def check(self, ranks: int, checks: list[str], *, measured: bool = False, **variables: str) -> None:
        """Run files of checks with pytest in every rank; `measured` as for `tests.launching.environment`."""
        own = {"PWD": str(ROOT), **coverage_variables(measured), **variables}
        self.start(ranks, [*CHECKS, *checks], **own).succeed()

    def start_alone(self, program: list[str], **variables: str) -> Job:
        """Start `python PROGRAM` once, without a word of ranks."""
        self._jobs += 1
        own = {"PWD": str(self._folder), **variables}
        return self.start_all([own], program, self._folder / f"screen-{self._jobs}")

    def start_all(self, environments: list[dict[str, str]], program: list[str], screen: Path) -> Job:
        """Start a process for each environment."""
        if self._process.poll() is not None:  # killed while it had nothing to do: no reason for this test to fail
            sys.stderr.write(f"the process that starts ranks ended with {self._last_words}\n")
            self._end_pipes()
            self._process = self._begin()
        pids = self._ask({"program": program, "environments": environments, "screen": str(screen)})
        return Job(self, pids, screen)

    def wait(self, seconds: float, together: bool = False) -> list[int | None]:
        """Exit codes of the job's ranks; None for one that had to be killed."""
        codes: list[int | None] = self._ask({"wait": seconds, "together": together})
        return codes

    def close(self) -> None:
        """End the server."""
        self._end_pipes()

    def _end_pipes(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that starts ranks ended with {self._last_words}"
        return json.loads(answer)


class Job:
    """Ranks that run."""

    def __init__(self, server: RankServer, pids: list[int], screen: Path) -> None:
        self._server, self.pids, self._screen = server, pids, screen

    @property
    def screen(self) -> str:
        """All that the ranks have written so far."""
        return self._screen.read_text() if self._screen.exists() else ""

    def until(self, text: str, seconds: float = 120) -> None:
        """Wait until something is on the screen."""
        end = time.monotonic() + seconds
        while text not in self.screen:
            assert time.monotonic() < end, f"{text!r} did not come:\n{self.screen[-3000:]}"
            time.sleep(0.05)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[rank], number)

    def end(self, seconds: float = 120) -> tuple[list[int | None], str]:
        """(exit codes, screen) when all have ended; a rank that has not by then is killed, and its code is None."""
        codes = self._server.wait(seconds)
        return codes, self.screen

    def succeed(self, seconds: float = 240) -> str:
        """The screen when all have ended well. When one fails the others are killed, as by a launcher."""
        codes = self._server.wait(seconds, together=True)
        assert all(code == 0 for code in codes), f"exit codes {codes}\n{self.screen[-20000:]}"
        return self.screen
