"""Collectives through the shared memory of a host, without MPI and torch: a C++ program with forked ranks, built twice.

Once as it is used, once with the address and undefined-behaviour sanitizers.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.launching import need

HERE = Path(__file__).parent
SOURCE = HERE.parent.parent / "src/distributed_training/native/mpi"
PARTS = ["reduce", "codec", "copy", "process", "calls", "signature", "segment", "host_memory", "between_hosts"]
TESTS = ["host_memory_test", "numbers_test", "failures_test"]
BUILDS = {
    "plain": ["-O2", "-std=c++17"],
    "sanitized": [
        "-O1",
        "-g1",
        "-std=c++20",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-DDTRAIN_PLAIN",
    ],
}
CASES = [
    "aborted",
    "allreduce2",
    "allreduce3",
    "allreduce4",
    "between",
    "calls",
    "codecs",
    "died",
    "halves",
    "hook_fails",
    "kernels",
    "leaves_nothing",
    "mismatch",
    "movement",
    "one",
    "stopped",
    "stress",
    "tries",
    "unavailable",
]
LIMIT = 60  # seconds for one case; each takes a second or so

Program = Callable[[str], Path]


def _compiler() -> str:
    found = shutil.which("g++")
    need("g++", found is not None)
    assert found is not None
    return found


def _compile(source: Path, flags: list[str], folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    command = [_compiler(), *flags, "-Wall", "-Wextra", "-Werror", f"-I{SOURCE}", "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The test program in one of its builds, made when first asked for."""

    @functools.cache
    def make(build: str) -> Path:
        folder = tmp_path_factory.mktemp(build)
        sources = [SOURCE / f"{name}.cpp" for name in PARTS] + [HERE / f"{name}.cpp" for name in TESTS]
        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(lambda source: _compile(source, BUILDS[build], folder), sources))
        target = folder / "host_memory_test"
        command = [_compiler(), *BUILDS[build], *map(str, objects), "-o", str(target), "-pthread", "-lrt"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return target

    return make


def _run(program: Path, *words: str) -> str:
    done = subprocess.run([str(program), *words], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("build", BUILDS)
def test_case(program: Program, build: str, case: str) -> None:
    assert _run(program(build), case).endswith("ok\n")


def test_every_case_of_the_program_is_run(program: Program) -> None:
    assert _run(program("plain")).split() == CASES


def test_the_codecs_write_the_same_bytes_whatever_the_compiler_does(program: Program) -> None:
    written = {build: _run(program(build), "codecs") for build in BUILDS}
    assert written["plain"] == written["sanitized"]
    assert "encoded bytes: f6daf06afd562c17" in written["plain"]
