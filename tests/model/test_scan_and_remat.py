"""Speed knobs change no number: scan, unrolled scan, no jit at all, and every rematerialisation agree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import random_params

from depthgrow_jax.model import ModelConfig, apply

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48, norm_placement="pre_lns")
DEPTH = 4
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 64, (2, 16)))


def loss_and_grads(cfg):
    """A loss whose gradient reaches every parameter, with its gradient, not jitted yet."""

    def loss(params):
        log_probs = jax.nn.log_softmax(apply(cfg, params, TOKENS[:, :-1]).logits)
        return -jnp.take_along_axis(log_probs, TOKENS[:, 1:, None], axis=-1).mean()

    return jax.value_and_grad(loss)


@pytest.fixture(scope="module")
def params():
    """One set of parameters for all variants."""
    return random_params(BASE, DEPTH)


@pytest.fixture(scope="module")
def plain(params):
    """Loss and gradients of the plain scan."""
    loss, grads = jax.jit(loss_and_grads(BASE))(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    return loss, grads


def assert_same(got, want):
    def close(g, w):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-6 * max(1.0, float(np.abs(w).max())))

    jax.tree.map(close, got, want)


@pytest.mark.parametrize(
    "changes",
    [{"scan_unroll": 3}, {"scan_unroll": DEPTH}, {"remat": "full"}, {"remat": "dots"}],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()),
)
def test_loss_and_gradients_are_those_of_the_plain_scan(changes, params, plain):
    variant = dataclasses.replace(BASE, **changes)
    assert_same(jax.jit(loss_and_grads(variant))(params), plain)


def test_the_network_runs_without_jit():
    params = random_params(BASE, 2)
    jitted = jax.jit(lambda p: apply(BASE, p, TOKENS).logits)(params)
    with jax.disable_jit():
        assert_same(apply(BASE, params, TOKENS).logits, jitted)


def test_remat_recomputes_in_the_backward_pass(params):
    """Without this the comparison above could be of remat off with remat off."""

    def matmuls(remat):
        return str(jax.make_jaxpr(loss_and_grads(dataclasses.replace(BASE, remat=remat)))(params)).count(
            "dot_general["
        )

    none, dots, full = matmuls("none"), matmuls("dots"), matmuls("full")
    # `dots` recomputes the two matmuls of attention (batched), `full` all nine of a layer (less the last).
    assert none < dots < full


def test_unrolling_unrolls(params):
    """The unrolled forward pass has no loop left; the scanned one has a single body."""

    def text(unroll):
        cfg = dataclasses.replace(BASE, scan_unroll=unroll)
        return jax.jit(lambda p: apply(cfg, p, TOKENS).logits).lower(params).as_text()

    assert "stablehlo.while" in text(1)
    assert "stablehlo.while" not in text(DEPTH)
