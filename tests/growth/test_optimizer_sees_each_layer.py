"""To the optimizer a stack of layers is a list of layers: no group, mask or statistic sees the stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from filled_states import filled

from depthgrow_jax.model import ModelConfig, abstract_params
from depthgrow_jax.train.config import OPTIMIZERS, OptimizerConfig
from depthgrow_jax.train.optimizer import make_optimizer, per_layer

MODEL = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48)

TRANSFORMS = {
    "adamw": optax.adamw(1.0, weight_decay=0.1),
    "lion": optax.lion(1.0),
    "muon": optax.contrib.muon(1.0),
    "adafactor": optax.adafactor(1.0),
    "momentum under a norm limit of its own": optax.chain(optax.clip_by_global_norm(0.1), optax.trace(0.9)),
}


def path_of(path):
    """`layers/attn/q/kernel` of the dict keys in a path."""
    return "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_per_layer_is_the_optimizer_run_on_every_layer_alone(name):
    """A norm scale is a vector and a kernel a matrix, 128 wide so that adafactor factors it."""
    tx = TRANSFORMS[name]
    shapes = {"kernel": (3, 128, 132), "scale": (3, 128), "residual_scale": (3,)}
    draw = lambda seed: filled({k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}, seed)  # noqa: E731
    params = draw(0)
    together, update = params, jax.jit(per_layer(tx).update)
    alone, update_one = [jax.tree.map(lambda p, i=i: p[i], params) for i in range(3)], jax.jit(tx.update)
    state, states = per_layer(tx).init(together), [tx.init(p) for p in alone]
    for step in range(2):
        # Layers of very different gradients: a shared statistic would show.
        grads = jax.tree.map(
            lambda g: g * jnp.array([0.01, 1.0, 100.0]).reshape(-1, *[1] * (g.ndim - 1)), draw(1 + step)
        )
        moves, state = update(grads, state, together)
        together = optax.apply_updates(together, moves)
        for i in range(3):
            moves, states[i] = update_one(jax.tree.map(lambda g, i=i: g[i], grads), states[i], alone[i])
            alone[i] = optax.apply_updates(alone[i], moves)
    for got, *wanted in zip(*(jax.tree.leaves(t) for t in (together, *alone)), strict=True):
        np.testing.assert_allclose(got, np.stack(wanted), rtol=2e-5, atol=2e-5)
    assert all(leaf.shape[0] == 3 for leaf in jax.tree.leaves(state))


def test_muon_has_the_matrices_of_the_layers_and_nothing_else():
    model = dataclasses.replace(
        MODEL,
        norm="layer",
        attention_bias=True,
        mlp_bias=True,
        tie_embeddings=False,
        residual_scaling="learned",
    )
    params = abstract_params(model, 3)
    state = jax.eval_shape(make_optimizer(OptimizerConfig(name="muon")).init, params)
    groups = {"muon": set(), "adam": set(), "rest": set()}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = path_of(path).split("/")
        if not any(isinstance(key, jax.tree_util.GetAttrKey) and key.name == "mu" for key in path):
            continue
        part, names = names[0], names[1:]
        group = "rest" if part == "rest" else names.pop(0)
        groups[group].add("/".join(names))
        parameter = params
        for name in names:
            parameter = parameter[name]
        assert leaf.shape == parameter.shape
    in_layers = {f"layers/{path_of(p)}" for p, _ in jax.tree_util.tree_leaves_with_path(params["layers"])}
    kernels = {f"layers/attn/{n}/kernel" for n in "qkvo"} | {
        f"layers/mlp/{n}/kernel" for n in ("gate", "up", "down")
    }
    assert groups["muon"] == kernels
    assert groups["adam"] == in_layers - kernels
    assert groups["rest"] == {"embed/table", "head/kernel", "head/norm/scale", "head/norm/bias"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_step_goes_down(name):
    """Parameters change by -rate * direction, so the direction leans on the gradient, in every leaf."""
    params = filled(abstract_params(MODEL, 2))
    grads = filled(params, seed=1)
    tx = make_optimizer(OptimizerConfig(name=name, weight_decay=0.0))
    direction, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    for path, d in jax.tree_util.tree_leaves_with_path(direction):
        g = grads
        for key in path:
            g = g[key.key]
        assert np.sum(np.asarray(d) * np.asarray(g)) > 0, path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "layer", "attention_bias": True, "mlp_bias": True},
        {"norm_placement": "sandwich", "norm": "layer", "tie_embeddings": False},
        {"norm_placement": "post", "residual_scaling": "learned", "mlp": "gelu", "mlp_bias": True},
    ],
)
def test_zero_gradients_shrink_matrices_and_embeddings_only(changes):
    """A stacked norm scale `[L, D]` looks like a matrix; neither it nor biases nor residual scales decay."""
    params = filled(abstract_params(dataclasses.replace(MODEL, **changes), 3))
    tx = make_optimizer(OptimizerConfig(weight_decay=0.1))
    zeros = jax.tree.map(jnp.zeros_like, params)
    direction, _ = jax.jit(tx.update)(zeros, tx.init(params), params)
    names = set()
    for path, d in jax.tree_util.tree_leaves_with_path(direction):
        p = params
        for key in path:
            p = p[key.key]
        decays = path[-1].key in ("kernel", "table")
        np.testing.assert_allclose(d, 0.1 * p if decays else np.zeros(p.shape), rtol=1e-6, err_msg=str(path))
        names.add(path[-1].key)
    assert {"kernel", "table", "scale"} <= names
