"""Training tests load what they compiled before."""

import pytest


@pytest.fixture(autouse=True)
def _compile_cache(compile_cache):
    pass
