"""Batches from one process to another: ours beside plain sockets and beside other libraries, in one run.

    python benchmarks/feed.py [transport] [peers] [websocket] [samples] [slow] [--rounds N]

transport: plain sockets, ours over TCP and through shared memory. peers: the same, and other libraries. websocket: ours
over WebSockets beside the libraries for that. samples: a dataset with only `__getitem__`. slow: over a link of
20 Mbit/s and 100 ms. Every part is kept when it is done, in benchmarks/results/feed.json and .md, so parts may be run
one by one. What receiving adds to a step, on a CPU and on a GPU, is measured by `dtrain bench feed`, as is `transport`
without its targets.

Other libraries live in an environment of their own, so that they cannot change the project's:

    python3 -m venv benchmarks/.peers && benchmarks/.peers/bin/pip install -r benchmarks/feed_peers.txt

(tensorflow in benchmarks/.peers-tf, from feed_peers_tf.txt.) What is not installed is named in the report. With
FEED_BENCH_VERBOSE=1 what the libraries say is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from distributed_training.bench.measure import Measured, interleave, ratio  # noqa: E402
from distributed_training.bench.transport.base import CASES  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RAW, TCP, SHARED = "raw sockets", "ours, TCP", "ours, shared memory"
WEBSOCKET = "ours, WebSocket"
FILES = [
    "raw", "ours", "dataloader", "websockets_", "picows_", "pyzmq", "grpc_", "flight", "torch_rpc", "ray_data",
    "tf_data",
]  # fmt: skip
MUST_BEAT = {  # way -> the way of ours that uses the same kind of link
    "gRPC": TCP,
    "Arrow Flight": TCP,
    "torch RPC, TCP": TCP,
    "tf.data service": TCP,
    "torch RPC, shared memory": SHARED,
    "torch DataLoader, samples": SHARED,
    "torch DataLoader, whole batches": SHARED,
    "Ray Data": SHARED,
}
TARGETS = {"26 KB": 0.3, "393 KB": 0.5, "9.6 MB": 0.85}
_ANSWER = 120.0  # seconds for one measurement


class Peer:
    """A file of `feed_peers` in a process of its own, with the interpreter that has its library."""

    def __init__(self, file: str) -> None:
        self.file = file
        command = [_python_for(file), "-m", "benchmarks.feed_peers", file]
        own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": f"{ROOT / 'src'}"}
        self._errors = open(os.devnull, "wb") if not os.environ.get("FEED_BENCH_VERBOSE") else None  # noqa: SIM115
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        hello = self._answer()
        self.ways: list[str] = hello.get("ways", [])
        self.missing: list[str] = hello.get("missing", [])

    def rate(self, way: str, case: str, seconds: float) -> float:
        """Batches a second; 0 where it failed, and says why."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"way": way, "case": case, "seconds": seconds}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            print(f"{way}, {case}: {answer['error']}", flush=True)
        return float(answer.get("rate", 0.0))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # the other side ends by itself if nothing comes
        return json.loads(line) if line else {"error": f"the process of {self.file} ended"}

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ANSWER)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._errors is not None:
            self._errors.close()


def _python_for(file: str) -> str:
    if file in ("raw", "ours", "ours_websocket", "samples", "dataloader", "torch_rpc"):
        return sys.executable
    own = ROOT / "benchmarks" / (".peers-tf" if file == "tf_data" else ".peers") / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def side_by_side(files: list[str], cases: list[str], rounds: int, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """case -> way -> what was measured, by turns; and what is not installed."""
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(file)) for file in files]
        missing = [f"{peer.file.rstrip('_')} ({', '.join(peer.missing)})" for peer in peers if peer.missing]
        found: dict[str, Any] = {}
        for case in cases:
            turns: dict[str, Callable[[], float]] = {}
            for peer in peers:
                for way in peer.ways:
                    turns[way] = lambda peer=peer, way=way: peer.rate(way, case, seconds)  # type: ignore[misc]  # noqa: B023
            found[case] = interleave(turns, rounds, warmup=0)
            for way, measured in found[case].items():
                print(f"{case}, {way}: {measured.median:,.0f} a second, spread {measured.spread:.3f}", flush=True)
        return found, missing


def _figures(measured: dict[str, Measured], to: str) -> dict[str, Any]:
    return {
        way: {"batches a second": m.median, "spread": m.spread, f"to {to}": ratio(measured, way, to)}
        for way, m in measured.items()
    }


def transport(rounds: int) -> dict[str, Any]:
    """Plain sockets, TCP, shared memory."""
    found, _ = side_by_side(["raw", "ours"], list(CASES), rounds, 1.0)
    report: dict[str, Any] = {}
    for case, measured in found.items():
        report[case] = _figures(measured, RAW)
        report[case]["TCP to raw sockets that send rows of a dataset"] = ratio(
            measured, TCP, f"{RAW}, rows of a dataset"
        )
        report[case]["shared memory to TCP"] = ratio(measured, SHARED, TCP)
        report[case]["target for TCP to raw sockets"] = TARGETS[case]
    return report


