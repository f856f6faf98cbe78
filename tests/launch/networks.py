"""Two machines for tests: network namespaces of this one, with addresses of their own and a cable between them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tests.launching import need


@dataclass(frozen=True)
class Machine:
    """A namespace. A command that begins with `inside` runs there."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """They are taken down, with all that runs in them, whatever happens."""
    need("root and iproute2, for network namespaces", os.geteuid() == 0 and _works("ip", "netns", "list"))
    own = os.getpid() % 65536
    subnet = f"10.{77 + own % 100}.{own // 256}"
    one, two = Machine(f"dt{own}a", f"{subnet}.1"), Machine(f"dt{own}b", f"{subnet}.2")
    try:
        for machine in (one, two):
            _ip("netns", "add", machine.name)
            _ip("-n", machine.name, "link", "set", "lo", "up")
        cable = ("link", "add", "eth0", "netns", one.name, "type", "veth", "peer", "name", "eth0", "netns", two.name)
        _ip(*cable)
        for machine in (one, two):
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", "eth0")
            _ip("-n", machine.name, "link", "set", "eth0", "up")
        yield one, two
    finally:
        for machine in (one, two):
            _empty(machine)
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True, timeout=30)


def _empty(machine: Machine) -> None:
    """A namespace lives on while a process is in it."""
    for _ in range(50):
        found = subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True, text=True, timeout=30)
        pids = [int(pid) for pid in found.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def _works(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False
