"""As much of Slurm as a batch script needs: called as sbatch, srun or scontrol, it does what they do.

sbatch reads the script's options and runs it; srun starts the tasks with Slurm's variables and, unless the job was
requeued, sends them SIGTERM when they have saved something, as before a time limit; scontrol notes a requeue.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def sbatch(script: str) -> int:
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    variables = {
        "SLURM_JOB_ID": os.environ["FAKE_JOB_ID"],
        "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": "1" if Path("requeued").exists() else "0",
    }
    return subprocess.run(["bash", script], env={**os.environ, **variables}).returncode


def srun(*words: str) -> int:
    command = [word for word in words if not word.startswith("--kill-on-bad-exit")]
    per_node = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(number),
                "SLURM_LOCALID": str(number % per_node),
                "SLURM_STEP_NUM_TASKS": os.environ["SLURM_NTASKS"],
            },
        )
        for number in range(int(os.environ["SLURM_NTASKS"]))
    ]
    if os.environ["SLURM_RESTART_COUNT"] == "0":
        end = time.monotonic() + 100
        while not list(Path().glob("runs/*/checkpoints/step-*")) and time.monotonic() < end:
            time.sleep(0.05)
        for task in tasks:
            task.send_signal(signal.SIGTERM)
    return max(task.wait() for task in tasks)


def scontrol(*words: str) -> int:
    Path("requeued").write_text(" ".join(words))
    return 0


sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[Path(sys.argv[0]).name](*sys.argv[1:]))
