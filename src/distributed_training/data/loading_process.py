"""A process that only loads samples: a worker of a loader."""

from __future__ import annotations

import gc

from distributed_training.data.randomness import claim_generators

# Python looks for cycles after 700 new objects. Samples that wait to be put together are as many, and each look goes
# through all of them: 3 to 8 % of the time of cheap ones. Garbage in cycles is still found, a little later.
_OBJECTS = 10_000


def only_loads() -> None:
    """From here on this process does nothing else: random numbers and garbage are those of samples."""
    claim_generators()  # a sample that draws nothing need not have them seeded
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
