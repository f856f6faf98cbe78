"""The program behind a tunnel as a process of ours: what it says is read, and it never outlives us."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress

from distributed_training.feed.tunnels.base import STARTING, Tunnel, TunnelError

_KEPT, _REPEATED = 200, 4  # lines
_ENDING = 3.0  # seconds that a program has to end by itself


class Agent:
    """A running program. It has a session of its own: Ctrl-C, or a notebook's stop button, is not for the tunnel."""

    def __init__(self, command: list[str], noise: str = "(?!)") -> None:
        """`noise` is how lines begin that no message is to repeat."""
        self._noise = noise
        self._name = command[0].rpartition("/")[2]
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._said = threading.Condition()
        begun: Future[subprocess.Popen[bytes]] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(command, begun), name=f"{self._name} output", daemon=True
        )
        self._thread.start()
        try:
            self._process = begun.result(STARTING)
        except OSError as error:
            raise TunnelError(f"{command[0]} cannot be started: {error.strerror}") from None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """The first match in a line that it has said or will say; TunnelError if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        with self._said:
            while True:
                for line in self._lines:
                    if found := re.search(pattern, line):
                        return found
                ended = self._process.poll() is not None and not self._thread.is_alive()
                left = deadline - time.monotonic()
                if ended or left <= 0:
                    how = f"ended with code {self._process.returncode}" if ended else f"is not up after {seconds:.0f} s"
                    raise TunnelError(f"{self._name} {how}: {self.last_words()}")
                self._said.wait(min(left, 0.2))

    def trouble(self) -> str:
        """Nothing while it runs, else how it ended."""
        code = self._process.poll()
        if code is None:
            return ""
        how = f"signal {-code}" if code < 0 else f"code {code}"
        return f"{self._name} ended with {how}: {self.last_words()}"

    def last_words(self) -> str:
        """What it said last, in one line."""
        lines = [line for line in list(self._lines) if line and not re.match(self._noise, line)]
        return " | ".join(lines[-_REPEATED:]) or "it said nothing"

    def close(self) -> None:
        """End it. Safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._thread.join(_ENDING)
        if self._process.stdout is not None and not self._thread.is_alive():
            self._process.stdout.close()

    def _run(self, command: list[str], begun: Future[subprocess.Popen[bytes]]) -> None:
        """Start the program and read what it says.

        It is to end with this process even after kill -9. The system sees to that (`setpriv`; Python's own hook is not
        safe where there are threads), but does so when the thread ends that started it: so that is this one.
        """
        guard = shutil.which("setpriv")
        try:
            process = subprocess.Popen(
                [guard, "--pdeathsig", "TERM", "--", *command] if guard is not None else command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(process)
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            for raw in process.stdout:
                with self._said:
                    self._lines.append(raw.decode(errors="replace").rstrip())
                    self._said.notify_all()
        process.wait()
        with self._said:
            self._said.notify_all()


def find_program(name: str, how_to_get: str) -> str:
    """The path of a program, or a TunnelError that says where to get it."""
    found = shutil.which(name)
    if found is None:
        raise TunnelError(f"there is no program {name!r} here. {how_to_get}")
    return found


class AgentTunnel(Tunnel):
    """A tunnel that is up while a program runs, and looks after its connections itself."""

    _agent: Agent | None = None

    def trouble(self) -> str:
        """Whether the program runs."""
        return self._agent.trouble() if self._agent is not None else "it was never started"

    def close(self) -> None:
        """End the program, and with it the way here."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
