"""Randomness keyed by sample: users' own augmentation draws from the global generators, so these are seeded for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from distributed_training.data.plan import splitmix64


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Whatever happens to the generators of random, numpy and torch inside is undone at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


def seed_for_sample(key: int, sample: int) -> int:
    """Seed random, numpy and torch for one sample, and return that 64-bit seed."""
    seed = splitmix64(key ^ splitmix64(sample))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: that would also touch every GPU
    return seed
