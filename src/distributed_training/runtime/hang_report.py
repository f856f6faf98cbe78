"""What ranks say when a job hangs or loses a rank: who is missing, in which operation, and where each one stands."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KILLED = (
    "killed, as the system does when memory runs out (`dmesg` on its machine says so), or its machine cannot be reached"
)
SILENT = "stopped, out of reach, or in a call that lets no other Python code run"
GONE_HELP = "see docs/troubleshooting.md#a-rank-is-gone"
HANG_HELP = "see docs/troubleshooting.md#a-rank-hangs-or-never-arrives"
_SHOWN = 8  # ranks named one by one
_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHONS = (sysconfig.get_path("stdlib") + os.sep, "<frozen")

Standing = dict[str, Any]
"""Where a rank stands: number (how many waits it began), operation, waits (whether it is in it), lines of code."""


def describe(
    alarm: Mapping[str, Any], where: Mapping[int, Standing | None], names: Mapping[int, str | None], left: set[int]
) -> str:
    """The report. `where` has None for a rank that did not answer; `left` are those whose program was over."""
    lost = alarm["kind"] == "lost"
    silent = [rank for rank, said in where.items() if said is None and rank not in left]
    missing = [f"{_ranks(silent, names)} {_verb(silent, 'is gone', 'are gone')}: {KILLED}"] if silent and lost else []
    if silent and not lost:
        missing = [f"{_ranks(silent, names)} {_verb(silent, 'does', 'do')} not answer: {SILENT}"]
    if left:
        missing.append(f"{_ranks(sorted(left), names)} {_verb(left, 'has', 'have')} ended, but others still wait")
    if behind := _behind(alarm, where):
        missing.append(f"{_ranks(behind, names)} {_verb(behind, 'has', 'have')} not arrived")
    nobody = "all ranks answer, so the network between them broke" if lost else "all ranks wait"
    lines = [f"{alarm['reason']} in {alarm['operation']}: {'; '.join(missing) or nobody}"]
    for ranks, said in _alike(where):
        lines.append(f"  {_ranks(ranks, {})} {_verb(ranks, 'is', 'are')} {standing(said)}")
        lines += [f"      called from {line}" for line in said["lines"][1:]]
    return "\n".join([*lines, GONE_HELP if lost or silent else HANG_HELP])


def standing(said: Standing) -> str:
    """`waiting in a barrier, at ddp.py:12 in step: ...`."""
    state = "waiting in" if said["waits"] else "past"
    return f"{state} {said['operation']}, at {said['lines'][0] if said['lines'] else 'no line of Python'}"


def silent_ranks(silent: list[int], names: Mapping[int, str | None]) -> str:
    """`rank 1 (host, process 12) does not answer`."""
    return f"{_ranks(silent, names)} {_verb(silent, 'does', 'do')} not answer"


def lines_of(thread: int) -> list[str]:
    """Where a thread stands."""
    frame = sys._current_frames().get(thread)
    return telling_lines(traceback.extract_stack(frame)) if frame is not None else []


def telling_lines(stack: Sequence[traceback.FrameSummary], most: int = 4) -> list[str]:
    """The innermost line of a stack, what it is a part of in this package, and the nearest lines of the user's code."""
    inner = [f for f in stack[::-1] if not f.filename.startswith(_PYTHONS) and "site-packages" not in f.filename]
    ours = [f for f in inner[:1] if f.filename.startswith(_OURS)]
    chosen = [*stack[-1:], *ours, *(f for f in inner if not f.filename.startswith(_OURS))]
    lines = [f"{Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in chosen]
    return list(dict.fromkeys(lines))[:most]


def _behind(alarm: Mapping[str, Any], where: Mapping[int, Standing | None]) -> list[int]:
    """Ranks that have not begun the operation that the others wait in."""
    if alarm["kind"] == "lost":  # how far they came says nothing: the broken connection was found by chance
        return []
    reached = max([said["number"] for said in where.values() if said] + [alarm["number"]])
    return [rank for rank, said in where.items() if said and said["number"] < reached]


def _alike(where: Mapping[int, Standing | None]) -> list[tuple[list[int], Standing]]:
    """Ranks that stand at the same place, together."""
    together: dict[str, tuple[list[int], Standing]] = {}
    for rank, said in sorted(where.items()):
        if said is not None:
            together.setdefault(json.dumps(said), ([], said))[0].append(rank)
    return list(together.values())


def _ranks(ranks: list[int], names: Mapping[int, str | None]) -> str:
    """`rank 1 (host, process 12)`, `ranks 1, 2`, or the first few of many."""
    shown = [f"{rank} ({names[rank]})" if names.get(rank) else str(rank) for rank in ranks[:_SHOWN]]
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{_verb(ranks, '', 's')} {', '.join(shown)}{more}"


def _verb(ranks: Sequence[int] | set[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
