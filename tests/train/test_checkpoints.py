"""Checkpoints are exact or refused: depth, dtype, containers, and what was meant when they were saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import assert_same_arrays, fresh_state, tiny_config

from depthgrow_jax.errors import UserError
from depthgrow_jax.train import state as states
from depthgrow_jax.train.checkpoints import FORMAT, Checkpoints
from depthgrow_jax.train.optimizer import make_optimizer

CFG = tiny_config()
TX = make_optimizer(CFG.optimizer)
META = {"format": FORMAT, "depth": 3, "window": {"loss": 1.5}}


def items_at(depth: int, ema: bool = False):
    return states.to_items(fresh_state(CFG, TX, depth, ema=ema))


def abstract_at(depth: int, ema: bool = False):
    return states.to_items(states.abstract_state(CFG.model, TX, depth, ema=ema))


@pytest.fixture
def saved(tmp_path):
    """Checkpoints that hold step 5 of a three-layer state, with an average."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(5, items_at(3, ema=True), META)
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


def test_round_trip(saved):
    """Arrays to the bit; the optimizer's state in the containers of a fresh one."""
    items = items_at(3, ema=True)
    restored = saved.restore(5, abstract_at(3, ema=True))
    assert_same_arrays(restored, items)
    fresh = TX.init(items["params"])
    assert jax.tree.structure(restored["training"]["opt_state"]) == jax.tree.structure(fresh)
    assert saved.meta(5) == META and saved.latest() == 5 and saved.steps() == [5]


def test_parameters_can_be_read_alone(saved):
    restored = saved.restore(5, {"params": abstract_at(3)["params"]})
    assert_same_arrays(restored, {"params": items_at(3)["params"]})


@pytest.mark.parametrize("depth", [2, 4])
def test_another_depth_is_refused(saved, depth):
    with pytest.raises(UserError, match="damaged, or not the state of this config"):
        saved.restore(5, abstract_at(depth, ema=True))


def test_another_dtype_is_refused(saved):
    half = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), abstract_at(3)["params"])
    with pytest.raises(UserError, match=r"float32.*bfloat16"):
        saved.restore(5, {"params": half})


def test_another_optimizer_is_refused(saved):
    lion = make_optimizer(tiny_config(optimizer={"name": "lion"}).optimizer)
    other = states.to_items(states.abstract_state(CFG.model, lion, 3, ema=True))
    with pytest.raises(UserError, match="damaged, or not the state of this config"):
        saved.restore(5, other)


def test_a_missing_item_is_refused(tmp_path):
    with_one = Checkpoints(tmp_path / "checkpoints")
    with_one.save(1, items_at(3), META)
    with_one.wait()
    with pytest.raises(UserError, match="damaged, or not the state of this config"):
        with_one.restore(1, abstract_at(3, ema=True))
    with_one.close()


def test_saving_a_step_twice_is_an_error_not_a_silence(saved):
    with pytest.raises(RuntimeError, match="step 5 was not saved; latest is 5"):
        saved.save(5, items_at(2), META)
    assert_same_arrays(saved.restore(5, abstract_at(3, ema=True)), items_at(3, ema=True))


def test_a_refused_save_is_an_error(saved, monkeypatch):
    monkeypatch.setattr(saved._manager, "save", lambda *args, **kwargs: False)
    with pytest.raises(RuntimeError, match="step 6 was not saved; latest is 5"):
        saved.save(6, items_at(3), META)


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path):
    """The write goes on in the background while the run's sums and its donated buffers change."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=100)
    bump = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    items, window = items_at(3), {"loss": 0.0}
    expected = jax.tree.map(np.array, items)
    for step in range(1, 6):
        checkpoints.save(step, items, {"format": FORMAT, "window": window})
        window["loss"] += 1.0
        items = bump(items)
    checkpoints.wait()
    for step in range(1, 6):
        assert checkpoints.meta(step)["window"] == {"loss": step - 1.0}
        assert_same_arrays(checkpoints.restore(step, abstract_at(3)), expected)
        expected = jax.tree.map(lambda leaf: leaf + np.ones((), leaf.dtype), expected)
    checkpoints.close()


def test_keeps_the_newest_and_the_named(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, keep_steps=(2,))
    for step in range(1, 7):
        checkpoints.save(step, {"params": {"a": jnp.ones(2)}}, META)
    checkpoints.close()
    assert Checkpoints(tmp_path / "checkpoints", writable=False).steps() == [2, 5, 6]


def test_leftovers_of_a_killed_save_are_ignored_and_removed(saved, tmp_path):
    torn = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
    (torn / "params").mkdir(parents=True)
    looking = Checkpoints(tmp_path / "checkpoints", writable=False)
    assert looking.latest() == 5 and torn.exists()
    again = Checkpoints(tmp_path / "checkpoints")
    assert again.latest() == 5
    again.save(9, items_at(3), META)
    again.close()
    assert not torn.exists() and Checkpoints(tmp_path / "checkpoints", writable=False).latest() == 9


def test_unreadable_meta_names_the_step(saved, tmp_path):
    for path in (tmp_path / "checkpoints" / "5" / "meta").iterdir():
        path.write_text("{")
    with pytest.raises(UserError, match=r"checkpoints/5: damaged"):
        saved.meta(5)


def test_damaged_arrays_are_refused_in_one_line(saved):
    """Orbax raises a bare Exception there; the line names the checkpoint and what is left."""
    files = [p for p in (saved.directory / "5" / "params").rglob("d/*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(UserError, match=r"checkpoints/5: damaged, .*besides it: none") as caught:
        saved.restore(5, abstract_at(3, ema=True))
    assert "\n" not in str(caught.value)
