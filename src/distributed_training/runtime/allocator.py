"""Keep freed memory in the process: on the CPU a training step otherwise pays for thousands of page faults.

glibc gives every block above 128 KiB its own mapping and returns it to the system when it is freed, so each activation
and gradient of the next step is mapped and zeroed anew. Raising the thresholds keeps the pages.
"""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

# From malloc.h. Setting either one also stops glibc from adjusting both by itself.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT = 2**31 - 1  # the largest value mallopt takes
_RETURNED = 65536  # bytes from which a block is mapped by itself


def keep_freed_memory() -> bool:
    """Raise glibc's mmap and trim thresholds for this process. False where the C library has no mallopt."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("no mallopt in this C library: allocator left as it is")
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))


def return_freed_memory() -> bool:
    """The opposite: what is freed goes back to the system at once, so that what is resident is what is in use.

    To measure memory by; every step is slower with it. False where the C library has no such functions. A process that
    kept large blocks before has holes in its heap, which are filled first and stay resident: measure in a fresh one.
    """
    try:
        library = ctypes.CDLL(None)
        done = bool(library.mallopt(_M_MMAP_THRESHOLD, _RETURNED)) and bool(library.mallopt(_M_TRIM_THRESHOLD, 0))
        library.malloc_trim(0)
    except (OSError, AttributeError):
        return False
    return done


def allocator_environment() -> dict[str, str]:
    """The same for processes that are yet to start, as environment variables of glibc."""
    return {"MALLOC_MMAP_THRESHOLD_": str(_KEPT), "MALLOC_TRIM_THRESHOLD_": str(_KEPT)}
