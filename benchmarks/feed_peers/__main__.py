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
import traceback

from benchmarks.feed_peers.base import CASES, Run, measure


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like; the answers stay readable
    module = importlib.import_module(f"benchmarks.feed_peers.{sys.argv[1]}")
    missing = [name for name in module.NEEDS if importlib.util.find_spec(name) is None]
    print(json.dumps({"missing": missing} if missing else {"ways": list(module.WAYS)}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(_forked(module.WAYS[order["way"]], order)), file=answers, flush=True)


def _forked(run: Run, order: dict) -> dict:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = {"rate": measure(run, CASES[order["case"]], order["seconds"])}
        except BaseException:
            answer = {"error": traceback.format_exc()[-2000:]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "it ended without an answer; nothing came for too long?"}


if __name__ == "__main__":
    main()
