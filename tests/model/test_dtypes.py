"""The compute dtype touches activations only: parameters, gradients and logits stay float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import forward, random_params

from depthgrow_jax.model import ModelConfig, apply
from depthgrow_jax.model.layers import Norm

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48, dtype="bfloat16")
TOKENS = jnp.asarray(np.random.default_rng(6).integers(0, 64, (2, 16)))


@pytest.mark.parametrize("placement", ["pre_lns", "post", "sandwich"])
def test_bfloat16_computes_near_the_float64_network(placement):
    cfg = dataclasses.replace(BASE, norm_placement=placement, residual_scaling="learned")
    params = random_params(cfg, 3)

    def loss(params):
        output = apply(cfg, params, TOKENS, taps={"attn": lambda t: t.attn})
        return jnp.mean(jnp.square(output.logits)), output

    (_, output), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert output.logits.dtype == jnp.float32
    assert output.hidden.dtype == output.taps["attn"].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    want = forward(cfg, params, TOKENS).logits
    error = np.abs(output.logits - want).max() / np.abs(want).max()
    # bfloat16 has 8 bits: a hundredth or two after three layers, and never the 1e-7 of float32.
    assert 1e-4 < error < 0.05


def test_a_norm_rounds_once():
    """Mean square and scale are float32: the only bfloat16 rounding is the last one, half a unit."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 + rng.standard_normal((64, 256)), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    for kind in ("rms", "layer"):
        params = {"scale": jnp.asarray(1 + 0.3 * rng.standard_normal(256), jnp.float32)}
        centred = exact
        if kind == "layer":
            params["bias"] = jnp.zeros(256)
            centred = exact - exact.mean(-1, keepdims=True)
        want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + BASE.norm_eps) * params["scale"][None]
        got = Norm(dataclasses.replace(BASE, norm=kind)).apply({"params": params}, x)
        assert got.dtype == jnp.bfloat16
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= 2**-8 * 1.001 * np.abs(want) + 1e-6).all()
