"""What a run does on its way: compilations, learning rate, growth, evaluation, stopping and diverging."""

import json
import logging
import re
import shutil

import jax
import numpy as np
import pytest
from toys import EVERYTHING, merged, planned_rate, stop_after, stored, tiny_config, tiny_run

from depthgrow_jax.errors import Diverged, Preempted, UserError
from depthgrow_jax.rundir import read_json, read_metrics
from depthgrow_jax.train.checkpoints import Checkpoints
from depthgrow_jax.train.loop import finished
from depthgrow_jax.train.signals import StopRequest

# Every step logged and kept; depth 1, 2, 3 from steps 0, 4, 8.
WATCHED = merged(
    EVERYTHING, {"train": {"log_every": 1, "eval_every": 0}, "checkpoint": {"every": 1, "keep": 100}}
)


def compiled(caplog, name: str) -> int:
    """Programs of that name that XLA was asked to compile."""
    return sum(bool(re.search(rf"Compiling (jit\()?{name}\b", r.getMessage())) for r in caplog.records)


@pytest.fixture
def watch_compiles(caplog):
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        yield caplog


def test_one_compilation_for_each_depth(tmp_path, watch_compiles):
    """XLA's own log, not the loop's count: three depths, and after a resume the two that are left."""
    run = tiny_run(tmp_path, tiny_config(**WATCHED))
    assert run.train()["compilations"] == run.spec.plan["compilations"] == 3
    assert compiled(watch_compiles, "train_step") == compiled(watch_compiles, "eval_step") == 3
    for step in range(7, 13):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    watch_compiles.clear()
    assert tiny_run(tmp_path, tiny_config(**WATCHED)).train()["compilations"] == 2
    assert compiled(watch_compiles, "train_step") == compiled(watch_compiles, "eval_step") == 2


