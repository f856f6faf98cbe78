"""`dtrain doctor`: two commands on two ends of a way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable

from tests.launching import environment, free_port


def test_listen_and_look(dtrain: Callable) -> None:
    words = ["doctor", "--listen", "--host", "127.0.0.1", "--port", "0", "--minutes", "2"]
    command = [sys.executable, "-m", "distributed_training", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as listening:
        assert listening.stdout is not None
        try:
            link = next(line for line in listening.stdout if "--to" in line).split("'")[1]
            seen = dtrain("doctor", "--to", link, "--seconds", "0.2", "--json", "data.dataset=digits")
            assert seen.code == 0
            found = json.loads(seen.out)
            assert found["ok"]
            figures = {name: value for check in found["checks"] for name, value in check.items()}
            assert figures["samples_per_second"] > 0
            assert figures["loaded_per_second"] > 0
            assert "ok    bandwidth back" in dtrain("doctor", "--to", link, "--seconds", "0.2").out
        finally:
            listening.send_signal(signal.SIGINT)
            listening.stdout.read()
            assert listening.wait(20) == 0


def test_a_fault_ends_with_its_fix_and_code_1(dtrain: Callable) -> None:
    seen = dtrain("doctor", "--to", f"127.0.0.1:{free_port()}", "--batch-bytes", "1000")
    assert seen.code == 1
    assert "FAIL  port" in seen.out
    assert "what to do: start the GPU side there" in seen.out
    assert "could not be looked at" in seen.out


def test_one_of_the_two_ends_must_be_chosen(dtrain: Callable) -> None:
    seen = dtrain("doctor")
    assert seen.code == 2
    assert "--listen" in seen.err
