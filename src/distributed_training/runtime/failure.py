"""What a rank does when it fails: it says so to the others, waits until they are gone, and has the last word."""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, Any

from distributed_training.config.errors import DistributedTrainingError

if TYPE_CHECKING:
    from distributed_training.runtime.watch import Watch
    from distributed_training.runtime.world import World

_watch: Watch | None = None
_world: World | None = None
_previous_hook: Any = None
# What Gloo, NCCL and TCP say when the process at the other end is gone.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Socket Timeout",
)


def watch_over(watch: Watch | None, world: World) -> None:
    """From now on an exception that ends this process ends the whole job; with None no longer."""
    global _watch, _world, _previous_hook
    _watch, _world = watch, world
    if watch is not None and _previous_hook is None:
        _previous_hook, sys.excepthook = sys.excepthook, _on_uncaught
    elif watch is None and _previous_hook is not None:
        sys.excepthook, _previous_hook = _previous_hook, None


def tell_others(error: BaseException) -> None:
    """Before this rank reports its error: end the other ranks, so that nothing they print comes after it."""
    if _watch is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
        return
    if any(sign in str(error) for sign in _LOST):
        _watch.lost("a connection to another rank broke")  # does not come back
    _watch.failed("".join(traceback.format_exception(error)))


def headline() -> str:
    """`rank 1 of 2 (host, process 123) failed: ` where there are several."""
    if _world is None or _world.size == 1:
        return ""
    import platform

    return f"rank {_world.rank} of {_world.size} ({platform.node()}, process {os.getpid()}) failed: "


def record_for_launcher(error: BaseException) -> None:
    """torchrun shows the error that it finds in this file as the root cause."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    tell_others(error)
    record_for_launcher(error)
    if isinstance(error, DistributedTrainingError):
        sys.stderr.write(f"{headline()}{error}\n")
    else:
        sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        sys.stderr.write(f"{headline()}{kind.__name__}: {error}\n")
    sys.stderr.flush()
