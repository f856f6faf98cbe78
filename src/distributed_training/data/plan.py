"""The sample plan: which samples make up a step, computed from (seed, epoch, step) and nothing else.

The order of an epoch is a keyed permutation of [0, n): position -> sample id, evaluated at any position without a
table of them. It is a Feistel network over a mixed radix: a position is written as (left, right) with left < a,
right < b and a * b >= n, and each round adds to one half a hash of the other half. Rounds are invertible, so the whole
is a bijection of [0, a*b); an image that falls in [n, a*b) is mapped again until it falls below n (cycle walking),
which keeps it a bijection of [0, n). With a and b near sqrt(n) fewer than one position in sqrt(n) walks, and the hashes
of all halves are few enough to be kept.

Changing anything here changes every user's training, so the numbers are frozen by golden tests; a change raises
PLAN_VERSION, and a run refuses to go on under another version.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import isqrt

import numpy as np

PLAN_VERSION = 1
MAX_SAMPLES = 2**40
_SMALL = 2**10  # below this every order should be equally likely, which takes more rounds
_ROUNDS, _ROUNDS_SMALL = 12, 24
_MASK = 2**64 - 1
_LARGEST_TABLE = 2**13  # numbers: all tables of a permutation still fit into a cache


def splitmix64(state: int) -> int:
    """One 64-bit hash of one 64-bit number (Steele, Lea and Flood)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def splitmix64_each(states: np.ndarray) -> np.ndarray:
    """The same hash of each of many numbers (uint64)."""
    z = states + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """A 64-bit key from whole numbers, for everything that is random by (seed, epoch, ...)."""
    key = PLAN_VERSION
    for part in parts:
        key = extend_key(key, part)
    return key


def extend_key(key: int, part: int) -> int:
    """derive_key(..., part) from derive_key(...)."""
    return splitmix64(key ^ splitmix64(part & _MASK))


def hash_ids(key: int, ids: np.ndarray) -> np.ndarray:
    """64 random bits for each sample id under `key`, whatever batch the id is in."""
    z = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


class Permutation:
    """A random order of [0, n) for a key, looked up at any positions with little memory beside the answer."""

    def __init__(self, n: int, key: int) -> None:
        if not 0 < n <= MAX_SAMPLES:
            raise ValueError(f"a permutation needs between 1 and 2^40 samples, not {n}")
        self.n = n
        a = 2 * -(-(isqrt(n - 1) + 1) // 2)  # even, or rounds could only make even permutations
        self._sizes = (a, -(-n // a))
        rounds = _ROUNDS_SMALL if n < _SMALL else _ROUNDS
        self._keys = np.array([derive_key(key, n, r) for r in range(rounds)], np.uint64)
        self._asked = 0
        self._tables: list[np.ndarray] | None = None
        """For each round the hashes of all that a half can be: they are few. Made once they pay."""

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The ids at these positions, int64."""
        a, b = self._sizes
        if self._tables is None and a <= _LARGEST_TABLE:
            self._asked += len(positions)
            if self._asked > 4 * a:
                numbers, keys = np.arange(a, dtype=np.uint64), self._keys[:, None]
                of_right, of_left = _hash(numbers[:b], keys[::2], a), _hash(numbers, keys[1::2], b)
                self._tables = [table for both in zip(of_right, of_left) for table in both]
        ids = self._rounds(positions.astype(np.uint64))
        n = np.uint64(self.n)
        if a * b != self.n:
            outside = np.flatnonzero(ids >= n)
            while outside.size:
                ids[outside] = self._rounds(ids[outside])
                outside = outside[ids[outside] >= n]
        return ids.view(np.int64)

    def _rounds(self, x: np.ndarray) -> np.ndarray:
        a, b = map(np.uint64, self._sizes)
        left, right = np.divmod(x, b)
        for r in range(0, len(self._keys), 2):
            left = _add(self._hashed(r, right), left, a)
            right = _add(self._hashed(r + 1, left), right, b)
        left *= b
        left += right
        return left

    def _hashed(self, r: int, half: np.ndarray) -> np.ndarray:
        """What round `r` adds to the other half."""
        if self._tables is not None:
            return self._tables[r].take(half.view(np.int64), mode="wrap")  # nothing wraps; it is the quickest mode
        return _hash(half, self._keys[r], self._sizes[r % 2])


def _hash(half: np.ndarray, key: np.ndarray | np.uint64, size: int) -> np.ndarray:
    """A hash of one half under a key, spread over [0, size) by a multiply and a shift."""
    h = half + key
    h *= np.uint64(0xD6E8FEB86659FD93)
    h ^= h >> np.uint64(32)
    h *= np.uint64(0xD6E8FEB86659FD93)
    h >>= np.uint64(32)
    h *= np.uint64(size)
    h >>= np.uint64(32)
    return h


def _add(h: np.ndarray, half: np.ndarray, size: np.uint64) -> np.ndarray:
    """(h + half) mod size. `h` is used up."""
    h += half
    return np.minimum(h, h - size)  # below size, h - size wraps around to something large


@functools.lru_cache(maxsize=8)
def _order(samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(samples, derive_key(seed, epoch))


@dataclass(frozen=True)
class Plan:
    """Which samples each global step of each epoch uses. Two equal plans give equal training."""

    samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"a batch needs at least one sample, not {self.batch_size}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; the last one is smaller unless `drop_last`."""
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)

    def ids(self, epoch: int, step: int) -> np.ndarray:
        """Sample ids of one global step, in order."""
        return self.span(epoch, step, step + 1)

    def span(self, epoch: int, first: int, last: int) -> np.ndarray:
        """Sample ids of the steps [first, last), one after the other: cheaper than step by step."""
        end = min(last * self.batch_size, self.samples)
        positions = np.arange(first * self.batch_size, end, dtype=np.int64)
        return _order(self.samples, self.seed, epoch)(positions) if self.shuffle else positions

    def describe(self) -> dict[str, int | bool]:
        """What makes this plan what it is."""
        return {
            "plan_version": PLAN_VERSION,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