def peers(rounds: int) -> dict[str, Any]:
    """All ways there are."""
    found, missing = side_by_side(FILES, list(CASES), max(1, rounds // 3), 0.7)
    report: dict[str, Any] = {}
    for case, measured in found.items():
        working = {way: m for way, m in measured.items() if min(m.values) > 0}
        report[case] = _figures(working, RAW)
        others = [way for way in working if way not in (RAW, TCP, SHARED)]
        report[case]["ours over TCP, to each"] = {way: ratio(working, TCP, way) for way in others}
        report[case]["ours in shared memory, to each"] = {way: ratio(working, SHARED, way) for way in others}
        beaten = {way: ratio(working, MUST_BEAT[way], way) > 1 for way in others if way in MUST_BEAT}
        report[case]["not faster, on the same kind of link, than"] = [way for way, won in beaten.items() if not won]
        report[case]["failed"] = [way for way in measured if way not in working]
    report["not installed"] = missing
    return report


def websocket(rounds: int) -> dict[str, Any]:
    """Each direction beside the same direction of the `websockets` library, which sends one prepared batch again and
    again: so does our carrier alone; a whole feed also loads, leases and orders."""
    found, missing = side_by_side(["ours_websocket", "websockets_", "picows_"], list(CASES), max(1, rounds // 2), 0.7)
    report: dict[str, Any] = {}
    for case, measured in found.items():
        same = {"our carrier, client sends": "websockets, client sends", "our carrier": "websockets"}
        same |= {WEBSOCKET: "websockets, client sends", f"{WEBSOCKET}, GPU side dials": "websockets"}
        there = {ours: theirs for ours, theirs in same.items() if theirs in measured}
        report[case] = {f"{ours}, to {theirs}": ratio(measured, ours, theirs) for ours, theirs in there.items()}
        report[case] |= _figures(measured, WEBSOCKET)
    report["not installed"] = missing
    return report


def samples(rounds: int) -> dict[str, Any]:
    """A dataset with only `__getitem__`, against calling it and stacking, and against sending that over a socket."""
    found, _ = side_by_side(["samples"], ["26 KB", "393 KB"], max(1, rounds // 2), 0.7)
    report: dict[str, Any] = {}
    for case, measured in found.items():
        for kind in ("rows", "prepared", "decoded"):
            for way in ("ours", "ours in shared memory"):
                report[f"{case}, {kind}, {way}"] = {
                    "alone, batches a second": measured[f"{kind}, alone"].median,
                    "spread": measured[f"{kind}, alone"].spread,
                    "ours, to alone": ratio(measured, f"{kind}, {way}", f"{kind}, alone"),
                    "ours, to stacking and a plain socket": ratio(measured, f"{kind}, {way}", f"{kind}, sent"),
                }
    return report


def slow(rounds: int) -> dict[str, Any]:
    """A link of 20 Mbit/s and 100 ms."""
    return _in_own_process("over_slow_link", max(1, rounds // 4))


def _in_own_process(function: str, rounds: int, module: str = "feed_slow") -> dict[str, Any]:
    program = f"import json, logging; logging.disable(30)\nfrom benchmarks import {module}\n"
    program += f"print(json.dumps({module}.{function}({rounds})))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for name, figures in found.items():
        print(name, json.dumps(figures), flush=True)
    return found


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "transport": transport,
    "peers": peers,
    "websocket": websocket,
    "samples": samples,
    "slow": slow,
}


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=8, help="of the part transport; the others take fewer")
    arguments = parser.parse_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    import torch

    from distributed_training.runtime.device import machine_facts

    file = RESULTS / "feed.json"
    report: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in arguments.parts or PARTS:
        began = time.perf_counter()
        figures = PARTS[part](arguments.rounds)
        facts = machine_facts(torch.device("cpu"))
        facts.pop("host", None)
        seconds = round(time.perf_counter() - began)
        report[part] = {"machine": facts, "rounds": arguments.rounds, "seconds": seconds, "figures": figures}
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n")
        file.with_suffix(".md").write_text(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The report as tables."""
    lines = ["# Batches between two processes", ""]
    lines += ["64 rows a batch; the receiver ends with torch tensors. Ratios are medians over rounds, by turns.", ""]
    for part in report:
        machine = report[part]["machine"]
        lines += [f"## {part}", ""]
        command = f"`python benchmarks/feed.py {part} --rounds {report[part]['rounds']}`"
        lines += [f"{command}: {machine['cpu_cores']} cores, torch {machine['torch']}.", ""]
        figures = report[part]["figures"]
        lines += _tables(figures) if part in ("transport", "peers", "websocket") else _table("", figures)
    return "\n".join(lines) + "\n"


def _tables(figures: dict[str, Any]) -> list[str]:
    """A table for each size, and what is no table below it."""
    lines: list[str] = []
    for case, values in figures.items():
        if not isinstance(values, dict):
            lines += [f"{case}: {', '.join(values) or 'nothing'}", ""]
            continue
        ways = {way: v for way, v in values.items() if isinstance(v, dict) and "spread" in v}
        lines += _table(case, ways)
        for name, value in values.items():
            if name in ways:
                continue
            if isinstance(value, dict):
                value = ", ".join(f"{way} {times:.2f}" for way, times in value.items())
            elif isinstance(value, list):
                value = ", ".join(value) or "none"
            lines += [f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}", ""]
    return lines


def _table(head: str, rows: dict[str, dict[str, float]]) -> list[str]:
    if not rows:
        return []
    columns = list(next(iter(rows.values())))
    lines = [f"| {head} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[column]:,.3f}' for column in columns)} |" for name, row in rows.items()]
    return [*lines, ""]


if __name__ == "__main__":
    main()
