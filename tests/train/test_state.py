"""The train state: no buffer under two names, and shapes known before anything is allocated."""

import jax
import numpy as np
import pytest
from toys import assert_same_arrays, fresh_state, tiny_config

from depthgrow_jax.train import state as states
from depthgrow_jax.train.config import OPTIMIZERS
from depthgrow_jax.train.optimizer import make_optimizer

CFG = tiny_config()
TX = make_optimizer(CFG.optimizer)


def test_the_average_is_a_copy():
    """A step that donates its state would otherwise meet one buffer twice."""
    state = states.from_params(fresh_state(CFG, TX, 2).params, TX, ema=True)
    assert_same_arrays(jax.tree.map(np.asarray, state.ema), jax.tree.map(np.asarray, state.params))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.params, state.ema))]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_abstract_state_is_what_is_made(name):
    tx = make_optimizer(tiny_config(optimizer={"name": name}).optimizer)
    state, abstract = fresh_state(CFG, tx, 3, ema=True), states.abstract_state(CFG.model, tx, 3, ema=True)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
    grown = states.abstract_state(CFG.model, tx, 3, ema=True, stages=4)
    assert grown.lineage.shape == (4, 3)


@pytest.mark.parametrize("ema", [True, False])
def test_items_hold_everything(ema):
    state = fresh_state(CFG, TX, 2, ema=ema)
    items = states.to_items(state)
    assert set(items) == {"params", "training"} | ({"ema"} if ema else set())
    assert_same_arrays(states.from_items(items), state)
