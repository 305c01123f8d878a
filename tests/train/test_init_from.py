"""Starting from another run: own checkpoint first, then `init_from`, then scratch; depth is never guessed."""

import shutil

import jax
import numpy as np
import pytest
from toys import EVERYTHING, assert_same_arrays, stored, tiny_config, tiny_run

from depthgrow_jax.config import config_hash
from depthgrow_jax.errors import UserError
from depthgrow_jax.model import init
from depthgrow_jax.train.checkpoints import Checkpoints
from depthgrow_jax.train.start import first_state, from_other_run


def follower(tmp_path, directory, what="params", step=0, **changes):
    """A run of three layers from the start that takes up another's state."""
    source = {"path": str(directory), "what": what, "step": step}
    base = {**EVERYTHING, "growth": {"operator": "none"}, "init_from": source}
    return tiny_run(tmp_path / "follower", tiny_config(**(base | changes)))


def test_parameters_only(uninterrupted, tmp_path):
    state = from_other_run(follower(tmp_path, uninterrupted(EVERYTHING)).setup)
    params = stored(uninterrupted(EVERYTHING), 12)
    assert_same_arrays(jax.tree.map(np.asarray, state.params), params)
    assert_same_arrays(jax.tree.map(np.asarray, state.ema), params)  # the average starts there too
    assert int(state.step) == 0 and state.lineage.tolist() == [[0, 1, 2]]
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.opt_state))


def test_everything(uninterrupted, tmp_path):
    """Moments, average and lineage too; the schedule and the data start at step 0."""
    state = from_other_run(follower(tmp_path, uninterrupted(EVERYTHING), what="all").setup)
    training = stored(uninterrupted(EVERYTHING), 12, "training")
    assert_same_arrays(jax.tree.map(np.asarray, state.params), stored(uninterrupted(EVERYTHING), 12))
    assert_same_arrays(jax.tree.map(np.asarray, state.ema), stored(uninterrupted(EVERYTHING), 12, "ema"))
    for found, wanted in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(training["opt_state"]), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
    assert int(state.step) == 0 and state.lineage.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]
    assert state.born.tolist() == [-1, -1, -1]


def test_a_named_step(uninterrupted, tmp_path):
    run = follower(tmp_path, uninterrupted(EVERYTHING), step=4, depth=1)
    assert_same_arrays(
        jax.tree.map(np.asarray, from_other_run(run.setup).params), stored(uninterrupted(EVERYTHING), 4)
    )


def test_another_depth_is_refused_before_anything_is_written(uninterrupted, tmp_path):
    with pytest.raises(UserError, match=r"step 8 has depth 2, this run starts at depth 3.*start_depth=2"):
        follower(tmp_path, uninterrupted(EVERYTHING), step=8)
    assert list((tmp_path / "follower").iterdir()) == []


@pytest.mark.parametrize(
    ("path", "step", "message"),
    [("nowhere", 0, r"init_from.path='.*nowhere': no run with checkpoints"), ("", 5, r"legal: \[4, 8, 12\]")],
)
def test_what_is_not_there_is_named(uninterrupted, tmp_path, path, step, message):
    with pytest.raises(UserError, match=message):
        follower(tmp_path, uninterrupted(EVERYTHING) / path, step=step)


def test_a_run_without_checkpoints_is_named(tmp_path):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="no complete checkpoint"):
        follower(tmp_path, tmp_path / "empty")


def test_own_checkpoint_comes_first(uninterrupted, tmp_path):
    """Even where the other run is gone by now."""
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted(EVERYTHING), directory)
    (directory / "DONE").unlink()
    run = tiny_run(directory, tiny_config(**EVERYTHING, init_from={"path": str(tmp_path / "gone")}))
    same = run.spec._replace(config_hash=config_hash(tiny_config(**EVERYTHING)))  # as if it had begun there
    run.setup = run.setup._replace(spec=same)
    assert run.train()["steps"] == 12 and run.compilations == 0


def test_scratch_comes_last(tmp_path):
    run = tiny_run(tmp_path / "run", tiny_config(growth={"operator": "none"}))
    state, meta = first_state(run.setup, Checkpoints(tmp_path / "none"), "")
    assert meta["step"] == 0
    for found, wanted in zip(
        jax.tree.leaves(state.params),
        jax.tree.leaves(init(run.spec.model, jax.random.key(0), 3)),
        strict=True,
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_another_architecture_is_refused(uninterrupted, tmp_path):
    """Equal shapes, another function: four heads of 4 for two of 8."""
    heads = tiny_config(**EVERYTHING).model.heads * 2
    with pytest.raises(UserError, match=rf"architecture \(.*model.heads there {heads // 2}, here {heads}"):
        follower(tmp_path, uninterrupted(EVERYTHING), model={"heads": heads})


def test_defaults_written_out_are_the_same_network(uninterrupted, tmp_path):
    """`kv_heads=0` means as many as there are heads: what an exported config says outright."""
    model = tiny_config(**EVERYTHING).model
    fields = {"kv_heads": model.num_kv_heads, "head_dim": model.head_width}
    assert (model.kv_heads, model.head_dim) == (0, 0)
    run = follower(tmp_path, uninterrupted(EVERYTHING), model=fields)
    params = jax.tree.map(np.asarray, from_other_run(run.setup).params)
    assert_same_arrays(params, stored(uninterrupted(EVERYTHING), 12))
