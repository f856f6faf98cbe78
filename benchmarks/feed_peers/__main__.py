"""Measures the ways of one file, in turns given on standard input: `python -m benchmarks.feed_peers FILE`.

First answers what the file has: {"ways": [...]} or {"missing": [...]}; then reads {"way", "case", "seconds"} a line
and answers {"rate": ...} or {"error": ...}. Each turn is a fork of this process, which has torch imported and nothing
else: so no way meets the threads of another.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys

from distributed_training.bench.forked_turns import in_fork
from distributed_training.bench.transport.base import CASES, measure

_OWN = ("raw", "ours")  # these are part of the package


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like; the answers stay readable
    package = "distributed_training.bench.transport" if sys.argv[1] in _OWN else "benchmarks.feed_peers"
    module = importlib.import_module(f"{package}.{sys.argv[1]}")
    missing = [name for name in module.NEEDS if importlib.util.find_spec(name) is None]
    print(json.dumps({"missing": missing} if missing else {"ways": list(module.WAYS)}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        run, case, seconds = module.WAYS[order["way"]], CASES[order["case"]], order["seconds"]
        rate = in_fork(lambda: {"rate": measure(run, case, seconds)})  # noqa: B023 (called at once)
        print(json.dumps(rate), file=answers, flush=True)


if __name__ == "__main__":
    main()
