"""What every test shares: eight fake CPU devices, tiny models, keys."""

import os
import tempfile

# Before jax is imported: meshes are tested on one machine.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the time of these tests: without most of LLVM's optimizations they take two thirds of
# it, here and in the processes that tests start. Values differ by rounding only.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
# And what one test has compiled, others load: those of the other worker, and processes that tests start.
# Name a directory of your own to keep it for the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _executables = tempfile.TemporaryDirectory(prefix="executables")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _executables.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest
from jaxtyping import install_import_hook

pytest_plugins = ["gyms"]

# Shape annotations are checked while tests run, and cost nothing otherwise.
_hook = install_import_hook("depthgrow_jax.model", "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at every call, the same sequence in every test."""
    count = iter(range(10**6))
    return lambda: jax.random.fold_in(jax.random.key(20251208), next(count))


@pytest.fixture
def place(tmp_path):
    """A directory with texts, a home, and `run.py`, a config that `launch.py` can train in no time."""
    from toys import write_config  # not before the hook above: it imports the project

    (tmp_path / "home").mkdir()
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(f"text number {number} " * 20)
    write_config(tmp_path)
    return tmp_path
