"""What every test shares: eight fake CPU devices, tiny models, keys."""

import os

# Before jax is imported: meshes are tested on one machine.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from jaxtyping import install_import_hook

# Shape annotations are checked while tests run, and cost nothing otherwise.
_hook = install_import_hook("depthgrow_jax.model", "beartype.beartype")

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def getkey():
    """A function that gives a new PRNG key at every call, the same sequence in every test."""
    count = iter(range(10**6))
    return lambda: jax.random.fold_in(jax.random.key(20251208), next(count))
