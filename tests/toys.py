"""Tiny runs for tests: a corpus made of a formula, run specs of a few layers, and how to compare runs.

Run as a program (`python tests/toys.py JOBS.json`) it trains each job in turn in a fresh process and prints
the outcomes as JSON.
"""

import json
import math
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
from depthgrow_jax.rundir import read_metrics
from depthgrow_jax.train import state as states
from depthgrow_jax.train.checkpoints import Checkpoints
from depthgrow_jax.train.config import OptimizerConfig
from depthgrow_jax.train.loop import Run
from depthgrow_jax.train.signals import StopRequest

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


CONFIG_FILE = """
from depthgrow_jax.config import base_config

def get_config():
    config = base_config()
    config.name = "launched"
    config.depth = 2
    config.model.update(vocab_size=258, width=16, heads=2, mlp_dim=32)
    config.growth.update(block_size=1)
    config.data.update(source="files", path="{texts}", cache_dir="{cache}")
    config.data.update(tokenizer="bytes", validation_fraction=0.2)
    config.train.update(steps=4, batch_size=2, sequence_length=8, log_every=1, eval_every=0, eval_batches=1)
    config.optimizer.warmup_steps = 1
    config.checkpoint.every = 2
    config.mesh.data = 1
    {more}
    return config
"""


def write_config(place: pathlib.Path, more: str = "") -> None:
    """`run.py` in `place`: a config of a run that takes no time, on the texts in `place/texts`."""
    text = CONFIG_FILE.format(texts=place / "texts", cache=place / "cache", more=more)
    (place / "run.py").write_text(text)


# What most whole-run tests train: everything that must survive growth and a resume is on. Tests change only
# what is not compiled into the step, so that all of them share three executables.
EVERYTHING = {
    "train": {"accumulation": 2, "ema_decay": 0.9},
    "growth": {"gate": "linear", "gate_steps": 3, "rewarmup_steps": 2},
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


def fresh_state(cfg: RunConfig, tx, depth: int, *, ema: bool = False):
    """An initial train state, compiled as one program: operation by operation it takes seconds."""
    return jax.jit(lambda: states.create(cfg.model, tx, depth, cfg.seed, ema=ema))()


def tiny_run(directory: pathlib.Path, cfg: RunConfig, at_step: dict | None = None) -> Run:
    """A run of `cfg` on toy batches."""
    directory.mkdir(parents=True, exist_ok=True)
    return Run(run_spec(cfg, "tiny"), ToyBatches(cfg.train.sequence_length, at_step), directory)


_asked = StopRequest.asked


def stop_after(step: int | None) -> Callable:
    """A replacement for `StopRequest.asked` in which one real SIGTERM arrives after `step` steps."""
    pending = [step]

    def asked(self, done):
        if done in pending:
            pending.remove(done)
            os.kill(os.getpid(), signal.SIGTERM)
        return _asked(self, done)

    return asked


def planned_rate(cfg: OptimizerConfig, total: int, step: int, events=(), rewarmup: int = 0) -> float:
    """Rate of the update after `step` finished steps, from the definitions (float64, branch by branch)."""
    final, peak, warmup = cfg.final_fraction, cfg.learning_rate, cfg.warmup_steps
    if step < warmup:
        rate = peak * (step + 1) / warmup
    elif cfg.schedule == "constant":
        rate = peak
    elif cfg.schedule == "wsd":
        begin = total - cfg.decay_steps
        shape = 1.0 if step < begin else 1 - math.sqrt((step - begin) / cfg.decay_steps)
        rate = peak * (final + (1 - final) * shape)
    else:
        over = (step - warmup) / (total - warmup)
        shape = 1 - over if cfg.schedule == "linear" else (1 + math.cos(math.pi * over)) / 2
        rate = peak * (final + (1 - final) * shape)
    last = max((event for event in events if event <= step), default=None)
    if rewarmup and last is not None:
        rate *= min(1.0, (step - last + 1) / rewarmup)
    return rate


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
    """Runs jobs `{"directory", "changes", "stop": step or None}` one after another in one new process."""
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
    outcomes = []
    for job in json.loads(pathlib.Path(request).read_text()):
        StopRequest.asked = stop_after(job.get("stop"))
        run = tiny_run(pathlib.Path(job["directory"]), tiny_config(**job["changes"]))
        try:
            outcomes.append(run.train())
        except Preempted as stopped:
            outcomes.append({"stopped": str(stopped), "compilations": run.compilations})
    print(json.dumps(outcomes))


if __name__ == "__main__":
    _main(sys.argv[1])
