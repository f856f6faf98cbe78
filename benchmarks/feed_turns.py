"""One loader worker before and after a change, by turns:

    python benchmarks/feed_turns.py "rows,393 KB,tcp" "array,26 KB,shared" --other before=FOLDER

FOLDER is the `src` of another version of this project (`git archive VERSION src | tar -x -C ...`). All versions and the
limit take turns, so that whatever else the machine does meets all of them: for samples that is the loop that only
calls and stacks, for arrays plain sockets. Ratios are medians over rounds. With `--variant
NAME=MODULE:ATTRIBUTE=VALUE` this version is measured once more with a constant of a module changed: a way to try what
depends on the machine, such as the number of cores, without a setting for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "src"))

KINDS = {
    "rows": ("samples", "rows, ours"),
    "prepared": ("samples", "prepared, ours"),
    "decoded": ("samples", "decoded, ours"),
    "array": ("ours", "ours, TCP"),
}
SHARED = {kind: f"{kind}, ours in shared memory" for kind in ("rows", "prepared", "decoded")}
SHARED["array"] = "ours, shared memory"
ENCRYPTED = "ours, TLS", "raw sockets, TLS"  # of arrays only
LIMITS = {kind: ("samples", f"{kind}, alone") for kind in ("rows", "prepared", "decoded")}
LIMITS["array"] = ("raw", "raw sockets")


def answer(constants: list[str]) -> None:
    """The process of one version: reads {"file", "way", "case", "seconds"} a line, and answers with the rate."""
    from distributed_training.bench.forked_turns import in_fork
    from distributed_training.bench.transport.base import CASES, measure

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for constant in constants:
        place, value = constant.split("=", 1)
        module, attribute = place.split(":")
        found = importlib.import_module(f"distributed_training.{module}")
        if not hasattr(found, attribute):
            raise SystemExit(f"there is no {attribute} in distributed_training.{module}")
        setattr(found, attribute, json.loads(value))
    for line in sys.stdin:
        order = json.loads(line)
        own = order["file"] in ("raw", "ours")
        package = "distributed_training.bench.transport" if own else "benchmarks.feed_peers"
        run = importlib.import_module(f"{package}.{order['file']}").WAYS[order["way"]]
        case, seconds = CASES[order["case"]], order["seconds"]
        print(json.dumps(in_fork(lambda: {"rate": measure(run, case, seconds)})), file=answers, flush=True)  # noqa: B023


class Version:
    """The process of one version."""

    def __init__(self, source: Path, constants: list[str]) -> None:
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = [sys.executable, str(Path(__file__).resolve()), "--answer", *constants]
        errors = None if os.environ.get("FEED_BENCH_VERBOSE") else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )

    def rate(self, file: str, way: str, case: str, seconds: float) -> float:
        """Batches a second; 0 where it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"file": file, "way": way, "case": case, "seconds": seconds}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()  # the other side ends by itself if nothing comes
        return float(json.loads(line).get("rate", 0.0)) if line else 0.0

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60.0)


def compare(
    versions: dict[str, Version], kind: str, case: str, link: str, rounds: int, seconds: float
) -> dict[str, Any]:
    """Each version's rate, by turns, against the limit of this kind of dataset."""
    from distributed_training.bench.measure import interleave, ratio

    file, way = KINDS[kind]
    limit, alone = LIMITS[kind]
    if link == "shared":
        way = SHARED[kind]
    elif link == "tls":
        way, alone = ENCRYPTED
    turns: dict[str, Callable[[], float]] = {
        name: lambda version=version: version.rate(file, way, case, seconds)  # type: ignore[misc]
        for name, version in versions.items()
    }
    turns["limit"] = lambda: versions["after"].rate(limit, alone, case, seconds)
    found = interleave(turns, rounds, warmup=0)
    to_limit = {name: round(ratio(found, name, "limit"), 3) for name in versions}
    first = next(iter(versions))
    to_first = {name: round(ratio(found, name, first), 3) for name in versions}
    return {"limit, batches a second": round(found["limit"].median), "of it": to_limit, f"to {first}": to_first}


def main() -> None:
    """Measure what was asked for."""
    if sys.argv[1:2] == ["--answer"]:
        sys.path.remove(str(ROOT / "src"))  # PYTHONPATH says which version
        answer(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="+", help=f"KIND,CASE,LINK: {', '.join(KINDS)}; 26 KB ...; tcp, tls, shared")
    parser.add_argument("--other", action="append", default=[], help="NAME=FOLDER: `src` of another version")
    parser.add_argument("--variant", action="append", default=[], help="NAME=MODULE:ATTRIBUTE=VALUE, of this version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement, after 0.3 to warm up")
    given = parser.parse_args()
    wanted = [tuple(one.split(",")) for one in given.wanted]
    sources: dict[str, tuple[Path, list[str]]] = {}
    for other in given.other:
        name, folder = other.split("=", 1)
        sources[name] = (Path(folder).resolve(), [])
    sources["after"] = (ROOT / "src", [])
    for variant in given.variant:
        name, constant = variant.split("=", 1)
        sources[name] = (ROOT / "src", [constant])
    with ExitStack() as stack:
        versions = {name: Version(*source) for name, source in sources.items()}
        for version in versions.values():
            stack.callback(version.close)
        for kind, case, link in wanted:
            found = compare(versions, kind, case, link, given.rounds, given.seconds)
            print(f"{kind}, {case}, {link}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
