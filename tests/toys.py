"""Tiny runs for tests: a corpus made of a formula, run specs of a few layers, and how to compare runs.

Run as a program (`python tests/toys.py JOBS.json`) it trains each job in turn in a fresh process and prints the
outcomes as JSON.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import numpy as np

from depthgrow_jax.config import RunConfig, from_dict
from depthgrow_jax.errors import Preempted
from depthgrow_jax.experiment import run_spec
from depthgrow_jax.train.checkpoints import Checkpoints
from depthgrow_jax.train.loop import Run
from depthgrow_jax.train.rundir import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[1]
SEPARATOR, MASK, VOCABULARY = 29, 30, 31


class ToyBatches:
    """Token sequences by formula: a noisy walk over the ids, so that there is something to learn.

    `at_step[k]` is called when the batch of step k is asked for: tests stop a run from inside that way.
    """

    data_hash = "toy"
    vocab_size, separator_id, mask_id = VOCABULARY, SEPARATOR, MASK

    def __init__(self, length: int, at_step: dict[int, Callable[[], object]] | None = None):
        self.length, self.at_step = length, at_step or {}

    def _rows(self, seed: tuple[int, ...], count: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        walk = np.cumsum(rng.integers(1, 4, size=(count, self.length + 1)), axis=1)
        return (walk % (SEPARATOR + 1)).astype(np.int32)

    def train_batch(self, step, batch_size, seed, *, process_index=0, process_count=1):
        self.at_step.get(step, lambda: None)()
        return self._rows((1, seed, step), batch_size)

    def validation_batches(self, batch_size, max_batches, *, process_index=0, process_count=1):
        return (self._rows((2, batch), batch_size) for batch in range(max_batches))


# 1 -> 2 -> 3 layers; events after 4 and 8 of 12 steps; a line of metrics covers 3 steps, so that windows
# are open at some of the checkpoints.
TINY = {
    "depth": 3,
    "model": {"vocab_size": VOCABULARY, "width": 16, "heads": 2, "mlp_dim": 32},
    "growth": {"operator": "midas", "block_size": 1, "schedule": "explicit", "boundaries": (4, 8)},
    "optimizer": {"learning_rate": 0.02, "warmup_steps": 3, "decay_steps": 3},
    "train": {
        "steps": 12,
        "batch_size": 8,
        "sequence_length": 8,
        "log_every": 3,
        "eval_every": 6,
        "eval_batches": 2,
    },
    "checkpoint": {"every": 0},
    "mesh": {"data": 1},
}


def merged(base: dict, changes: dict) -> dict:
    """`base` with nested `changes`."""
    out = dict(base)
    for name, value in changes.items():
        out[name] = merged(base.get(name, {}), value) if isinstance(value, dict) else value
    return out


def tiny_config(**changes) -> RunConfig:
    """`TINY` with nested changes, as a `RunConfig`."""
    return from_dict(RunConfig, merged(TINY, changes))


def tiny_run(directory: pathlib.Path, cfg: RunConfig, at_step: dict | None = None) -> Run:
    """A run of `cfg` on toy batches."""
    directory.mkdir(parents=True, exist_ok=True)
    return Run(run_spec(cfg, "tiny"), ToyBatches(cfg.train.sequence_length, at_step), directory)


def stop_at(step: int) -> Callable:
    """A replacement for `StopRequest.asked` that asks to stop after exactly `step` steps."""
    return lambda self, done: done == step


def interrupt() -> None:
    """SIGTERM to this very process."""
    os.kill(os.getpid(), signal.SIGTERM)


def lines_of(directory: pathlib.Path) -> list[str]:
    """The lines of `metrics.jsonl` as JSON text, without the one number that is a matter of the clock."""
    records = read_metrics(directory)
    for record in records:
        record.pop("tokens_per_second", None)
    return [json.dumps(record) for record in records]


def stored(directory: pathlib.Path, step: int, item: str = "params"):
    """An item of a checkpoint as plain containers of numpy arrays, read back without a target."""
    import orbax.checkpoint as ocp

    manager = Checkpoints(directory / "checkpoints", writable=False)._manager
    tree = manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.StandardRestore()}))[item]
    return jax.tree.map(np.asarray, tree)


def assert_same_arrays(tree, other) -> None:
    """Same structure, and every leaf equal to the bit."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for (path, one), two in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True
    ):
        one, two = np.asarray(one), np.asarray(two)
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes(), jax.tree_util.keystr(path)


def assert_same_run(directory: pathlib.Path, other: pathlib.Path, step: int) -> None:
    """Metrics and every stored array of two runs at `step` are equal to the bit."""
    assert lines_of(directory) == lines_of(other)
    for item in ("params", "training"):
        assert_same_arrays(stored(directory, step, item), stored(other, step, item))
    if (directory / "checkpoints" / str(step) / "ema").exists():
        assert_same_arrays(stored(directory, step, "ema"), stored(other, step, "ema"))


def in_fresh_process(jobs: list[dict], folder: pathlib.Path, devices: int = 8) -> list[dict]:
    """Runs jobs `{"directory": ..., "changes": {...}, "stop": step or None}` one after another in one new process."""
    request = folder / "jobs.json"
    request.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, __file__, str(request)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _main(request: str) -> None:
    from depthgrow_jax.train.signals import StopRequest

    outcomes = []
    for job in json.loads(pathlib.Path(request).read_text()):
        StopRequest.asked = stop_at(job.get("stop"))
        run = tiny_run(pathlib.Path(job["directory"]), tiny_config(**job["changes"]))
        try:
            outcomes.append(run.train())
        except Preempted as stopped:
            outcomes.append({"stopped": str(stopped), "compilations": run.compilations})
    print(json.dumps(outcomes))


if __name__ == "__main__":
    _main(sys.argv[1])
