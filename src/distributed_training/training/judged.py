"""How many targets the mean loss of a batch is made of: what its parts are weighted by, so that they add up.

A loss of classes is a mean over samples, and parts of a batch count by their samples. A loss of tokens (language
models, token classification) is a mean over the tokens that are judged, those whose label is not -100: a part with long
texts counts more than one with short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from distributed_training.training.forms import TARGET_KEYS

IGNORED = -100
"""The label of a target that is not judged: torch's own, and transformers'."""


class Judged:
    """Counts the targets that a model's loss is the mean of, where that is another number than that of its samples."""

    def __init__(self, model: nn.Module) -> None:
        # What says what comes next has nothing to say about the first token: labels are shifted by one.
        self.shifted = getattr(model, "loss_type", None) == "ForCausalLM"

    def count(self, data: Any) -> Tensor | None:
        """The targets that count, on their device; None where each sample counts once."""
        labels = targets_of(data)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim < 2:
            return None
        return (labels[:, 1:] if self.shifted else labels).ne(IGNORED).sum()

    def pairs(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The scores and the targets that are judged, side by side: (rows, classes) and (rows,)."""
        if targets.ndim > 1:
            if self.shifted:
                output, targets = output[:, :-1], targets[:, 1:]
            output, targets = output.flatten(0, -2), targets.flatten()
        counts = targets != IGNORED
        return (output, targets) if bool(counts.all()) else (output[counts], targets[counts])


def targets_of(data: Any) -> Any:
    """What the outputs of a batch are compared with, where it holds that."""
    if isinstance(data, Mapping):
        return next((data[key] for key in TARGET_KEYS if key in data), None)
    return data[1] if isinstance(data, (tuple, list)) and len(data) > 1 else None
