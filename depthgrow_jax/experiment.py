"""The glue: from a parsed config to plans, runs and summaries. It alone knows every room."""

import contextlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from depthgrow_jax import growth
from depthgrow_jax.config import Experiment, RunConfig, binding_fields, config_hash, to_dict, validate
from depthgrow_jax.corpora import load_corpus
from depthgrow_jax.data import Corpus
from depthgrow_jax.errors import Diverged, UserError
from depthgrow_jax.growth.cost import tree_bytes
from depthgrow_jax.report.lineage import lineage_figure
from depthgrow_jax.report.summary import write_summary
from depthgrow_jax.rundir import (
    bind_config,
    check_config,
    locked,
    open_directory,
    resolve_directory,
    write_json,
)
from depthgrow_jax.train.loop import Run, RunSpec, finished
from depthgrow_jax.train.optimizer import make_optimizer
from depthgrow_jax.train.state import abstract_state


def plan_of(cfg: RunConfig) -> dict[str, Any]:
    """The plan of a run; see `growth.make_plan`. Raises `UserError` for a config that cannot be run."""
    stages = validate(cfg)
    tx = make_optimizer(cfg.optimizer)
    return growth.make_plan(
        cfg.model,
        stages,
        sequence_length=cfg.train.sequence_length,
        batch_size=cfg.train.batch_size,
        microbatch_size=cfg.train.batch_size // cfg.train.accumulation,
        state_bytes=lambda depth: tree_bytes(
            abstract_state(cfg.model, tx, depth, ema=cfg.train.ema_decay > 0)
        ),
    )


def run_spec(cfg: RunConfig, label: str) -> RunSpec:
    """What the training loop needs of a run's config."""
    return RunSpec(
        label=label,
        seed=cfg.seed,
        model=cfg.model,
        growth=cfg.growth,
        train=cfg.train,
        optimizer=cfg.optimizer,
        checkpoint=cfg.checkpoint,
        mesh=cfg.mesh,
        init_from=cfg.init_from,
        stages=validate(cfg),
        plan=plan_of(cfg),
        config_hash=config_hash(cfg),
    )


def run_name(experiment: Experiment, arm: str, seed: int) -> str:
    """Where a run lives below the workdir: `arm/seed0`; without arms `seed0`, or `.` for a single run."""
    if not experiment.named:
        return "."
    return f"{arm}/seed{seed}" if arm else f"seed{seed}"


def plan_experiment(experiment: Experiment) -> str:
    """The plans of all arms, as text."""
    seeds = {seed for _, seed in experiment.runs}
    blocks = []
    for (arm, seed), cfg in experiment.runs.items():
        if seed != min(seeds):
            continue
        title = f"{arm or cfg.name or 'run'}: operator {cfg.growth.operator}, depth {cfg.depth}"
        if len(seeds) > 1:
            title += f", {len(seeds)} seeds"
        blocks.append(f"{title}\n{growth.format_plan(plan_of(cfg))}")
    return "\n\n".join(blocks)


def draw_stages(experiment: Experiment, path: str) -> None:
    """Draws the stages of every arm that grows.

    Raises `UserError` if no arm does, or `path` cannot be written.
    """
    arms = {
        arm or cfg.name or "run": validate(cfg)
        for (arm, _), cfg in experiment.runs.items()
        if cfg.growth.operator != "none"
    }
    if not arms:
        raise UserError("--figure: no arm of this config grows (growth.operator is none in all)")
    try:
        lineage_figure(arms, pathlib.Path(path).expanduser())
    except (OSError, ValueError) as error:  # ValueError: a format that is not known
        raise UserError(f"--figure={path}: cannot be written ({error})") from None


class _Job(NamedTuple):
    arm: str
    seed: int
    cfg: RunConfig
    name: str
    directory: pathlib.Path

    @property
    def label(self) -> str:
        return self.name if self.name != "." else (self.cfg.name or "run")


def train_experiment(experiment: Experiment, workdir: str, arms: Sequence[str] = ()) -> int:
    """Runs every (arm, seed) that is not finished, in turn, and writes the summary and its figures.

    Directories, data, devices and starting points of all runs are checked before the first one trains or
    anything is written. Returns the exit code: 0, or 3 if a run diverged (the others are still run).

    Args:
      arms: train only these; the summary covers all that are finished. Empty: all.

    Raises `UserError` for anything the user can mend, `Preempted` when asked to stop.
    """
    root = resolve_directory(workdir)
    jobs = []
    for (arm, seed), cfg in experiment.runs.items():
        name = run_name(experiment, arm, seed)
        jobs.append(_Job(arm, seed, cfg, name, root / name))
    runs = _check_jobs([job for job in jobs if not arms or job.arm in arms])
    is_main = jax.process_index() == 0
    with locked(open_directory(root)) if is_main else contextlib.nullcontext():
        results = []
        for job in jobs:
            result = finished(job.directory)
            if result is None and job.name in runs:
                result = _run_job(job, runs[job.name])
            elif job.name in runs or (result and not arms):
                print(f"{job.label}: already done, not run again", file=sys.stderr, flush=True)
            if result is not None:
                entry = {"arm": job.arm or job.cfg.name or "run", "seed": job.seed, "directory": job.name}
                results.append(entry | {"operator": job.cfg.growth.operator} | result)
        if is_main:
            print(write_summary(root, results))
    return 3 if any("diverged" in result for result in results) else 0


def _check_jobs(jobs: list[_Job]) -> dict[str, Run]:
    """The runs that are not finished, by name, set up; what would stop the last is found before the first.

    Raises `UserError` for a directory that holds something else, other data than that of a finished run, and
    whatever `Run` refuses.
    """
    results = {}
    for job in jobs:
        check_config(job.directory, binding_fields(job.cfg))
        results[job.name] = finished(job.directory)
        if results[job.name] and results[job.name]["config_hash"] != config_hash(job.cfg):
            raise UserError(f"{job.directory}: holds a finished run of another config; use another workdir")
    if all(results.values()):
        return {}
    corpora: dict[str, Corpus] = {}
    runs = {}
    for job in jobs:
        corpus = load_corpus(job.cfg, corpora, lambda text: print(text, file=sys.stderr, flush=True))
        result = results[job.name]
        if result is None:
            runs[job.name] = Run(run_spec(job.cfg, job.label), corpus, job.directory)
        elif result["data_hash"] != corpus.data_hash:
            raise UserError(
                f"{job.directory}: is finished, on other data than the arms still to train (hash "
                f"{result['data_hash'][:12]}, now {corpus.data_hash[:12]}); restore the files or use "
                "another workdir"
            )
    return runs


def _run_job(job: _Job, run: Run) -> dict[str, Any]:
    """Trains one run; its results, or `diverged` with the reason."""
    open_directory(job.directory)
    if run.is_main:
        bind_config(job.directory, binding_fields(job.cfg), to_dict(job.cfg))
        write_json(job.directory / "plan.json", run.spec.plan)
    try:
        return run.train()
    except Diverged as error:
        print(f"error: {job.label}: {error}", file=sys.stderr, flush=True)
        return {"diverged": str(error)}
