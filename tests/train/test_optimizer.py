"""Every layer is its own block to the optimizer: decay by name, no statistics shared over the stack."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import tiny_config

from depthgrow_jax.model import init
from depthgrow_jax.train.config import OPTIMIZERS, OptimizerConfig
from depthgrow_jax.train.optimizer import decay_mask, make_optimizer


def params_of(depth: int, seed: int = 0):
    cfg = tiny_config(model={"norm": "layer", "attention_bias": True, "mlp_bias": True, "kv_heads": 1})
    return jax.jit(lambda key: init(cfg.model, key, depth))(jax.random.key(seed))


def one_update(tx, params, grads):
    return jax.jit(lambda p, g: tx.update(g, tx.init(p), p)[0])(params, grads)


def named(tree) -> dict[str, jax.Array]:
    return {
        "/".join(str(key.key) for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_decay_shrinks_matrices_and_embeddings_only():
    """One step of zero gradients: norms and biases, stacked `[L, D]`, stay to the bit."""
    params = params_of(3)
    tx = make_optimizer(OptimizerConfig(weight_decay=0.1))
    update = one_update(tx, params, jax.tree.map(jnp.zeros_like, params))
    shrunk = {name for name, leaf in named(update).items() if np.asarray(leaf).any()}
    layer = {"attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down"}
    assert shrunk == {f"layers/{name}/kernel" for name in layer} | {"embed/table"}
    decayed = named(params)["layers/mlp/up/kernel"]
    np.testing.assert_allclose(named(update)["layers/mlp/up/kernel"], 0.1 * decayed, rtol=1e-6)
    assert set(named(decay_mask(params))) == set(named(params))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_stacked_layer_moves_as_a_layer_alone(name):
    """Layer 1 of a stack of 3 gets the update that it gets as a stack of its own."""
    params, grads = params_of(3), params_of(3, seed=1)
    tx = make_optimizer(OptimizerConfig(name=name, clip_norm=0.0, b1=0.9))

    @jax.jit
    def updates(p, g):
        state = tx.init(p)
        for _ in range(2):
            update, state = tx.update(g, state, p)
        return update["layers"]

    one = lambda tree: tree | {"layers": jax.tree.map(lambda leaf: leaf[1:2], tree["layers"])}  # noqa: E731
    together, alone = updates(params, grads), updates(one(params), one(grads))
    for stacked, single in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(stacked[1:2], single, rtol=1e-4, atol=1e-6)


def test_muon_orthogonalises_matrices_and_gives_the_rest_to_adam():
    """The singular values of a layer matrix's update are alike; embedding, norms and biases follow Adam.

    (Within the layers it is Adam with Nesterov momentum, the default of `optax.contrib.muon`.)
    """
    params, grads = params_of(2), params_of(2, seed=1)
    tx = make_optimizer(OptimizerConfig(name="muon", weight_decay=0.0, clip_norm=0.0, b1=0.9))
    moves = named(one_update(tx, params, grads))
    adam = optax.scale_by_adam(0.9, 0.95, 1e-8), optax.scale_by_adam(0.9, 0.95, 1e-8, nesterov=True)
    plain, nesterov = (named(a.update(grads, a.init(params))[0]) for a in adam)
    for name, move in moves.items():
        if name.startswith("layers/") and name.endswith("kernel"):
            values = np.linalg.svd(np.asarray(move[0]), compute_uv=False)
            assert values.min() > 0.5 * values.max(), name
        else:
            wanted = (nesterov if name.startswith("layers/") else plain)[name]
            np.testing.assert_allclose(move, wanted, rtol=1e-4, atol=1e-6, err_msg=name)


def test_adamw_equals_its_formula():
    """Two steps of the published recursion, with decoupled decay, in float64."""
    params, cfg = params_of(2), OptimizerConfig(b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.01, clip_norm=0.0)
    grads = [params_of(2, seed=1), params_of(2, seed=2)]
    tx = make_optimizer(cfg)
    state = tx.init(params)
    for g in grads:
        update, state = tx.update(g, state, params)
    name = "layers/mlp/up/kernel"
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        g = np.asarray(named(g)[name], np.float64)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        wanted = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6) + 0.01 * np.asarray(
            named(params)[name]
        )
    np.testing.assert_allclose(named(update)[name], wanted, rtol=1e-4, atol=1e-5)


def test_clipping_bounds_the_global_norm():
    params, grads = params_of(2), params_of(2, seed=1)
    cfg = OptimizerConfig(name="sgd", b1=0.0, weight_decay=0.0, clip_norm=0.25)
    tx = make_optimizer(cfg)
    update = one_update(tx, params, grads)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(update)))
    assert norm == pytest.approx(0.25, rel=1e-5)
