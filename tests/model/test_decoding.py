"""Token by token, through a cache, the network computes what one full forward pass computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import forward, random_params

from depthgrow_jax.growth import grow_params
from depthgrow_jax.growth.source import lidas, midas
from depthgrow_jax.model import ModelConfig, apply, decode, layer_program, prefill, reorder, unroll

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)
TOKENS = np.random.default_rng(5).integers(0, BASE.vocab_size, (3, 20))
# Tokens of each prompt; the rest of a row is fed one by one.
LENGTHS = np.array([1, 9, 5])


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


def cached_logits(cfg, params, program=None, slots=24):
    """`[B, T, V]`: after each prompt's last token and after every token from there on; 0 before."""
    padded = np.where(np.arange(9)[None] < LENGTHS[:, None], TOKENS[:, :9], 63)
    lengths = jnp.asarray(LENGTHS)
    start = jax.jit(lambda p: prefill(cfg, p, jnp.asarray(padded), lengths, slots=slots, program=program))
    go_on = jax.jit(lambda network, cache, tokens: decode(cfg, network, cache, tokens))
    logits, cache = start(params)
    network = unroll(cfg, params, program)
    found = np.zeros((*TOKENS.shape, cfg.vocab_size), np.float32)
    rows = np.arange(len(TOKENS))
    found[rows, LENGTHS - 1] = logits
    for done in range(TOKENS.shape[1] - LENGTHS.max()):
        place = LENGTHS + done
        logits, cache = go_on(network, cache, jnp.asarray(TOKENS[rows, place]))
        found[rows, place] = logits
    np.testing.assert_array_equal(cache.length, LENGTHS + done + 1)
    return found


def assert_equals_full_pass(cfg, params, program=None, **options):
    found = cached_logits(cfg, params, program, **options)
    want = np.asarray(apply(cfg, params, jnp.asarray(TOKENS), program=program).logits)
    place = np.arange(TOKENS.shape[1])[None]
    seen = (place >= LENGTHS[:, None] - 1) & (place < LENGTHS[:, None] + TOKENS.shape[1] - LENGTHS.max())
    assert seen.sum() == 3 * 12
    np.testing.assert_allclose(found[seen], want[seen], rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 1, "head_dim": 6},
        {"qk_norm": True, "qkv_bias": True},
        {"norm_placement": "pre_lns"},
        {"norm_placement": "post", "norm": "layer", "mlp": "gelu"},
        {"norm_placement": "sandwich", "residual_scaling": "learned"},
        {"rope_scaling": "llama3", "head_dim": 16, "rope_original_length": 64},
    ],
    ids=str,
)
def test_every_step_equals_the_full_pass_for_unequal_prompts(options):
    cfg = dataclasses.replace(BASE, **options)
    assert_equals_full_pass(cfg, random_params(cfg, 3))


def test_against_the_numpy_network():
    params = random_params(BASE, 2)
    found = cached_logits(BASE, params)
    want = forward(BASE, params, TOKENS).logits
    np.testing.assert_allclose(found[1, 8:20], want[1, 8:20], rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("order", [[0, 1, 1, 2, 0], [2, 0], [2, 1, 0, 1]])
def test_a_repeated_layer_has_a_slot_for_each_repeat(order):
    params = random_params(BASE, 3)
    assert_equals_full_pass(BASE, params, reorder(layer_program(BASE, 3), order))


def test_gates_of_the_program(getkey):
    params = random_params(BASE, 3)
    gate = jax.random.uniform(getkey(), (3, 2))
    assert_equals_full_pass(BASE, params, layer_program(BASE, 3, gate=gate))


@pytest.mark.parametrize("operator", [midas, lidas])
def test_after_growth_in_the_same_process(operator):
    """The layers of a grown network are counted anew."""
    params = random_params(BASE, 4)
    assert_equals_full_pass(BASE, params)
    grown = grow_params(params, operator(4, 2), model=BASE)
    assert_equals_full_pass(BASE, grown)


def test_the_size_of_the_cache_does_not_matter():
    params = random_params(BASE, 2)
    small, large = cached_logits(BASE, params, slots=21), cached_logits(BASE, params, slots=64)
    np.testing.assert_allclose(small, large, atol=1e-5)


def test_refusals():
    params = random_params(BASE, 1)
    encoder = dataclasses.replace(BASE, causal=False)
    with pytest.raises(ValueError, match="bidirectional"):
        prefill(encoder, params, jnp.asarray(TOKENS), jnp.asarray(LENGTHS), slots=24)
    with pytest.raises(ValueError, match="19 slots cannot hold 20 tokens"):
        prefill(BASE, params, jnp.asarray(TOKENS), jnp.asarray(LENGTHS), slots=19)
