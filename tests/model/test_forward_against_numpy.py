"""Every architecture option computes what its formula says: logits equal a float64 numpy forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import forward, random_params, rope_frequencies

from depthgrow_jax.model import ModelConfig, apply, layer_program, validate

BASE = ModelConfig(vocab_size=64, width=32, heads=4, mlp_dim=48)
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, BASE.vocab_size, (2, 16)))
POSITIONS = jnp.arange(16)[None]
LLAMA3 = {"head_dim": 16, "rope_scaling": "llama3", "rope_original_length": 64, "rope_factor": 8.0}

OPTIONS = {
    "llama": {},
    "grouped_query_attention": {"kv_heads": 2},
    "multi_query_attention_with_free_head_width": {"kv_heads": 1, "head_dim": 6},
    "wide_heads": {"kv_heads": 2, "head_dim": 16},
    "rope_theta": {"rope_theta": 500.0},
    "rope_linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "rope_llama3": LLAMA3,
    "rope_llama3_other_factors": LLAMA3
    | {"rope_factor": 3.0, "rope_low_freq_factor": 0.5, "rope_high_freq_factor": 2.0},
    "layer_norm_gelu_biases_untied": {
        "norm": "layer",
        "mlp": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_embeddings": False,
    },
    "attention_bias_only": {"attention_bias": True},
    "qkv_bias_alone": {"qkv_bias": True, "kv_heads": 2},
    "normed_queries_and_keys": {"qk_norm": True, "kv_heads": 2, "head_dim": 16},
    "swiglu_with_bias": {"mlp_bias": True},
    "large_norm_eps": {"norm_eps": 0.5},
    "bidirectional": {"causal": False},
    "pre_lns": {"norm_placement": "pre_lns"},
    "post": {"norm_placement": "post"},
    "sandwich_layer_norm": {"norm_placement": "sandwich", "norm": "layer"},
    "depth_scaled": {"residual_scaling": "depth"},
    "depth_scaled_by_the_root": {"residual_scaling": "depth", "residual_exponent": 0.5},
    "learned_scale": {"residual_scaling": "learned"},
    "learned_scale_after_post_norm": {"residual_scaling": "learned", "norm_placement": "post"},
    "encoder": {"causal": False, "norm_placement": "post", "norm": "layer", "mlp": "gelu", "mlp_bias": True},
}


def close_to(got, want):
    """float32 rounding, measured on the scale of the whole array."""
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_and_streams_equal_the_numpy_network(option):
    cfg = dataclasses.replace(BASE, **OPTIONS[option])
    validate(cfg)
    params = random_params(cfg, 3)
    taps = {"h": lambda t: t.h, "attn": lambda t: t.attn, "mlp": lambda t: t.mlp, "out": lambda t: t.out}
    got = jax.jit(lambda p: apply(cfg, p, TOKENS, taps=taps))(params)
    want = forward(cfg, params, TOKENS)
    close_to(got.logits, want.logits)
    close_to(got.taps["h"], want.streams[:-1])
    close_to(got.taps["attn"], want.attn)
    close_to(got.taps["mlp"], want.mlp)
    close_to(got.taps["out"], want.streams[1:])
    close_to(got.hidden, want.streams[-1])


@pytest.mark.parametrize("placement", ["pre", "pre_lns", "post", "sandwich"])
def test_an_order_is_the_network_of_that_order(placement):
    """`layer_program(order=...)` imitates a network of len(order) layers, its factors included."""
    cfg = dataclasses.replace(BASE, norm_placement=placement, residual_scaling="depth")
    params = random_params(cfg, 3)
    order = [2, 0, 0, 1, 2]
    program = layer_program(cfg, len(order), order=order)
    got = jax.jit(lambda p: apply(cfg, p, TOKENS, program=program).logits)(params)
    close_to(got, forward(cfg, params, TOKENS, order).logits)


def test_the_llama3_case_reaches_all_three_regimes():
    """Kept, interpolated and divided frequencies all occur, or the comparison above would prove less."""
    plain = rope_frequencies(dataclasses.replace(BASE, head_dim=16))
    ratio = rope_frequencies(dataclasses.replace(BASE, **LLAMA3)) / plain
    assert (ratio == 1).any() and (ratio == 1 / 8).any() and ((ratio > 1 / 8) & (ratio < 1)).any()


def test_given_positions_replace_the_default_ones():
    """A row shifted by a constant is the same row (rotary positions are relative); a stretched one is not."""
    params = random_params(BASE, 2)
    run = jax.jit(lambda positions: apply(BASE, params, TOKENS, positions=positions).logits)
    plain = run(POSITIONS)
    np.testing.assert_allclose(plain, apply(BASE, params, TOKENS).logits, atol=1e-5)
    np.testing.assert_allclose(run(7 + POSITIONS), plain, atol=2e-4)
    assert np.abs(run(3 * POSITIONS) - plain).max() > 0.1
