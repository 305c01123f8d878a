"""Taps see every layer's stream and contributions, reduced inside the scan, and cost nothing when absent.

That the tapped values are the right ones is `test_forward_against_numpy.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import random_params

from depthgrow_jax.model import ModelConfig, apply, layer_program

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)
DEPTH, BATCH, LENGTH = 3, 2, 16
TOKENS = jnp.asarray(np.random.default_rng(3).integers(0, 64, (BATCH, LENGTH)))
FULL = {"h": lambda t: t.h, "attn": lambda t: t.attn, "mlp": lambda t: t.mlp, "out": lambda t: t.out}


@pytest.mark.parametrize("placement", ["pre", "pre_lns", "post", "sandwich"])
def test_stream_and_contributions_add_up_under_any_gate(placement):
    cfg = dataclasses.replace(BASE, norm_placement=placement, residual_scaling="depth")
    params = random_params(cfg, DEPTH)
    program = layer_program(cfg, 4, order=[0, 2, 2, 1], gate=[[1, 1], [0.5, 2], [0, 1], [1, 0]])
    got = jax.jit(lambda p: apply(cfg, p, TOKENS, program=program, taps=FULL))(params)
    h, attn, mlp, out = (np.asarray(got.taps[name]) for name in ("h", "attn", "mlp", "out"))
    assert out.shape == (4, BATCH, LENGTH, cfg.width)
    np.testing.assert_allclose(h + attn + mlp, out, atol=1e-6 * np.abs(out).max())
    np.testing.assert_array_equal(h[1:], out[:-1])
    np.testing.assert_array_equal(out[-1], got.hidden)
    assert (attn[2] == 0).all() and (mlp[3] == 0).all() and (np.abs(mlp[2]).max() > 0)


def test_reduced_taps_equal_reductions_of_full_ones():
    params = random_params(BASE, DEPTH)
    reduced = {
        "norm": lambda t: jnp.linalg.norm(t.h, axis=-1),
        "overlap": lambda t: jnp.sum(t.attn * t.mlp),
        "pair": lambda t: {"first": t.out[:, 0], "mean": jnp.mean(t.out, axis=(0, 1))},
    }
    got = jax.jit(lambda p: apply(BASE, p, TOKENS, taps=reduced).taps)(params)
    full = jax.jit(lambda p: apply(BASE, p, TOKENS, taps=FULL).taps)(params)
    full = {name: np.asarray(value) for name, value in full.items()}
    assert got["norm"].shape == (DEPTH, BATCH, LENGTH)
    np.testing.assert_allclose(got["norm"], np.linalg.norm(full["h"], axis=-1), rtol=1e-5)
    np.testing.assert_allclose(got["overlap"], np.sum(full["attn"] * full["mlp"], axis=(1, 2, 3)), rtol=1e-4)
    np.testing.assert_allclose(got["pair"]["first"], full["out"][:, :, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["pair"]["mean"], full["out"].mean(axis=(1, 2)), rtol=1e-4, atol=1e-6)


def scan_outputs(taps):
    """Shapes that leave the scan over the layers."""
    params = random_params(BASE, DEPTH)
    jaxpr = jax.make_jaxpr(lambda p: apply(BASE, p, TOKENS, taps=taps))(params)
    (scan,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    return sorted(var.aval.shape for var in scan.outvars)


def test_only_what_is_asked_for_leaves_the_scan():
    """`[K, B, T, D]` exists only for a tap that returns a stream whole."""
    stream = (BATCH, LENGTH, BASE.width)
    assert scan_outputs(None) == scan_outputs({}) == [stream]
    assert scan_outputs({"norm": lambda t: jnp.linalg.norm(t.h, axis=-1)}) == [
        stream,
        (DEPTH, BATCH, LENGTH),
    ]
    assert scan_outputs({"h": lambda t: t.h}) == [stream, (DEPTH, BATCH, LENGTH, BASE.width)]
