"""`launch.py` stopped around every growth event and killed at random moments ends as if it had not been."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from toys import ROOT, assert_same_run, write_config

from depthgrow_jax.rundir import read_metrics
from depthgrow_jax.train.checkpoints import Checkpoints

pytestmark = pytest.mark.slow

GROWN = """
    config.depth = 3
    config.growth.update(operator="midas", block_size=1, schedule="explicit", boundaries=({}, {}))
    config.optimizer.update(warmup_steps=2, decay_steps=4, schedule="wsd")
    config.train.update(steps={}, batch_size=4, accumulation=2, ema_decay=0.9, log_every=1, eval_every={})
    config.checkpoint.every = {}
"""


def command(workdir: str, stop: int | None = None) -> list:
    program = [ROOT / "launch.py"] if stop is None else [ROOT / "tests" / "stopped_launch.py", str(stop)]
    return [sys.executable, *program, "train", "--config=run.py", f"--workdir={workdir}"]


def run(place, workdir: str, stop: int | None = None) -> None:
    done = subprocess.run(
        command(workdir, stop), cwd=place, env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == (0 if stop is None else 75), done.stderr
    if stop is not None:
        assert f"stopped after step {stop}, saved; the same command goes on" in done.stderr


def environment() -> dict:
    return os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}


def test_sigterm_around_every_growth_event(place):
    write_config(place, GROWN.format(4, 8, 12, 6, 0))
    run(place, "whole")
    for stop in (3, 4, 5, 7, 8, 9):
        run(place, f"stopped{stop}", stop)
        run(place, f"stopped{stop}")
        assert_same_run(place / f"stopped{stop}", place / "whole", 12)


def test_kill_at_ten_random_moments(place):
    """Starting, compiling, stepping, saving: no clean-up by hand, and no more lost than was unsaved."""
    steps, every = 1500, 5
    write_config(place, GROWN.format(200, 700, steps, 100, every))
    run(place, "whole")
    rng, directory = random.Random(20251208), place / "killed"
    kills = during_steps = 0
    while kills < 10:
        lines = len(read_metrics(directory))
        running = subprocess.Popen(
            command("killed"),
            cwd=place,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if kills % 3 == 2:  # whatever it is doing
            time.sleep(rng.uniform(0.5, 6.0))
        else:
            while running.poll() is None and len(read_metrics(directory)) <= lines:
                time.sleep(0.05)
            time.sleep(rng.uniform(0.0, 0.8))
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL, "the run ended before the kill: give it more steps"
        kills += 1
        logged = read_metrics(directory)
        if not logged or not (directory / "checkpoints").exists():
            continue
        during_steps += len(logged) > lines
        saved = Checkpoints(directory / "checkpoints", writable=False).latest() or 0
        # The save of an interval may be in flight while the next interval is trained, no longer.
        assert logged[-1]["step"] - saved <= 2 * every
    assert during_steps >= 5
    run(place, "killed")
    assert_same_run(directory, place / "whole", steps)
    assert not list((directory / "checkpoints").glob("*tmp*"))
