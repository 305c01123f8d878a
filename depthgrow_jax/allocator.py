"""Memory that a training step frees and asks for again, kept instead of returned to the kernel."""

import ctypes
import sys

# Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory; returns whether it did. Call it before JAX starts its threads.

    XLA on CPU allocates the buffers of a step, hundreds of MB, anew for every step. By default glibc maps
    each from the kernel and unmaps it again, and the page faults cost a quarter of the step and more
    (docs/performance.md). Blocks of up to 1 GiB now come from one heap that does not shrink; the process
    keeps its peak memory until it ends. Elsewhere than on Linux with glibc nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_MMAP_THRESHOLD, 2**30), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1))
    accepted = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(accepted)
