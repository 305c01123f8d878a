"""Growth of every optimizer's state: each leaf is its layer's source's, bit for bit, or as the mode says.

Which leaves have a layer axis is not asked of the code under test: they are those whose shape changes when
`tx.init` sees one layer more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from filled_states import filled_state

from depthgrow_jax.growth import SourceMap, grow
from depthgrow_jax.growth.source import lidas, stack
from depthgrow_jax.model import ModelConfig, abstract_params
from depthgrow_jax.train.config import OPTIMIZERS, OptimizerConfig
from depthgrow_jax.train.optimizer import decay_mask, make_optimizer

# Wide enough for adafactor to factor its moments (128).
MODEL = ModelConfig(vocab_size=130, width=128, heads=2, mlp_dim=130)
KEY = jax.random.key(5)

OFFERED = {name: make_optimizer(OptimizerConfig(name=name)) for name in OPTIMIZERS}
GENERIC = {
    "optax.adamw": optax.adamw(1e-3),
    "clip, masked adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=decay_mask)),
    "accumulation": optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4).gradient_transformation(),
    "ema of the updates": optax.chain(optax.ema(0.9), optax.sgd(1e-2, momentum=0.9)),
    "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "skips bad steps": optax.apply_if_finite(optax.lion(1e-3), 5),
}
ALL = OFFERED | GENERIC


@functools.cache
def fresh_shapes(tx, depth):
    """What `tx.init` makes for a network of `depth` layers."""
    return jax.eval_shape(tx.init, abstract_params(MODEL, depth))


def expected_leaves(tx, depth, event):
    """For each leaf of the optimizer state: path, whether it has a layer axis, fresh shape and dtype."""
    small, more, grown = (fresh_shapes(tx, d) for d in (depth, depth + 1, event.depth))
    for (path, leaf), other, fresh in zip(
        jax.tree_util.tree_leaves_with_path(small), jax.tree.leaves(more), jax.tree.leaves(grown), strict=True
    ):
        yield jax.tree_util.keystr(path), leaf.shape != other.shape, fresh


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("event", [lidas(4, 2), stack(1, 4)], ids=["4->6", "1->4"])
def test_copies_inherit_the_state_of_their_source(name, event):
    tx, depth = ALL[name], max(event.source) + 1
    state = filled_state(MODEL, tx, depth)
    grown = grow(state, event, model=MODEL, tx=tx, key=KEY)
    assert jax.tree.structure(grown.opt_state) == jax.tree.structure(tx.init(grown.params))
    stacked = 0
    for (path, has_layers, fresh), old, new in zip(
        expected_leaves(tx, depth, event),
        jax.tree.leaves(state.opt_state),
        jax.tree.leaves(grown.opt_state),
        strict=True,
    ):
        assert (new.shape, new.dtype) == (fresh.shape, fresh.dtype), path
        wanted = np.asarray(old)[list(event.source)] if has_layers else old
        np.testing.assert_array_equal(new, wanted, err_msg=path)
        stacked += has_layers
    assert stacked >= 9  # at least one leaf for each parameter of a layer


@pytest.mark.parametrize("name", ALL)
def test_zero_gives_inserted_layers_the_state_of_a_fresh_optimizer_and_keeps_the_rest(name):
    tx, event = ALL[name], lidas(4, 2)
    state = filled_state(MODEL, tx, 4)
    grown = grow(state, event, model=MODEL, tx=tx, key=KEY, optimizer="zero")
    new_layers = np.asarray(event.new)
    assert event.source == (0, 1, 2, 1, 2, 3) and new_layers.tolist() == [False] * 3 + [True] * 2 + [False]
    for (path, has_layers, _), old, new, fresh in zip(
        expected_leaves(tx, 4, event),
        *(jax.tree.leaves(tree) for tree in (state.opt_state, grown.opt_state, tx.init(grown.params))),
        strict=True,
    ):
        if not has_layers:
            np.testing.assert_array_equal(new, old, err_msg=path)
            continue
        np.testing.assert_array_equal(np.asarray(new)[~new_layers], old, err_msg=path)
        np.testing.assert_array_equal(new[3:5], fresh[3:5], err_msg=path)
        # Muon keeps the coefficients of its iteration in the state: zeroed, it would never move a layer.
        assert "ns_coeffs" in path or (np.asarray(new[3:5]) == 0).all(), path


@pytest.mark.parametrize("name", ALL)
def test_reset_is_a_fresh_optimizer(name):
    tx = ALL[name]
    grown = grow(filled_state(MODEL, tx, 4), lidas(4, 2), model=MODEL, tx=tx, key=KEY, optimizer="reset")
    jax.tree.map(np.testing.assert_array_equal, grown.opt_state, tx.init(grown.params))


@pytest.mark.parametrize("name", ALL)
def test_a_reorder_of_the_same_length_moves_the_moments_too(name):
    """Deciding by a change of shape what has a layer axis would leave the moments behind."""
    tx, event = ALL[name], SourceMap((3, 2, 1, 0), (False,) * 4)
    state = filled_state(MODEL, tx, 4)
    moved = grow(state, event, model=MODEL, tx=tx, key=KEY)
    for (path, has_layers, _), old, new in zip(
        expected_leaves(tx, 4, event),
        jax.tree.leaves(state.opt_state),
        jax.tree.leaves(moved.opt_state),
        strict=True,
    ):
        np.testing.assert_array_equal(new, np.asarray(old)[::-1] if has_layers else old, err_msg=path)


def counts(opt_state):
    """Every step counter of an optimizer state by path, as lists."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [np.asarray(leaf).tolist() for path, leaf in leaves if "count" in jax.tree_util.keystr(path)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("copy", [[7] * 6, 7]), ("zero", [[7, 7, 7, 0, 0, 7], 7]), ("reset", [[0] * 6, 0])],
)
def test_adams_count_is_kept_for_each_layer(mode, expected):
    """A bias correction that starts anew goes with moments that start anew, layer by layer."""
    tx, event = OFFERED["adamw"], lidas(4, 2)
    state = filled_state(MODEL, tx, 4)
    seven = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, 7) if leaf.dtype == jnp.int32 else leaf, state.opt_state
    )
    assert counts(seven) == [[7] * 4, 7]
    grown = grow(state.replace(opt_state=seven), event, model=MODEL, tx=tx, key=KEY, optimizer=mode)
    assert counts(grown.opt_state) == expected
    assert grown.step == state.step
