"""The law of the project: a grown network is the small one run under `LayerProgram(source)`.

Held for every operator, norm placement, attention kind and residual scaling. Then what leaves the function
unchanged at an event (silenced or gated insertions), and that a plain copy does not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import GrowthConfig, gate_at, grow_params, plan_stages, validate
from depthgrow_jax.model import LayerProgram, ModelConfig, abstract_params, apply, layer_program

BASE = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)))
KEY = jax.random.key(7)

# Events that end at depth 6, so that one compilation of it serves all.
OPERATORS = {
    "midas": {"block_size": 2, "start_depth": 4},
    "lidas": {"block_size": 2, "start_depth": 4},
    "last": {"block_size": 2, "start_depth": 4},
    "interleave": {"block_size": 2, "start_depth": 4},
    "explicit": {"sources": ((3, 0, 2, 2, 1, 0),)},
    "stack": {"start_depth": 3},
}
PLACEMENTS = ("pre", "pre_lns", "post", "sandwich")
ARCHITECTURES = {
    f"{placement}-{'causal' if causal else 'bidirectional'}": {"norm_placement": placement, "causal": causal}
    for placement in PLACEMENTS
    for causal in (True, False)
} | {
    "pre-depth": {"residual_scaling": "depth"},
    "pre_lns-depth": {"norm_placement": "pre_lns", "residual_scaling": "depth", "residual_exponent": 0.5},
    "post-learned": {"norm_placement": "post", "residual_scaling": "learned", "residual_init": 0.5},
    "pre-learned-layer_norm": {
        "residual_scaling": "learned",
        "residual_init": 0.5,
        "norm": "layer",
        "mlp": "gelu",
        "mlp_bias": True,
    },
}


def event_of(operator):
    """The one event of a run from depth 4 (`stack`: 3) to 6."""
    _, stage = plan_stages(GrowthConfig(operator=operator, **OPERATORS[operator]), 6, 10)
    return stage.event


@functools.cache
def model_of(architecture):
    return dataclasses.replace(BASE, **ARCHITECTURES[architecture])


@functools.cache
def params_of(architecture):
    """Four layers of random parameters in which no scale is 1 and no bias is 0."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        size = leaf.shape[-2] ** -0.5 if path[-1].key == "kernel" else 0.3
        offset = {"scale": 1.0, "residual_scale": 0.6}.get(path[-1].key, 0.0)
        return jnp.asarray(offset + size * rng.standard_normal(leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(model_of(architecture), 4))


@functools.cache
def run(architecture):
    """Logits of (params, program), compiled once for every pair of depth and number of steps."""
    cfg = model_of(architecture)
    return jax.jit(lambda params, program: apply(cfg, params, TOKENS, program=program).logits)


def logits(architecture, params, program=None):
    return np.asarray(run(architecture)(params, program))


def assert_same(got, want, what=""):
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max(), err_msg=what)


def distance(got, want):
    """Largest difference on the scale of the logits."""
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_grown_network_is_the_small_one_under_its_source_map(architecture):
    cfg, stored = model_of(architecture), params_of(architecture)
    seen = []
    for operator in OPERATORS:
        event = event_of(operator)
        # `stack` grows the first three layers; under its program the fourth, which is stored too, never runs.
        depth = OPERATORS[operator].get("start_depth", 4)
        small = {**stored, "layers": jax.tree.map(lambda leaf, depth=depth: leaf[:depth], stored["layers"])}
        got = logits(architecture, grow_params(small, event, model=cfg, key=KEY))
        program = layer_program(cfg, event.depth, order=event.source)
        assert_same(got, logits(architecture, stored, program), operator)
        seen.append(got)
    # A plain copy is another function, and no two operators give the same one: the law says something.
    seen.append(logits(architecture, stored))
    assert all(distance(a, b) > 0.01 for i, a in enumerate(seen) for b in seen[:i])


def unchanged_program(cfg, event):
    """The small network with the factors that its layers have after the event (they follow the position)."""
    old = np.flatnonzero(~np.asarray(event.new))
    grown = layer_program(cfg, event.depth)
    return LayerProgram(None, jnp.ones((len(old), 2)), grown.norm_scale[old], grown.residual_scale[old])


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if "bidirectional" not in name])
@pytest.mark.parametrize("init", ["identity", "copy", "random"])
def test_insertions_that_add_nothing_leave_the_logits_unchanged(architecture, init):
    """`identity` does it by parameters; for `copy` and `random` the gate at its start, 0, does."""
    cfg = model_of(architecture)
    growth = GrowthConfig(operator="midas", init=init, gate="linear", gate_steps=5)
    if architecture == "post-causal" and init == "identity":
        with pytest.raises(
            UserError, match=r"growth.init='identity': not possible with model.norm_placement"
        ):
            validate(growth, cfg)
        return
    validate(growth, cfg)
    factors_move = cfg.norm_placement == "pre_lns" or cfg.residual_scaling == "depth"
    for operator in ("midas", "lidas", "last", "interleave") if init != "random" else ("lidas",):
        event = event_of(operator)
        small = params_of(architecture)
        grown = grow_params(small, event, model=cfg, init=init, key=KEY)
        born = jnp.where(jnp.asarray(event.new), 20, -1)
        gate = None if init == "identity" else gate_at(growth, jnp.asarray(20), born)
        got = logits(architecture, grown, layer_program(cfg, event.depth, gate=gate))
        assert_same(got, logits(architecture, small, unchanged_program(cfg, event)))
        if not factors_move:
            assert_same(got, logits(architecture, small))
        if cfg.norm_placement == "pre_lns" and cfg.residual_scaling == "none" and operator == "last":
            # On top of the stack nothing moves.
            assert_same(got, logits(architecture, small))
        # Later, with the ramp under way, the insertions act.
        later = gate_at(growth, jnp.asarray(22), born)
        if init != "identity":
            moved = logits(architecture, grown, layer_program(cfg, event.depth, gate=later))
            assert distance(moved, got) > 0.002


@pytest.mark.parametrize(
    ("architecture", "silent"),
    [
        ("pre-causal", ("attn.o", "mlp.down")),
        ("sandwich-causal", ("attn_post_norm", "mlp_post_norm")),
        ("pre-learned-layer_norm", ("residual_scale",)),
    ],
)
def test_old_layers_are_not_silenced(architecture, silent):
    """`identity` zeroes the last maps of the inserted layers and of no other; all else is a copy."""
    small, event = params_of(architecture), event_of("lidas")
    grown = grow_params(small, event, model=model_of(architecture), init="identity", key=KEY)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grown["layers"]):
        names = [key.key for key in path]
        source = functools.reduce(lambda tree, name: tree[name], names, small["layers"])
        expected = np.asarray(source)[list(event.source)]
        if ".".join(names).startswith(silent):
            expected[np.asarray(event.new)] = 0
        np.testing.assert_array_equal(leaf, expected, err_msg=str(names))
