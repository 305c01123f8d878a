"""Train states with distinct values in every leaf, made without compiling an initialisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from depthgrow_jax.growth import initial_lineage
from depthgrow_jax.train.state import abstract_state


def filled(tree, seed=0):
    """Arrays for abstract leaves; a leaf taken from the wrong place shows."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        high = 2 if leaf.dtype == jnp.bool_ else 10**6
        return jnp.asarray(rng.integers(high // 2, high, leaf.shape), leaf.dtype)

    return jax.tree.map(fill, tree)


_abstract_state = functools.cache(abstract_state)


def filled_state(model, tx, depth, *, step=0, ema=False):
    """A state of `depth` layers that has never grown."""
    state = filled(_abstract_state(model, tx, depth, ema=ema))
    lineage, born = initial_lineage(depth)
    return state.replace(step=jnp.asarray(step, jnp.int32), lineage=lineage, born=born)