def test_metrics_follow_the_plan(uninterrupted):
    """Learning rate of every step, across events and their re-warm-ups; stage, depth, tokens and FLOPs."""
    cfg, directory = tiny_config(**WATCHED), uninterrupted(WATCHED)
    lines = [line for line in read_metrics(directory) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    wanted = [planned_rate(cfg.optimizer, 12, step, events=(4, 8), rewarmup=2) for step in range(12)]
    np.testing.assert_allclose([line["learning_rate"] for line in lines], wanted, rtol=1e-5)
    assert [line["depth"] for line in lines] == [1] * 4 + [2] * 4 + [3] * 4
    assert [line["stage"] for line in lines] == [line["depth"] for line in lines]
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 13)]
    plan = tiny_run(directory, cfg).spec.plan
    assert lines[-1]["flops"] == plan["flops"] == sum(stage["flops"] for stage in plan["stages"])
    assert lines[3]["flops"] == plan["stages"][0]["flops"]
    losses = [line["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.5


def test_every_leaf_of_every_layer_moves_right_after_growth(uninterrupted):
    """The optimizer that was built before growth updates the layers that came with it."""
    directory = uninterrupted(WATCHED)
    for boundary, source in ((4, (0, 0)), (8, (0, 0, 1))):
        before = stored(directory, boundary)["layers"]
        after = stored(directory, boundary + 1)["layers"]
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
        ):
            for layer, ancestor in enumerate(source):
                assert (new[layer] != old[ancestor]).any(), (jax.tree_util.keystr(path), layer)


def test_optimizer_counts_go_on_through_growth(uninterrupted):
    """`copy`: Adam's count is the number of steps, for layers of every age and for the rest."""
    opt_state = stored(uninterrupted(WATCHED), 12, "training")["opt_state"]
    counts = {
        jax.tree_util.keystr(path): leaf.tolist()
        for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
        if path[-1].key == "count"
    }
    assert sorted(counts.values(), key=str) == [12, [12, 12, 12]]


def test_checkpoints_say_what_they_hold(uninterrupted):
    """A boundary's checkpoint is the state before growth; the lineage is saved with every one."""
    checkpoints = Checkpoints(uninterrupted(WATCHED) / "checkpoints", writable=False)
    assert checkpoints.steps() == list(range(1, 13))
    boundary, after, end = (checkpoints.meta(step) for step in (4, 5, 12))
    assert (boundary["depth"], boundary["stage"]) == (1, 0) and (after["depth"], after["stage"]) == (2, 1)
    assert after["lineage"] == [[0, 0], [0, 1]] and after["born"] == [-1, 4]
    assert end["lineage"] == [[0, 0, 0], [0, 0, 1], [0, 1, 2]] and end["born"] == [-1, 8, 4]
    assert stored(uninterrupted(WATCHED), 4)["layers"]["attn_norm"]["scale"].shape[0] == 1


def test_validation_is_logged_when_due_and_at_the_end(uninterrupted):
    directory = uninterrupted(EVERYTHING)
    lines = [line for line in read_metrics(directory) if "val_loss" in line]
    assert [line["step"] for line in lines] == [6, 12]
    for line in lines:
        assert line["val_loss_low"] < line["val_loss"] < line["val_loss_high"]
        assert line["val_sequences"] == 2 * 8  # two batches, whatever the accumulation
    done = finished(directory)
    assert done["val_loss"] == lines[-1]["val_loss"]
    assert done["steps"] == 12 and done["depth"] == 3 and done["tokens"] == 12 * 64


def test_a_window_is_the_mean_of_its_steps(uninterrupted):
    """`log_every=3` gives the means of the lines of `log_every=1`."""
    each = {line["step"]: line for line in read_metrics(uninterrupted(WATCHED)) if "loss" in line}
    changes = merged(WATCHED, {"train": {"log_every": 5}})
    lines = [line for line in read_metrics(uninterrupted(changes)) if "loss" in line]
    assert [line["step"] for line in lines] == [5, 10, 12]
    for first, line in zip((1, 6, 11), lines, strict=True):
        for name in ("loss", "grad_norm"):
            wanted = np.mean([each[step][name] for step in range(first, line["step"] + 1)])
            assert line[name] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("every", [0, 1])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, every):
    """Step and last good checkpoint are named, nothing is saved after it."""
    cfg = tiny_config(
        depth=1,
        growth={"operator": "none"},
        optimizer={"name": "sgd", "learning_rate": 1e30, "clip_norm": 0.0, "warmup_steps": 0},
        checkpoint={"every": every},
        train={"log_every": 1},
    )
    with pytest.raises(Diverged) as error:
        tiny_run(tmp_path / "run", cfg).train()
    step = int(re.search(r"(?:loss|grad_norm) is (?:nan|inf) at step (\d+); last good", str(error.value))[1])
    kept = Checkpoints(tmp_path / "run" / "checkpoints", writable=False).steps()
    assert kept == ([step - 1] if every else [])
    good = str(tmp_path / "run" / "checkpoints" / str(step - 1)) if every else "none"
    assert str(error.value).endswith(f"last good checkpoint: {good}")
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, step))
    assert finished(tmp_path / "run") is None


def test_asked_during_the_last_step_the_run_finishes_and_what_follows_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(StopRequest, "asked", stop_after(12))
    with pytest.raises(Preempted, match="finished, then stopped as asked"):
        tiny_run(tmp_path / "run", tiny_config(**EVERYTHING)).train()
    assert finished(tmp_path / "run")["steps"] == 12


def test_data_that_changed_is_refused(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted(EVERYTHING), directory)
    run = tiny_run(directory, tiny_config(**EVERYTHING))
    run.batches.data_hash = "other"
    with pytest.raises(UserError, match=r"trained on other data \(hash toy, now other\)"):
        run.train()


def test_a_checkpoint_of_another_plan_is_refused(uninterrupted, tmp_path):
    """Both depths are named; nothing on disk is lost."""
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted(EVERYTHING), directory)
    cfg = tiny_config(**merged(EVERYTHING, {"depth": 2, "growth": {"boundaries": (4,)}}))
    with pytest.raises(UserError, match=r"has depth 3 in stage 3; the depths of this plan are \[1, 2\]"):
        tiny_run(directory, cfg).train()
    assert Checkpoints(directory / "checkpoints", writable=False).latest() == 12


def test_done_holds_json(uninterrupted):
    done = read_json(uninterrupted(EVERYTHING) / "DONE")
    assert json.loads(json.dumps(done)) == done
    assert set(done["seconds"]) == {"compile", "step", "evaluate", "save", "grow"}
