"""How torch's CPU threads wait for each other."""

from __future__ import annotations

import os


def keep_waits_short() -> None:
    """Let OpenMP threads sleep soon instead of spinning. Has to come before torch is imported.

    By default they spin for as long as it takes, and where another process wants the cores, each spins while the one
    it waits for is not running: a small model on two cores took twice the time beside three busy processes. A short
    spin costs nothing measurable on an idle machine. A user's own choice is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
