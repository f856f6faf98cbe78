"""Where a training stands and what it came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Cursor:
    """The next step to take. Together with the config it is all the data state there is."""

    epoch: int = 0
    """Epoch, from 0."""
    step: int = 0
    """Step inside the epoch, from 0."""
    global_step: int = 0
    """Optimizer steps taken in all epochs together."""


@dataclass(frozen=True)
class TrainingResult:
    """What `Trainer.train` returns."""

    status: str
    """completed, stopped early or interrupted."""
    reason: str
    """Why it ended before the last epoch, or empty."""
    epochs: int
    """Epochs done."""
    steps: int
    """Optimizer steps done, over all resumes."""
    seconds: float
    """Wall time of this call."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each metric, such as train_loss, val_loss, val_accuracy."""
    skipped_steps: int = 0
    """Steps skipped because loss or gradient was not finite."""
    run_dir: Path | None = None
    """Folder of the run."""
    best_checkpoint: Path | None = None
    """The best checkpoint by checkpoint.monitor, if there is one."""
