"""A real Ray cluster of several nodes on this machine, in processes outside of the test's own.

The nodes are Ray's cluster utility's. They belong to a process that has left the family of the test (`fixture
_nothing_left_behind` looks at that), takes orders on its standard input and ends all of them when that ends.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from tests.launching import environment, need

_MEMORY = 80 << 20  # bytes of each node's object store
# A node that does not answer for some seconds is dead: a busy machine is slow to answer, so not at the first time.
_SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 8}


class Nodes:
    """A cluster whose head has no CPUs, and nodes 0, 1, ... with some. To be entered.

    Args:
        cpus: of each node.
        gpus: that each node says it has, whether or not it does: Ray gives them out all the same.
        hidden: a folder whose contents the nodes do not see, as on machines that share no storage. Needs root.
    """

    def __init__(self, *cpus: int, gpus: int = 0, hidden: Path | None = None) -> None:
        self._cpus, self._gpus, self._hidden = cpus, gpus, hidden

    def __enter__(self) -> Nodes:
        import importlib.util

        need("ray: pip install -e '.[ray]'", importlib.util.find_spec("ray") is not None)
        self._folder = tempfile.mkdtemp(
            prefix="ray-", dir="/tmp"
        )  # short: names of sockets have at most 107 characters
        Path(self._folder, "ray").mkdir()  # there also goes the file by which `auto` would find this cluster
        command = [sys.executable, "-m", "tests.ray_nodes", self._folder, *map(str, (self._gpus, *self._cpus))]
        if self._hidden is not None:
            mount = f"mount -t tmpfs none {shlex.quote(str(self._hidden))} && exec {shlex.join(command)}"
            command = ["unshare", "--mount", "sh", "-c", mount]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=self._folder, TMPDIR=self._folder),
        )
        self.address: str = self._answer()["address"]
        self._process.wait(60)  # the one that is left is nobody's child
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()  # to the end of the process that has it
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill_node_of(self, process: int) -> None:
        """End all processes of the node on which a process runs, at once, as a power cut would."""
        self._order({"kill_node_of": process})

    def add(self, cpus: int) -> None:
        """One more node."""
        self._order({"add": cpus})

    def _order(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("the process with the Ray cluster has ended")


def _serve(folder: str, gpus: int, cpus: list[int]) -> None:
    """In the process that keeps the cluster."""
    if os.fork():
        os._exit(0)
    os.setsid()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray writes is no answer
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": _MEMORY, "include_dashboard": False}
    head = {"num_cpus": 0, "num_gpus": 0, "temp_dir": f"{folder}/ray", "_system_config": _SOON, **common}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=count, num_gpus=gpus, **common) for count in cpus]

    def say(**facts: Any) -> None:
        answers.write(f"{json.dumps(facts)}\n")
        answers.flush()

    say(address=cluster.address)
    for line in sys.stdin:
        order = json.loads(line)
        if "add" in order:
            nodes.append(cluster.add_node(num_cpus=order["add"], num_gpus=gpus, **common))
        else:
            node, family = next((node, family) for node in nodes if order["kill_node_of"] in (family := _family(node)))
            for process in family.values():
                process.suspend()  # nobody sees another one end
            for process in family.values():
                process.kill()
            cluster.remove_node(node, allow_graceful=False)
            nodes.remove(node)
        say(done=True)
    cluster.shutdown()


def _family(node: Any) -> dict[int, psutil.Process]:
    """All processes of a node."""
    roots = [psutil.Process(info.process.pid) for kind in node.all_processes.values() for info in kind]
    everybody = [*roots, *(child for root in roots for child in root.children(recursive=True))]
    return {process.pid: process for process in everybody}


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
