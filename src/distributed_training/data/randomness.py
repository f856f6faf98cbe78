"""Randomness keyed by sample: users' own augmentation draws from the global generators, so these are seeded for it.

To seed three generators for a sample takes longer than a cheap sample itself. A process that loads and does nothing
else can find out afterwards whether anything was drawn at all: see `GeneratorWatch`.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def drew(load: Callable[[], Any]) -> bool:
    """Whether this draws from the global generators. Their states are compared, which takes a while."""
    with global_generators_kept():
        seed_for_sample(_CONSTANT, 1)
        before = _states()
        load()
        return _states() != before


def _states() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)
    state = (numpy["state"]["key"].tobytes(), numpy["state"]["pos"], numpy["has_gauss"])
    return random.getstate(), state, torch.default_generator.get_state().numpy().tobytes()


class GeneratorWatch:
    """Tells whether anybody drew from the global generators.

    Each has a twin in the same state. As long as nobody else draws, both give the same numbers; that they do so by
    chance is as likely as to guess 50 bits. To compare states would take many times as long.
    """

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.Random(), np.random.RandomState(), torch.Generator()
        self._one, self._other = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
        self.looked_at = False
        """Whether somebody asked for a seed or a state, to draw from a generator of their own."""
        self.renew()

    def renew(self) -> None:
        """Seed the generators and their twins alike."""
        self.looked_at = False
        seed = seed_for_sample(_CONSTANT, 0)
        self._python.seed(seed)
        self._numpy.seed(seed & 0xFFFFFFFF)
        self._torch.manual_seed(seed)

    def noticing(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does the same and is noticed."""

        @functools.wraps(look)
        def noticed(*args: Any, **options: Any) -> Any:
            self.looked_at = True
            return look(*args, **options)

        return noticed

    def untouched(self) -> bool:
        """Whether nothing was drawn since the last call; if something was, all begins anew."""
        same = (
            not self.looked_at
            and random.getrandbits(63) == self._python.getrandbits(63)
            and np.random.random_sample() == self._numpy.random_sample()
            and self._one.random_().item() == self._other.random_(generator=self._torch).item()
        )
        if not same:
            self.renew()
        return same


_CONSTANT = 0x6474_7261_696E_0001
_watch: GeneratorWatch | None = None


# Who looks at the state of a generator without drawing from it, as torch.random.fork_rng does, may draw from a copy.
_LOOKS = [
    (torch, "initial_seed"),
    (torch.random, "initial_seed"),
    (torch, "get_rng_state"),
    (torch.random, "get_rng_state"),
    (np.random, "get_state"),
    (random, "getstate"),
]


def claim_generators() -> None:
    """From here on nobody in this process needs the global generators but for loading samples."""
    global _watch
    _watch = GeneratorWatch()
    for module, name in _LOOKS:
        setattr(module, name, _watch.noticing(getattr(module, name)))


def claimed_generators() -> GeneratorWatch | None:
    """The watch over the generators, where this process only loads."""
    return _watch
