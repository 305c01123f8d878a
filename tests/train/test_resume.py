"""A stopped and resumed run is the uninterrupted run: every metric and every stored array, to the bit."""

import shutil

import pytest
from toys import (
    EVERYTHING,
    assert_same_run,
    in_fresh_process,
    lines_of,
    stop_after,
    tiny_config,
    tiny_run,
)

from depthgrow_jax.errors import Preempted
from depthgrow_jax.train.loop import finished
from depthgrow_jax.train.signals import StopRequest

CAUSAL = EVERYTHING
# One event after 4 of 8 steps; random draws in every step, and fresh layers.
MASKED = {
    "depth": 2,
    "model": {"causal": False},
    "growth": {"boundaries": (4,), "init": "random", "optimizer": "zero"},
    "train": {"objective": "masked", "mask_rate": 0.4, "steps": 8},
}
CASES = {"causal": (CAUSAL, (3, 4, 5, 7, 8, 9), 12), "masked": (MASKED, (3, 4, 5), 8)}


@pytest.mark.parametrize("case", CASES)
def test_stops_around_every_growth_event(case, uninterrupted, tmp_path, monkeypatch):
    """One run, stopped by SIGTERM before, at and after every event, goes on each time in another process."""
    changes, stops, last = CASES[case]
    directory = tmp_path / "run"
    monkeypatch.setattr(StopRequest, "asked", stop_after(stops[0]))
    with pytest.raises(Preempted, match=f"stopped after step {stops[0]}, saved"):
        tiny_run(directory, tiny_config(**changes)).train()
    jobs = [{"directory": str(directory), "changes": changes, "stop": stop} for stop in (*stops[1:], None)]
    *halts, end = in_fresh_process(jobs, tmp_path)
    for stop, halt in zip(stops[1:], halts, strict=True):
        assert f"stopped after step {stop}, saved" in halt["stopped"]
    assert_same_run(directory, uninterrupted(changes), last)
    reference = finished(uninterrupted(changes))
    for name in ("train_loss", "val_loss", "val_loss_low", "flops", "params", "depth"):
        assert end[name] == reference[name]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_each_stop_alone_in_processes_of_its_own(case, uninterrupted, tmp_path):
    changes, stops, last = CASES[case]
    for stop in stops:
        job = {"directory": str(tmp_path / f"stop{stop}"), "changes": changes}
        (halt,) = in_fresh_process([{**job, "stop": stop}], tmp_path)
        assert f"stopped after step {stop}, saved" in halt["stopped"]
        in_fresh_process([job], tmp_path)
        assert_same_run(tmp_path / f"stop{stop}", uninterrupted(changes), last)


def test_lost_end_is_trained_again_alike(uninterrupted, tmp_path):
    """Killed after step 12 was logged but with only step 8 on disk: the lines after 8 are written anew."""
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted(CAUSAL), directory)
    shutil.rmtree(directory / "checkpoints" / "12")
    (directory / "DONE").unlink()
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    tiny_run(directory, tiny_config(**CAUSAL)).train()
    assert_same_run(directory, uninterrupted(CAUSAL), 12)


def test_killed_between_the_last_save_and_the_done_mark(uninterrupted, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(uninterrupted(CAUSAL), directory)
    (directory / "DONE").unlink()
    run = tiny_run(directory, tiny_config(**CAUSAL))
    result = run.train()
    assert run.compilations == 0
    reference = finished(uninterrupted(CAUSAL))
    assert result["train_loss"] == reference["train_loss"] and result["val_loss"] == reference["val_loss"]
    assert finished(directory) == result and lines_of(directory) == lines_of(uninterrupted(CAUSAL))


def test_regular_checkpoints_change_nothing(uninterrupted, tmp_path):
    """How often a run saves is free: it may change at a resume, and no number depends on it."""
    directory = tmp_path / "run"
    tiny_run(directory, tiny_config(**CAUSAL, checkpoint={"every": 1, "keep": 1})).train()
    assert_same_run(directory, uninterrupted(CAUSAL), 12)
    kept = {int(path.name) for path in (directory / "checkpoints").iterdir()}
    assert kept == {4, 8, 12}  # growth boundaries and the end stay whatever comes later
