"""The first step after an event: every inserted leaf moves, donation works, and a depth compiles once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled_states import filled_state

from depthgrow_jax.growth import GrowthConfig, grow
from depthgrow_jax.growth.source import lidas
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.train.config import OPTIMIZERS, OptimizerConfig, TrainConfig
from depthgrow_jax.train.objective import SpecialTokens
from depthgrow_jax.train.optimizer import make_optimizer
from depthgrow_jax.train.step import StepConfig, make_train_step

# Every kind of leaf a layer can have.
MODEL = ModelConfig(
    vocab_size=64,
    width=32,
    heads=4,
    kv_heads=2,
    mlp_dim=48,
    norm="layer",
    norm_placement="sandwich",
    attention_bias=True,
    mlp_bias=True,
    residual_scaling="learned",
    residual_init=0.5,
)
EVENT = lidas(4, 2)
KEY = jax.random.key(3)
TOKENS = jnp.asarray(np.random.default_rng(8).integers(0, 64, (4, 17)))


def step_of(optimizer, model=MODEL):
    """The transformation and the jitted, donating step."""
    cfg = OptimizerConfig(name=optimizer, learning_rate=1e-2, schedule="constant")
    tx = make_optimizer(cfg)
    train = TrainConfig(batch_size=4, sequence_length=16, steps=100, ema_decay=0.9)
    whole = StepConfig(model, GrowthConfig(), train, cfg, SpecialTokens(64, 0, 1), (), 0)
    return tx, jax.jit(make_train_step(whole, tx), donate_argnums=0)


def fresh_state(model, tx, depth):
    """Parameters of moderate size, all different, and an optimizer that has seen nothing."""
    state = filled_state(model, tx, depth, ema=True)
    params = jax.tree.map(lambda p: 0.2 * p + 0.1, state.params)
    return state.replace(params=params, opt_state=tx.init(params))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_inserted_leaf_moves_in_one_donated_step(optimizer):
    tx, step = step_of(optimizer)
    old_layers = np.flatnonzero(~np.array(EVENT.new))
    small = fresh_state(MODEL, tx, 4)
    for mode in ("copy", "zero", "reset"):
        for init in ("copy", "random") if mode == "copy" else ("copy",):
            state = grow(small, EVENT, model=MODEL, tx=tx, key=KEY, init=init, optimizer=mode)
            before = jax.tree.map(np.array, state.params["layers"])
            after, metrics = step(state, TOKENS)
            assert np.isfinite(metrics["loss"]) and after.step == 1
            for (path, old), new in zip(
                jax.tree_util.tree_leaves_with_path(before),
                jax.tree.leaves(after.params["layers"]),
                strict=True,
            ):
                for layer in np.flatnonzero(EVENT.new):
                    assert not np.array_equal(old[layer], new[layer]), (mode, init, path, layer)
                    # A copy equals its source at the event and is untied for ever after. (Biases and
                    # scalars may still move alike: Lion's update is a sign, Adam's first one nearly.)
                    copied = old_layers[EVENT.source[layer]]
                    if init == "copy" and path[-1].key == "kernel":
                        assert np.array_equal(old[layer], old[copied])
                        assert not np.array_equal(new[layer], new[copied]), (mode, path, layer)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params)), "the step donates"
    # The state before the event was not donated and is whole.
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(small))


def test_one_compilation_a_depth():
    """Whatever growth does to a state's types or placement, its first step does not compile twice."""
    model = ModelConfig(vocab_size=64, width=32, heads=4, mlp_dim=48)
    tx, step = step_of("adamw", model)
    state = fresh_state(model, tx, 2)
    for event in (None, lidas(2, 2), lidas(4, 2)):
        state = grow(state, event, model=model, tx=tx, key=KEY) if event else state
        for _ in range(2):
            state, _ = step(state, TOKENS)
    assert state.step == 6 and state.lineage.shape == (3, 6)
    assert step._cache_size() == 3


def test_a_silenced_layer_learns():
    """`identity` blocks the gradient of all but the last maps for one step only."""
    model = dataclasses.replace(MODEL, norm_placement="pre", residual_scaling="none")
    tx, step = step_of("sgd", model)
    state = grow(fresh_state(model, tx, 4), EVENT, model=model, tx=tx, key=KEY, init="identity")
    moved = []
    for _ in range(2):
        before = jax.tree.map(np.array, state.params["layers"])
        state, _ = step(state, TOKENS)
        differs = lambda a, b: bool((np.asarray(a)[3:5] != b[3:5]).any())  # noqa: E731
        moved.append(jax.tree.map(differs, state.params["layers"], before))
    assert moved[0]["attn"]["o"]["kernel"] and moved[0]["mlp"]["down"]["kernel"]
    # (Weight decay moves every kernel: the norms tell.)
    assert not moved[0]["attn_norm"]["scale"] and not moved[0]["mlp_norm"]["scale"]
    for part in ("attn_norm", "mlp_norm"):
        assert moved[1][part]["scale"]
    assert moved[1]["attn"]["v"]["bias"] and moved[1]["mlp"]["up"]["bias"]
