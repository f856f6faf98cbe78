"""Seeding of every generator, and their state for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (all devices) once, at the start of a run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch's generators of the CPU and of one device: a microsecond, cheap enough for every step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)


def generators_state() -> dict[str, Any]:
    """The state of every generator, in plain numbers and tensors."""
    version, internal, gauss = random.getstate()
    # With legacy=False numpy describes whichever bit generator is in place as a dict.
    numpy_state = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    state: dict[str, Any] = {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "key": torch.from_numpy(inner["key"].astype(np.int64)),
            "pos": int(inner["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Put every generator back. GPU states are restored as far as there are GPUs."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    key = numpy_state["key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, numpy_state["pos"], numpy_state["has_gauss"], numpy_state["gauss"]))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, value in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(value, index)
