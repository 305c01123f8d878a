"""Compilation dominates these tests: compile quickly rather than for speed."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Leaves out most of LLVM's optimizations; values differ by rounding only."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
