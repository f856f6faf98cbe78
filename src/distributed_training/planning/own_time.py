"""What a strategy's library adds to a step by itself: its hooks in Python, and copies into memory of its own.

One rank has nobody to talk to. What it takes longer than `single` is the library, measured by turns with it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from distributed_training.planning.measuring import Laboratory
from distributed_training.planning.pace import Pace, steps_for
from distributed_training.planning.profile import Profile
from distributed_training.planning.units import time_text
from distributed_training.planning.ways import BY_LABEL, Way

_TURNS = 7


def measure_own_time(ways: Iterable[Way], lab: Laboratory, pace: Pace, profile: Profile) -> None:
    """Fill `profile.own` for these ways, as far as they can run here."""
    batch = min(profile.times[1])  # the shortest step: it does not depend on the samples
    alone = profile.parts(batch, 1).whole
    wanted = dict.fromkeys(way.like_alone for way in ways if way.like_alone is not None)
    for way in map(BY_LABEL.__getitem__, wanted):
        if not way.installed:
            continue
        lab.say(f"measuring what {way.label} adds to a step by itself")
        turns = _TURNS, steps_for(alone)
        found, trouble = lab.ranks(way, 1, batch, turns, functools.partial(pace.now, 1, batch), accumulation=1)
        if found is None:
            lab.say(f"  not measured: {trouble}")
            continue
        profile.own[way.label] = max(0.0, found["paced"] - alone)
        lab.say(f"  {time_text(profile.own[way.label])} of {time_text(found['paced'])}")
