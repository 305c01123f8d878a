"""What every test shares: eight fake CPU devices, tiny models, keys."""

import os

# Before jax is imported: meshes are tested on one machine.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the time of these tests: without most of LLVM's optimizations they take two thirds of
# it, here and in the processes that tests start. Values differ by rounding only.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
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


@pytest.fixture(scope="session")
def compile_cache_dir(tmp_path_factory):
    """Where executables are kept while the tests run."""
    return tmp_path_factory.mktemp("executables")


@pytest.fixture
def compile_cache(compile_cache_dir, monkeypatch):
    """Programs compiled once are loaded from disk after that, in this process and in those it starts.

    A train step costs seconds to compile and milliseconds to run: tests train the same tiny runs again and
    again.
    """
    settings = {
        "jax_compilation_cache_dir": str(compile_cache_dir),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
        monkeypatch.setenv(name.upper(), str(value))
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
