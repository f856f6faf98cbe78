"""Rules for every test: it leaves no thread, process, environment variable, folder, setting or file behind."""

from __future__ import annotations

import logging
import os

# Before torch is imported anywhere: two cores, and some tests start processes of their own.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GOMP_SPINCOUNT"] = "1000"  # as the command line sets it
os.environ["WANDB_ERROR_REPORTING"] = "false"  # its telemetry threads outlive the run

import gc
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import put_coverage_aside

ROOT = Path(__file__).parent.parent
GRACE = 5.0  # seconds that something just closed may take to be gone


def pytest_sessionstart() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has started the tests in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    put_coverage_aside()
    rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    if rank is not None:  # ranks end side by side, and pytest would tidy up one folder for all of them
        folder = Path(tempfile.gettempdir()) / f"rank-{rank}"
        folder.mkdir(exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)


@pytest.fixture(scope="session", autouse=True)
def _private_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files go to a folder of this session, where leftovers can be seen."""
    # torch sets the compiler's folder by itself when an optimizer first steps; set before, no test is blamed for it.
    folders = {"TMPDIR": "temporary", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in folders.items():
            patch.setenv(variable, str(tmp_path_factory.mktemp(name)))
        patch.setattr(tempfile, "tempdir", os.environ["TMPDIR"])
        yield


@pytest.fixture(autouse=True)
def _signals_kept() -> Iterator[None]:
    """A program that fails ignores SIGTERM, to say why in peace; what a later test starts must not inherit that."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _logging_kept() -> Iterator[None]:
    """Commands decide where logs go, for the rest of their process; here others come after them."""
    logger = logging.getLogger("distributed_training")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_left_behind(_private_temporary_folder: None) -> Iterator[None]:
    """Compare what is there before and after a test."""
    before = {name: look() for name, look in _LOOKS.items()}
    native = _native_threads()
    yield
    # Garbage whose threads are not Python's is collected here, and not in a process forked by a later test: that has no
    # such threads, and crashes when it is to end them. A rank makes new ones in every test, and forks nothing.
    if _native_threads() > native and "RANK" not in os.environ:
        gc.collect()
    for name, look in _LOOKS.items():
        deadline = time.monotonic() + GRACE
        while (extra := _extra(name, before[name], look())) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not extra, f"the test left {name} behind: {extra}"


def _extra(name: str, before: dict, after: dict) -> dict:
    if name in ("threads", "processes"):  # those of earlier tests may end, and get their names, at any moment
        return {key: after[key] for key in after.keys() - before.keys()}
    return {key: after.get(key, "(gone)") for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def _threads() -> dict:
    kept_by_torch = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor", "Dummy-")  # the compiler's own
    return {t.ident: t.name for t in threading.enumerate() if not t.name.startswith(kept_by_torch)}


def _native_threads() -> int:
    """Threads that Python did not start: torch's stores have some, groups of ranks, libraries."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def _processes() -> dict:
    found = {}
    kept_processes = ("resource_tracker", "compile_worker")  # Python's and the compiler's own
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(kept in command for kept in kept_processes):
                found[child.pid] = command
        except psutil.NoSuchProcess:
            pass
    return found


def _environment() -> dict:
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST" and not k.startswith("KMP_")}


def _files() -> dict:
    own = {".pytest_cache", ".coverage", "coverage.xml", ".hypothesis", ".ruff_cache", ".mypy_cache"}
    places = [ROOT, Path(tempfile.gettempdir())]
    names = {str(path): "file" for place in places for path in place.iterdir()}
    return {n: v for n, v in names.items() if Path(n).name not in own and not Path(n).name.startswith(".coverage")}


def _settings() -> dict:
    return {
        "working directory": os.getcwd(),
        "torch threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
    }


_LOOKS: dict[str, Callable[[], dict]] = {
    "threads": _threads,
    "processes": _processes,
    "environment variables": _environment,
    "files": _files,
    "process-wide settings": _settings,
}


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Starts ranks that have imported what all need."""
    server = RankServer(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test inside its own empty folder, with none of our settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("DTRAIN_")] + [
        "GPU_HOST",
        "CPU_HOST",
        "TRAINING_PORT",
        "BATCH_SIZE",
    ]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path
