"""What was measured of a model on a GPU, remembered for the next training."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

logger = logging.getLogger(__name__)


class Memory:
    """Entries by what they are about, in a file of this user. Lost or damaged, it is measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, about: dict[str, Any], numbers: tuple[str, ...] = ()) -> dict[str, Any] | None:
        """The entry about these facts, if it has all the numbers that it should have."""
        entry = self._read().get(_key(about))
        if isinstance(entry, dict) and all(isinstance(entry.get(name), (int, float)) for name in numbers):
            return entry
        return None

    def put(self, about: dict[str, Any], entry: dict[str, Any]) -> None:
        """Remember; a file that cannot be written is no reason to stop."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            new.write_text(json.dumps({**self._read(), _key(about): {**entry, **about}}, indent=1), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            logger.debug("%s cannot be written: %s", self._path, error)

    def _read(self) -> dict[str, Any]:
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}


def facts_of(model: nn.Module, optimizer: Optimizer, batch: str, device: torch.device) -> dict[str, Any]:
    """What decides how fast a step is, settings aside."""
    structure = [str(model), [list(p.shape) for p in model.parameters()]]
    return {
        "model": type(model).__name__,
        "structure": hashlib.sha256(json.dumps(structure).encode()).hexdigest()[:16],
        "batch": batch,
        "optimizer": type(optimizer).__name__,
        "gpu": torch.cuda.get_device_name(device),
        "torch": str(torch.__version__),
    }


def _key(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
