"""Randomness keyed by sample: users' own augmentation draws from the global generators, so these are seeded for it.

To seed three generators for a sample takes longer than a cheap sample itself. Whether anything was drawn at all can be
found out afterwards, so that only those generators are seeded that samples draw from: see `data.sample_draws`. A
process that loads and does nothing else finds out sooner than one that needs its generators for other things, too.
"""

from __future__ import annotations

import functools
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from distributed_training.data.generator_states import Which, different, put_back, read_states
from distributed_training.data.plan import splitmix64, splitmix64_each

NONE: Which = (False, False, False)
ALL: Which = (True, True, True)


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Whatever happens to the generators of random, numpy and torch inside is undone at the end."""
    states = read_states()
    try:
        yield
    finally:
        put_back(states, ALL)


def seed_of_sample(key: int, sample: int) -> int:
    """The 64-bit seed of one sample."""
    return splitmix64(key ^ splitmix64(sample))


def seeds_of_samples(key: int, samples: Sequence[int]) -> list[int]:
    """The same for many at once."""
    hashed = splitmix64_each(np.asarray(samples, dtype=np.int64).astype(np.uint64))
    return splitmix64_each(hashed ^ np.uint64(key)).tolist()


def seed_for_sample(key: int, sample: int) -> int:
    """Seed random, numpy and torch for one sample, and return that 64-bit seed."""
    seed = seed_of_sample(key, sample)
    for seeder in seeders(ALL):
        seeder(seed)
    return seed


def seeders(which: Which) -> list[Callable[[int], Any]]:
    """Functions that seed these generators with 64 bits."""
    # Not torch.manual_seed: that would also touch every GPU.
    each: tuple[Callable[[int], Any], ...] = (random.seed, _seed_numpy, torch.default_generator.manual_seed)
    return [seeder for seeder, wanted in zip(each, which) if wanted]


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed & 0xFFFFFFFF)


def drew(load: Callable[[], Any]) -> bool:
    """Whether this draws from the global generators. Their states are compared, which takes a while."""
    with global_generators_kept():
        seed_for_sample(_CONSTANT, 1)
        before = read_states()
        load()
        return any(different(before, read_states()))


class Watch(ABC):
    """Tells which of the generators somebody drew from since it was entered; used once.

    At the end those that were drawn from or seeded are put back to where they were before.
    """

    def __init__(self) -> None:
        self.seeded: Which = NONE
        """Generators that were seeded meanwhile by those who watch. To be set before that."""
        self._drawn: Which = NONE
        self._looks: list[int] = []

    def __enter__(self) -> Watch:
        self._looks = list(_looks)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._put_back(ALL if kind is not None else either(self.seeded, self._drawn))

    def drawn(self) -> Which:
        """Generators, not seeded by those who watch, that were drawn from or looked at."""
        looked = tuple(now != before for now, before in zip(_looks, self._looks))
        found = [(a or b) and not own for a, b, own in zip(looked, self._changed(), self.seeded)]
        self._drawn = (found[0], found[1], found[2])
        return self._drawn

    def drawn_by(self, seed: int, load: Callable[[], Any]) -> tuple[Any, Which]:
        """What is loaded with all generators seeded, and which of them it drew from or looked at."""
        self.seeded = ALL
        for seeder in seeders(ALL):
            seeder(seed)
        looks, before = list(_looks), read_states()
        loaded = load()
        looked = tuple(now != then for now, then in zip(_looks, looks))
        found = either((looked[0], looked[1], looked[2]), different(before, read_states()))
        self._put_back(ALL)
        self.seeded, self._looks = NONE, list(_looks)
        return loaded, found

    @abstractmethod
    def _changed(self) -> Which:
        """Generators that are not in the state that they were left in; those that were seeded may be among them."""

    @abstractmethod
    def _put_back(self, which: Which) -> None:
        """Put these generators back to where they were."""


class _StatesWatch(Watch):
    """By comparing states: for a process that needs its generators for other things, too."""

    def __enter__(self) -> Watch:
        _notice_looks(+1)
        self._before = read_states()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _notice_looks(-1)
        super().__exit__(*exception)

    def _changed(self) -> Which:
        return different(self._before, read_states())

    def _put_back(self, which: Which) -> None:
        put_back(self._before, which)


class Twins:
    """A twin of each generator, in the same state.

    As long as nobody else draws, both give the same numbers; that they do so by chance is as likely as to guess 50
    bits. To compare states would take many times as long.
    """

    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.Random(), np.random.RandomState(), torch.Generator()
        self._one, self._other = torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
        self.seed(ALL)

    def seed(self, which: Which) -> None:
        """Seed these generators and their twins alike."""
        seed = seed_of_sample(_CONSTANT, 0)
        for seeder in seeders(which):
            seeder(seed)
        if which[0]:
            self._python.seed(seed)
        if which[1]:
            self._numpy.seed(seed & 0xFFFFFFFF)
        if which[2]:
            self._torch.manual_seed(seed)

    def differ(self) -> Which:
        """Which of them gives other numbers than its twin."""
        return (
            random.getrandbits(63) != self._python.getrandbits(63),
            np.random.random_sample() != self._numpy.random_sample(),
            self._one.random_().item() != self._other.random_(generator=self._torch).item(),
        )


class _TwinsWatch(Watch):
    """By twins: for a process that only loads."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self._twins = twins

    def _changed(self) -> Which:
        return self._twins.differ()

    def _put_back(self, which: Which) -> None:
        self._twins.seed(which)


def either(one: Which, other: Which) -> Which:
    """Those that are in one or the other."""
    return one[0] or other[0], one[1] or other[1], one[2] or other[2]


_CONSTANT = 0x6474_7261_696E_0001
_twins: Twins | None = None


# Who looks at the state of a generator without drawing from it, as torch.random.fork_rng does, may draw from a copy.
_LOOKS = [
    (random, "getstate", 0),
    (np.random, "get_state", 1),
    (torch, "initial_seed", 2),
    (torch.random, "initial_seed", 2),
    (torch, "get_rng_state", 2),
    (torch.random, "get_rng_state", 2),
]
_looks = [0, 0, 0]
_watching, _unnoticed = 0, [getattr(module, name) for module, name, _ in _LOOKS]
_lock = threading.Lock()


def _noticing(look: Callable[..., Any], generator: int) -> Callable[..., Any]:
    """A function that does the same and is noticed."""

    @functools.wraps(look)
    def noticed(*args: Any, **options: Any) -> Any:
        _looks[generator] += 1
        return look(*args, **options)

    return noticed


_noticed = [_noticing(look, generator) for look, (_, _, generator) in zip(_unnoticed, _LOOKS)]


def _notice_looks(more: int) -> None:
    """One more or one less that wants to know of looks: what they replace is as it was when nobody does."""
    global _watching
    with _lock:
        before, _watching = _watching, _watching + more
        if bool(before) != bool(_watching):
            for (module, name, _), function in zip(_LOOKS, _noticed if _watching else _unnoticed):
                setattr(module, name, function)


def claim_generators() -> None:
    """From here on nobody in this process needs the global generators but for loading samples."""
    global _twins
    if _twins is None:
        _notice_looks(+1)
    _twins = Twins()


def claimed_generators() -> Twins | None:
    """The twins of the generators, where this process only loads."""
    return _twins


def watching() -> Watch:
    """A watch over the generators, by the means of this process."""
    return _StatesWatch() if _twins is None else _TwinsWatch(_twins)
