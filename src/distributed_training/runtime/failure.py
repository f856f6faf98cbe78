"""What a rank does when it fails: it says so to the others, waits until they are gone, and has the last word."""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distributed_training.config.errors import ConfigError, DistributedTrainingError
from distributed_training.runtime.hang_report import telling_lines
from distributed_training.runtime.world import read_world

if TYPE_CHECKING:
    from distributed_training.runtime.watch import Watch

SHOWN_BY_LAUNCHER = "ERRORS_SHOWN_BY_LAUNCHER"
"""Variable that `dtrain launch` sets: the error that a rank leaves for it will be the last on the screen."""
_watches: list[Watch] = []  # of the groups that are open; the newest speaks
_previous_hook: Any = None
_tell: Callable[[dict[str, Any]], None] | None = None
# What Gloo, NCCL, Horovod and our own backend say when a process at the other end is gone. A dataset may say
# "Connection reset by peer" of a server of its own, so that the words alone are not enough.
_GLOO = ("gloo/transport/tcp", "connectFullMesh")
_NCCL = ("remote process exited", "ncclRemoteError", "ncclSystemError", "communicator was aborted")
# Our MPI backend: whose words they are, and what it says of a rank that is gone or does not come.
_MPI = "failed on rank"
_MPI_LOST = ("has ended while", "closed the group while", "ended communication", "such a rank hangs")
_STORE = ("DistNetworkError", "DistStoreError")
_HOROVOD = "HorovodInternalError"


def watch_over(watch: Watch) -> None:
    """From now on an exception that ends this process ends the whole job."""
    global _previous_hook
    _watches.append(watch)
    watch.before_leaving = _record_of_other
    if _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _on_uncaught
        atexit.register(_at_exit)


def dismiss(watch: Watch) -> None:
    """The group of this watch is closed: nobody needs to know any longer how this process ends.

    Where it is closed because of an exception that is on its way, the others are told now, and the watch stays: if the
    exception ends the process, it has to be the last on the screen.
    """
    global _previous_hook
    if watch not in _watches:
        return
    error = sys.exc_info()[1]
    if isinstance(error, Exception) and watch.world.size > 1:
        if not _is_lost_connection(error):
            watch.failing(_trace_of(error))
        return
    _watches.remove(watch)
    watch.close()
    if not _watches:
        if sys.excepthook is _on_uncaught:
            sys.excepthook = _previous_hook
        _previous_hook = None
        atexit.unregister(_at_exit)


def speak_through_launcher(tell: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Leave any exception that ends this process for the launcher to show, also before the ranks have met.

    Args:
        tell: how the launcher is told, where it reads no file of torchrun's kind.
    """
    global _tell
    sys.excepthook, _tell = _on_uncaught, tell


def report(error: BaseException, code: int = 1) -> None:
    """An error ends this process with `code`: end the other ranks first, so that nothing of theirs comes after it."""
    if _watches and _is_lost_connection(error):
        _blame_lost_rank(error, _watches[-1])
    shown = _record_for_launcher(error)
    if _watches and isinstance(error, Exception):
        _end_others(error, _watches[-1], code)
    if shown:
        return
    headline = _headline()
    sys.stdout.flush()
    if not isinstance(error, DistributedTrainingError):
        sys.stderr.write(_trace_of(error))
    elif headline and _foreign_cause(error) is not None:  # somebody's own code, which they will want to see
        sys.stderr.write(_trace_of(error.__cause__))
    sys.stderr.write(f"{headline or 'error: '}{_in_one_line(error)}\n")
    sys.stderr.flush()


def _blame_lost_rank(error: BaseException, watch: Watch) -> None:
    """Ends the process, if it can: the error at this end of a connection is not worth showing."""
    _outlive_signals()
    watch.lost("a connection to another rank broke", telling_lines(traceback.extract_tb(error.__traceback__)))


def _end_others(error: Exception, watch: Watch, code: int) -> None:
    _outlive_signals()
    watch.failed(_trace_of(error), code)


def _outlive_signals() -> None:
    """A launcher that sees the others end must not cut this one short."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_lost_connection(error: BaseException) -> bool:
    for one in _chain(error):
        kind, text = type(one).__name__, str(one)
        if kind in _STORE or kind == _HOROVOD or any(sign in text for sign in _GLOO):
            return True
        if isinstance(one, RuntimeError) and any(sign in text for sign in _NCCL):
            return True
        if isinstance(one, RuntimeError) and _MPI in text and any(sign in text for sign in _MPI_LOST):
            return True
    return False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those behind it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _foreign_cause(error: BaseException) -> BaseException | None:
    """What is behind an error of ours, where it has a traceback that its message does not replace."""
    cause = error.__cause__
    return None if cause is None or isinstance(cause, DistributedTrainingError) else cause


def _trace_of(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))


def _in_one_line(error: BaseException) -> str:
    return str(error) if isinstance(error, DistributedTrainingError) else f"{type(error).__name__}: {error}"


def _headline() -> str:
    """`rank 1 of 2 (host, process 123) failed: ` where there are several."""
    try:
        world = _watches[-1].world if _watches else read_world()
    except ConfigError:  # it is what failed
        return ""
    return f"{world.label} ({platform.node()}, process {os.getpid()}) failed: " if world.size > 1 else ""


def _record_for_launcher(error: BaseException) -> bool:
    """Leave the error where a launcher looks for it. Whether the launcher shows it, so that nobody else need to."""
    expected = isinstance(error, DistributedTrainingError)
    facts = {
        "expected": expected and _foreign_cause(error) is None,  # a user's mistake: the message says it all
        "code": getattr(error, "exit_code", 1),
    }
    return _write_error_file(_in_one_line(error), _trace_of(error), facts) and SHOWN_BY_LAUNCHER in os.environ


def _record_of_other(message: str, trace: str) -> None:
    """torchrun shows one rank's error as the root cause; where it is not the one that failed, it must say the same."""
    if SHOWN_BY_LAUNCHER not in os.environ:  # that one knows
        _write_error_file(message, trace, {})


def _write_error_file(message: str, trace: str, facts: dict[str, Any]) -> bool:
    said = {"message": message, "extraInfo": {"py_callstack": trace, "timestamp": str(int(time.time())), **facts}}
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _tell is not None:
        _tell(said)
    if _tell is not None or not path:
        return _tell is not None
    try:
        Path(f"{path}.part").write_text(json.dumps({"message": said}), encoding="utf-8")
        os.replace(f"{path}.part", path)  # a launcher gives up on half a file
    except OSError:
        return False
    return True


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    report(error)


def _at_exit() -> None:
    """The program ended without closing its groups: nothing wrong, but the other ranks should know."""
    for watch in list(_watches):
        watch.close()
    _watches.clear()
