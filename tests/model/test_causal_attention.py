"""Attention in blocks of queries is attention under the whole causal mask, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.model.layers import causal_attention


@pytest.mark.parametrize("length", [1, 64, 65, 150, 600])  # one block, a last one of 1, uneven, 8 blocks
def test_equals_a_plain_softmax(length):
    keys = jax.random.split(jax.random.key(length), 4)
    query = jax.random.normal(keys[0], (2, length, 4, 6))
    key, value = (jax.random.normal(k, (2, length, 2, 6)) for k in keys[1:3])
    weight = jax.random.normal(keys[3], query.shape)

    def plain(query, key, value):
        """Every query head against its key head, in float32, the mask as -inf."""
        key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
        scores = jnp.einsum("btnh,bsnh->bnts", query, key) / jnp.sqrt(6.0)
        hidden = jnp.triu(jnp.ones((length, length), bool), 1)[None, None]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores)), value)

    def both(attend):
        loss = lambda *x: jnp.sum(attend(*x) * weight)  # noqa: E731
        return jax.jit(lambda *x: (attend(*x), jax.grad(loss, argnums=(0, 1, 2))(*x)))(query, key, value)

    for got, want in zip(jax.tree.leaves(both(causal_attention)), jax.tree.leaves(both(plain)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
