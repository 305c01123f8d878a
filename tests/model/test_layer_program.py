"""A `LayerProgram` is data: ablation, removal, reordering and looping of layers in one compilation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import forward, random_params

from depthgrow_jax.model import LayerProgram, ModelConfig, apply, layer_program, reorder

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)
DEPTH = 4
TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, 64, (2, 16)))
PLACEMENTS = ["pre", "pre_lns", "post", "sandwich"]


def close_to(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.fixture(scope="module", params=PLACEMENTS)
def network(request):
    """Config, parameters, and logits of a program, jitted once with the program as an argument."""
    cfg = dataclasses.replace(BASE, norm_placement=request.param, residual_scaling="depth")
    params = random_params(cfg, DEPTH)
    return cfg, params, jax.jit(lambda p, program: apply(cfg, p, TOKENS, program=program).logits)


def test_gates_scale_attention_and_mlp_separately(network):
    cfg, params, logits = network
    rng = np.random.default_rng(0)
    for gate in (
        np.tile([1.0, 0.0], (DEPTH, 1)),  # attention only
        np.tile([0.0, 1.0], (DEPTH, 1)),  # MLP only
        rng.uniform(0, 2, (DEPTH, 2)),
    ):
        program = layer_program(cfg, DEPTH, order=range(DEPTH), gate=gate)
        close_to(logits(params, program), forward(cfg, params, TOKENS, gate=gate).logits)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_closed_layer_is_a_layer_physically_removed(network, layer):
    """The remaining layers keep the factors they had: of the old position, of the old depth."""
    cfg, params, logits = network
    rest = [i for i in range(DEPTH) if i != layer]
    closed = layer_program(cfg, DEPTH, gate=np.where(np.arange(DEPTH) == layer, 0.0, 1.0))
    got = logits(params, closed)

    skipping = reorder(layer_program(cfg, DEPTH), rest)
    close_to(logits(params, skipping), got)

    removed = {**params, "layers": jax.tree.map(lambda leaf: leaf[jnp.asarray(rest)], params["layers"])}
    lns = cfg.norm_placement == "pre_lns"
    carried = LayerProgram(
        order=None,
        gate=jnp.ones((DEPTH - 1, 2)),
        norm_scale=jnp.asarray([(i + 1) ** -0.5 if lns else 1.0 for i in rest], jnp.float32),
        residual_scale=jnp.full(DEPTH - 1, 1 / DEPTH),
    )
    close_to(logits(removed, carried), got)
    whole = forward(cfg, params, TOKENS).logits
    assert np.abs(got - whole).max() > 0.01 * np.abs(whole).max()


def test_one_compilation_serves_every_order_and_programs_batch():
    params = random_params(BASE, DEPTH)
    traces = []

    @jax.jit
    def logits(program):
        traces.append(1)
        return apply(BASE, params, TOKENS, program=program).logits

    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 1, 1, 1]]
    programs = [layer_program(BASE, DEPTH, order=order) for order in orders]
    one_by_one = [logits(program) for program in programs]
    assert len(traces) == 1
    for got, order in zip(one_by_one, orders, strict=True):
        close_to(got, forward(BASE, params, TOKENS, order).logits)
    batched = jax.jit(jax.vmap(lambda program: apply(BASE, params, TOKENS, program=program).logits))(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *programs)
    )
    close_to(batched, np.stack(one_by_one))


def test_factors_come_from_the_position_in_the_network():
    lns = dataclasses.replace(BASE, norm_placement="pre_lns")
    np.testing.assert_allclose(layer_program(lns, 4).norm_scale, [1, 2**-0.5, 3**-0.5, 0.5])
    np.testing.assert_allclose(
        layer_program(lns, 4, order=[3, 3, 0, 0]).norm_scale, [1, 2**-0.5, 3**-0.5, 0.5]
    )
    np.testing.assert_array_equal(layer_program(lns, 4).residual_scale, np.ones(4))
    depth = dataclasses.replace(BASE, residual_scaling="depth")
    np.testing.assert_array_equal(layer_program(depth, 4).norm_scale, np.ones(4))
    np.testing.assert_allclose(layer_program(depth, 4).residual_scale, [0.25] * 4)
    root = dataclasses.replace(depth, residual_exponent=0.5)
    np.testing.assert_allclose(layer_program(root, 9).residual_scale, [1 / 3] * 9)


def test_reorder_carries_factors_and_composes():
    cfg = dataclasses.replace(BASE, norm_placement="pre_lns", residual_scaling="depth")
    gate = [1.0, 0.5, 0.25, 0.0]
    moved = reorder(layer_program(cfg, 4, gate=gate), [3, 0, 0])
    assert moved.steps == 3
    np.testing.assert_array_equal(moved.order, [3, 0, 0])
    np.testing.assert_array_equal(moved.gate, [[0, 0], [1, 1], [1, 1]])
    np.testing.assert_allclose(moved.norm_scale, [0.5, 1, 1])
    np.testing.assert_allclose(moved.residual_scale, [0.25] * 3)
    twice = reorder(reorder(layer_program(cfg, 4, gate=gate), [3, 1, 0]), [1, 0])
    np.testing.assert_array_equal(twice.order, [1, 3])
    np.testing.assert_array_equal(twice.gate, [[0.5, 0.5], [0, 0]])
    np.testing.assert_allclose(twice.norm_scale, [2**-0.5, 0.5])


def test_a_gate_per_layer_means_both_sub_layers():
    np.testing.assert_array_equal(layer_program(BASE, 2, gate=[0.5, 2]).gate, [[0.5, 0.5], [2, 2]])
    np.testing.assert_array_equal(layer_program(BASE, 2, gate=[[0.5, 2], [3, 4]]).gate, [[0.5, 2], [3, 4]])
    np.testing.assert_array_equal(layer_program(BASE, 2).gate, np.ones((2, 2)))
