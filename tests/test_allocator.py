"""`keep_freed_memory` does what it is for: a block freed and asked for again costs no page faults."""

import ctypes
import subprocess
import sys

import pytest

# Maps, touches and frees 64 MiB ten times; prints the page faults of the last nine.
PROGRAM = """
import resource, sys
import numpy as np
from depthgrow_jax.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for i in range(10):
    np.empty(64 << 20, np.uint8).fill(1)
    if i == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    """Minor page faults of the program, in a process of its own: the setting is for a whole process."""
    command = [sys.executable, "-c", PROGRAM, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"),
    reason="only glibc has mallopt",
)
def test_freed_memory_is_used_again():
    assert faults("keep") < 100 < faults("default")
