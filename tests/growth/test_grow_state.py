"""A grown state: every leaf where the source map says, its lineage recorded, no buffer shared."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from filled_states import filled_state

from depthgrow_jax.growth import SourceMap, grow
from depthgrow_jax.growth.source import explicit, lidas, midas
from depthgrow_jax.model import ModelConfig, init_layers
from depthgrow_jax.train.config import OptimizerConfig
from depthgrow_jax.train.optimizer import make_optimizer

MODEL = ModelConfig(vocab_size=64, width=32, heads=4, kv_heads=2, mlp_dim=48, tie_embeddings=False)
TX = make_optimizer(OptimizerConfig())
KEY = jax.random.key(11)


def at_step(state, step):
    return state.replace(step=jnp.asarray(step, jnp.int32))


def assert_trees_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope="module")
def depth_4():
    return filled_state(MODEL, TX, 4, step=9, ema=True)


def test_layers_follow_the_source_and_the_rest_carries_over(depth_4):
    event = lidas(4, 2)
    assert event.source == (0, 1, 2, 1, 2, 3)
    grown = grow(depth_4, event, model=MODEL, tx=TX, key=KEY)
    for name in ("params", "ema"):
        old, new = getattr(depth_4, name), getattr(grown, name)
        assert_trees_equal(
            new["layers"], jax.tree.map(lambda p: np.asarray(p)[list(event.source)], old["layers"])
        )
        assert_trees_equal(new["embed"], old["embed"])
        assert_trees_equal(new["head"], old["head"])
    assert grown.step == 9
    plain = grow(depth_4.replace(ema=None), event, model=MODEL, tx=TX, key=KEY)
    assert plain.ema is None


def test_lineage_and_birth_after_two_events_by_hand():
    """2 -> 4 by (0 1 | 0 1) after step 5, 4 -> 6 by (0 1 2 | 1 2 | 3) after step 9."""
    state = filled_state(MODEL, TX, 2, step=5)
    np.testing.assert_array_equal(state.lineage, [[0, 1]])
    np.testing.assert_array_equal(state.born, [-1, -1])
    state = at_step(grow(state, lidas(2, 2), model=MODEL, tx=TX, key=KEY), 9)
    np.testing.assert_array_equal(state.lineage, [[0, 1, 0, 1], [0, 1, 2, 3]])
    np.testing.assert_array_equal(state.born, [-1, -1, 5, 5])
    state = grow(state, lidas(4, 2), model=MODEL, tx=TX, key=KEY)
    np.testing.assert_array_equal(state.lineage, [[0, 1, 0, 1, 0, 1], [0, 1, 2, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(state.born, [-1, -1, 5, 9, 9, 5])
    assert state.lineage.dtype == state.born.dtype == state.step.dtype == jnp.int32


def test_random_layers_are_fresh_draws_and_only_the_inserted_ones(depth_4):
    event = midas(4, 2)
    assert event.source == (0, 1, 0, 1, 2, 3)
    grown = grow(depth_4, event, model=MODEL, tx=TX, key=KEY, init="random")
    fresh = init_layers(MODEL, KEY, 6)
    for old, new, drawn in zip(
        *(jax.tree.leaves(t) for t in (depth_4.params["layers"], grown.params["layers"], fresh)), strict=True
    ):
        np.testing.assert_array_equal(new[np.array([0, 1, 4, 5])], old)
        np.testing.assert_array_equal(new[2:4], drawn[2:4])
    kernel = np.asarray(grown.params["layers"]["mlp"]["up"]["kernel"])
    assert all(np.abs(kernel[i] - kernel[j]).max() > 0.01 for i in range(6) for j in range(i))
    # The average of a fresh layer starts at that layer.
    assert_trees_equal(
        jax.tree.map(lambda p: p[2:4], grown.ema["layers"]),
        jax.tree.map(lambda p: p[2:4], grown.params["layers"]),
    )


def buffers(state):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("init", ["copy", "identity", "random"])
@pytest.mark.parametrize("optimizer", ["copy", "zero", "reset"])
def test_no_buffer_is_shared(depth_4, init, optimizer):
    """A donated step after growth meets no buffer twice, and the old state survives it."""
    grown = grow(depth_4, lidas(4, 2), model=MODEL, tx=TX, key=KEY, init=init, optimizer=optimizer)
    new = buffers(grown)
    assert len(set(new)) == len(new)
    assert not set(new) & set(buffers(depth_4))


def test_a_source_map_of_another_depth_is_refused(depth_4):
    with pytest.raises(ValueError, match="names a layer that a depth-4 stack lacks"):
        grow(depth_4, lidas(6, 2), model=MODEL, tx=TX, key=KEY)
    with pytest.raises(ValueError, match="names a layer that a depth-4 stack lacks"):
        grow(depth_4, SourceMap((0, -1), (False, False)), model=MODEL, tx=TX, key=KEY)


@pytest.mark.parametrize(("stale_depth", "depth", "event"), [(1, 2, (0, 1, 0, 1)), (2, 3, (0, 1, 2, 2, 2))])
def test_an_optimizer_state_of_another_depth_is_refused(stale_depth, depth, event):
    """Depth 1 is the treacherous one: its moments would broadcast in silence."""
    for tx in (TX, optax.adamw(1e-3)):
        stale = filled_state(MODEL, tx, stale_depth).opt_state
        state = filled_state(MODEL, tx, depth).replace(opt_state=stale)
        with pytest.raises(ValueError, match=r"optimizer state: .*\['layers'\].* a fresh one is"):
            grow(state, explicit(event), model=MODEL, tx=tx, key=KEY)
        # One that was grown too early would have the right shapes afterwards.
        early = filled_state(MODEL, tx, len(event)).opt_state
        with pytest.raises(ValueError, match=r"optimizer state: .*\['layers'\].* a fresh one is"):
            grow(state.replace(opt_state=early), explicit(event), model=MODEL, tx=tx, key=KEY)


def test_an_optimizer_state_of_another_optimizer_is_refused(depth_4):
    other = make_optimizer(dataclasses.replace(OptimizerConfig(), name="lion"))
    with pytest.raises(ValueError, match="optimizer state"):
        grow(depth_4, lidas(4, 2), model=MODEL, tx=other, key=KEY)
