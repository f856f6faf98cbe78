"""The services of compose.yaml do their work: the same commands and variables as processes of this machine.

Other than in containers: ports are free ones, the secret lies elsewhere, and the GPU server is called by this machine's
own name. That is no loopback address to the program, so that token and TLS are in force as between containers.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.compose import ROOT, command, health_command, services
from tests.launching import environment, free_port

from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.verify.audit import audit

DEADLINE = 300.0
pytestmark = pytest.mark.timeout(600)


class Container:
    """A service of compose.yaml as a process."""

    def __init__(self, service: dict[str, Any], variables: dict[str, str], screen: Path) -> None:
        self._service, self._screen = service, screen
        folder = screen.parent / "tmp"
        folder.mkdir(exist_ok=True)
        own = {
            **environment(TMPDIR=str(folder)),
            **{k: str(v) for k, v in service.get("environment", {}).items()},
            **variables,
        }
        with screen.open("wb") as file:
            self.process = subprocess.Popen(command(service), env=own, stdout=file, stderr=subprocess.STDOUT)

    @property
    def screen(self) -> str:
        return self._screen.read_text(encoding="utf-8")

    def until_healthy(self) -> None:
        """Wait until its health check passes."""
        end = time.monotonic() + DEADLINE
        while subprocess.run(health_command(self._service), capture_output=True).returncode:
            if self.process.poll() == 0:
                return  # it was quick: its work is done already
            assert self.process.poll() is None, self.screen[-3000:]
            assert time.monotonic() < end, f"not healthy: {self.screen[-3000:]}"
            time.sleep(0.1)

    def end(self) -> str:
        """What it said, once it has ended well."""
        code = self.process.wait(DEADLINE)
        assert code == 0, self.screen[-5000:]
        return self.screen

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
            self.process.kill()
            self.process.wait(20)


Up = Callable[..., Container]


@pytest.fixture
def up(in_tmp: Path) -> Iterator[Up]:
    """Start a service in a folder like the images' /workspace; all are stopped after the test."""
    started: list[Container] = []
    shutil.copytree(ROOT / "configs", "configs")
    Path("runs").mkdir()

    def up(name: str, port: dict[str, str] | None = None, **variables: str) -> Container:
        """`port` maps a port inside the containers to the one to use here."""
        text = json.dumps(services(LOADER_WORKERS="1")[name])
        for inside, here in (port or {}).items():
            text = text.replace(inside, here)
        started.append(Container(json.loads(text), variables, in_tmp / f"{name}-{len(started)}.log"))
        return started[-1]

    yield up
    for container in reversed(started):
        container.stop()


def test_a_gpu_server_and_two_loaders_train(up: Up) -> None:
    token, port = secrets.token_urlsafe(24), {"29500": str(free_port())}
    Path("token").write_text(token)
    secret = {
        "DTRAIN_NETWORK__TOKEN_FILE": os.path.abspath("token"),
        "DTRAIN_RUN__NAME": "fed",
        "DTRAIN_TRAINING__EPOCHS": "4",
    }
    server = up("gpu-server", port, **secret)
    server.until_healthy()
    assert services()["cpu-loader"]["deploy"]["replicas"] == 2
    loaders = [up("cpu-loader", port, **secret, GPU_HOST=socket.gethostname()) for _ in range(2)]
    loaders[0].until_healthy()

    said = server.end()
    assert "Training completed (4 epochs, 92 steps" in said
    assert token not in said
    samples = [loader.end() for loader in loaders]
    assert all("loaded " in each for each in samples)
    assert not list(Path("runs").glob("*home*"))  # the copy for loaders elsewhere
    assert audit(RunDirectory(Path("runs/fed"))).problem == ""


def test_ddp_trains_on_two_processes_and_tensorboard_shows_it(up: Up) -> None:
    training = up("ddp", DTRAIN_RUN__NAME="both", DTRAIN_TRAINING__EPOCHS="2")
    assert "Training completed (2 epochs, 46 steps" in training.end()
    (start,) = [event for event in RunDirectory(Path("runs/both")).events() if event["event"] == "start"]
    assert start["facts"]["strategy"] == "ddp"

    port = str(free_port())
    board = up("tensorboard", {"6006": port})
    board.until_healthy()
    deadline = time.monotonic() + DEADLINE
    shown: list[str] = []
    while not shown:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=10) as answer:
            shown = json.load(answer)
        assert time.monotonic() < deadline, board.screen
    assert shown == ["both/tensorboard"]
