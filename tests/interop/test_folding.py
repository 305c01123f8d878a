"""Folding the factors of a program into weights changes nothing that the network computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_params

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.folding import fold, folded_config
from depthgrow_jax.model import LayerProgram, ModelConfig, abstract_params, apply, layer_program, reorder

DEPTH = 5
# LayerNorm and biases everywhere: whatever a factor has to reach is there.
BASE = ModelConfig(
    vocab_size=23,
    width=16,
    heads=4,
    kv_heads=2,
    mlp_dim=24,
    norm="layer",
    mlp="gelu",
    attention_bias=True,
    mlp_bias=True,
    residual_exponent=0.5,
)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, BASE.vocab_size, (2, 9)))
ORDERS = {
    "repeat": (0, 1, 1, 2, 3),
    "skip": (0, 2, 2, 3, 4),
    "reverse": (4, 3, 2, 1, 0),
    "loop": (1, 2, 1, 2, 1),
}


@functools.partial(jax.jit, static_argnums=0)
def logits(cfg, params, program):
    return apply(cfg, params, TOKENS, program=program).logits


def random_gates(steps):
    """Both columns, below 0 and above 1 among them, one closed, one exactly open."""
    gate = np.random.default_rng(steps).uniform(-0.5, 1.5, (steps, 2))
    gate[0, 0], gate[1, 1] = 0.0, 1.0
    return gate


def bits(leaf):
    return np.asarray(leaf).view(np.int32)


def check_same_function(cfg, params, program):
    plain, folded = fold(cfg, params, program)
    assert plain == folded_config(cfg)
    order = jnp.arange(DEPTH) if program.order is None else program.order  # one program to compile
    want = np.asarray(logits(cfg, params, program._replace(order=order)))
    plain_program = layer_program(plain, program.steps)
    assert all(np.all(factor == 1) for factor in plain_program[1:])
    got = np.asarray(logits(plain, folded, plain_program))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("scaling", ["none", "depth", "learned"])
@pytest.mark.parametrize("placement", ["pre", "pre_lns", "sandwich"])
def test_a_folded_network_computes_what_its_program_computed(placement, scaling):
    cfg = dataclasses.replace(BASE, norm_placement=placement, residual_scaling=scaling)
    params = random_params(cfg, DEPTH)
    plain, folded = fold(cfg, params, layer_program(cfg, DEPTH))
    assert plain == dataclasses.replace(
        BASE, norm_placement="sandwich" if placement == "sandwich" else "pre", residual_scaling="none"
    )
    shapes = jax.tree.map(lambda leaf: leaf.shape, (folded, abstract_params(plain, DEPTH)))
    assert shapes[0] == shapes[1]
    check_same_function(cfg, params, layer_program(cfg, DEPTH, gate=random_gates(DEPTH)))
    for order in ORDERS.values():
        # As the probes run a trained network (each layer keeps its factors), gates open and not.
        check_same_function(cfg, params, reorder(layer_program(cfg, DEPTH), order))
        gated = layer_program(cfg, DEPTH, order=order, gate=random_gates(DEPTH))
        check_same_function(cfg, params, gated)


def test_layernorm_scaling_and_gates_become_the_weights_that_arithmetic_gives():
    """By hand: 1/sqrt(l) on the norms of layer l; gate times 1/depth on the last maps and their biases."""
    cfg = dataclasses.replace(BASE, norm_placement="pre_lns", residual_scaling="depth", residual_exponent=1.0)
    params = random_params(cfg, DEPTH)
    order, gate = (0, 3, 3, 1), [[1.0, 0.5], [2.0, 1.0], [0.0, 1.0], [1.0, -3.0]]
    folded = fold(cfg, params, layer_program(cfg, 4, order=order, gate=gate))[1]["layers"]
    for step, stored in enumerate(order):
        expected = {
            ("attn_norm",): 1 / (step + 1) ** 0.5,
            ("mlp_norm",): 1 / (step + 1) ** 0.5,
            ("attn", "o"): gate[step][0] / 4,
            ("mlp", "down"): gate[step][1] / 4,
        }
        for keys, leaf in jax.tree_util.tree_leaves_with_path(folded):
            path = tuple(key.key for key in keys)
            source = params["layers"]
            for key in path:
                source = source[key]
            factor = expected.get(path[:-1], 1.0)
            np.testing.assert_allclose(leaf[step], factor * np.asarray(source)[stored], rtol=4e-7, atol=0)


def test_factors_of_one_keep_every_bit():
    cfg = dataclasses.replace(BASE, norm_placement="pre")
    params = random_params(cfg, DEPTH)
    # The smallest float32 is flushed to zero by arithmetic on some devices.
    params["layers"]["attn"]["o"]["kernel"][1, 0, 0] = 1e-45

    untouched = fold(cfg, params, layer_program(cfg, DEPTH))[1]
    pairs = zip(jax.tree.leaves(untouched), jax.tree.leaves(params), strict=True)
    assert all(mine is theirs for mine, theirs in pairs), "weights were copied for nothing"

    order = [0, 1, 1, 2, 4, 3]
    half = np.array([1.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    copied = fold(cfg, params, layer_program(cfg, 6, order=order, gate=half))[1]["layers"]
    for keys, leaf in jax.tree_util.tree_leaves_with_path(copied):
        path = tuple(key.key for key in keys)
        source = params["layers"]
        for key in path:
            source = source[key]
        for step in range(6):
            scaled = step == 2 and path[:2] in (("attn", "o"), ("mlp", "down"))
            assert np.array_equal(bits(leaf[step]), bits(source[order[step]])) != scaled, (path, step)


def test_the_given_parameters_are_left_alone():
    cfg = dataclasses.replace(BASE, norm_placement="pre_lns", residual_scaling="learned")
    params = random_params(cfg, DEPTH)
    before = jax.tree.map(np.array, params)
    fold(cfg, params, layer_program(cfg, DEPTH, gate=random_gates(DEPTH)))
    assert jax.tree.all(jax.tree.map(np.array_equal, params, before))


def test_a_norm_after_the_addition_folds_an_order_and_no_factor():
    cfg = dataclasses.replace(BASE, norm_placement="post")
    params = random_params(cfg, DEPTH)
    program = layer_program(cfg, DEPTH, order=ORDERS["loop"])
    plain, folded = fold(cfg, params, program)
    assert plain == cfg
    want = np.asarray(logits(cfg, params, program))
    np.testing.assert_allclose(logits(cfg, folded, layer_program(cfg, DEPTH)), want, rtol=0, atol=1e-6)

    gated = layer_program(cfg, DEPTH, gate=[[1, 1], [1, 1], [0.5, 1], [1, 1], [1, 1]])
    with pytest.raises(UserError, match=r"gate\[2\]=\[0.5, 1.0\]: must be 1 .*norm_placement=post"):
        fold(cfg, params, gated)
    scaled = dataclasses.replace(cfg, residual_scaling="depth", residual_exponent=1.0)
    with pytest.raises(UserError, match=r"^residual_scale\[0\]=0.20\d*: must be 1 "):
        fold(scaled, params, layer_program(scaled, DEPTH))
    learned = dataclasses.replace(cfg, residual_scaling="learned")
    with pytest.raises(UserError, match=r"^params.layers.residual_scale\[0\]="):
        fold(learned, random_params(learned, DEPTH), layer_program(learned, DEPTH))


def test_a_program_of_another_depth_is_a_mistake_of_the_caller():
    params = random_params(BASE, DEPTH)
    one = LayerProgram(None, jnp.ones((1, 2)), jnp.ones(1), jnp.ones(1))
    with pytest.raises(ValueError, match="1 steps without an order cannot run 5 stored layers"):
        fold(BASE, params, one)
