"""Compiled programs are kept on disk: half of the time of a small network's probes is compilation.

The next run of the same shapes then compiles nothing.
"""

import hashlib
import pathlib
import platform

import jax

_ROOT = "~/.cache/depthgrow_jax/executables"
_SECONDS = 0.2


def keep_executables() -> None:
    """Turns JAX's persistent compilation cache on, unless the user has chosen a place for it.

    `JAX_ENABLE_COMPILATION_CACHE=0` in the environment switches it off.

    Programs for CPUs are kept apart by processor: one that was compiled for another may use instructions that
    this one lacks, where a home directory is shared.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    place = pathlib.Path(_ROOT).expanduser() / _processor()
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _processor() -> str:
    """A few hex digits for what the processor can do."""
    can = platform.machine() + platform.processor()
    listed = pathlib.Path("/proc/cpuinfo")
    if listed.exists():
        lines = listed.read_text().splitlines()
        can += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(can.encode()).hexdigest()[:12]
