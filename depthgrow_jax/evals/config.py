"""What an evaluation asks, and under which interventions."""

import dataclasses
import pathlib

from depthgrow_jax.errors import require, require_choice

SWEEPS = ("skip", "swap", "reverse", "repeat")
EXITS = ("none", "logit", "tuned")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Everything `launch.py eval` can be told.

    Attributes:
      tasks: names of tasks and of groups of tasks.
      limit: items of each task, the first ones; 0 for all.
      shots: few-shot examples before each item; -1 for the task's own number.
      seed: of generated items and of which examples are taken.
      data_dir: where task files are; empty for `$DEPTHGROW_DATA`.
      batch_tokens: tokens of a batch; 0 chooses by the device.
      dtype: of the computation.
      keep_items: keep every item's prompt, prediction and scores in a `.jsonl`.
      sweeps: of `SWEEPS`: the tasks again with a run of layers moved, at every start.
      run_lengths: layers of such a run; empty for those of 1, 2, 4, 8 that the depth allows.
      repeats: `repeat`: how many more times a run is run.
      exits: the tasks again at every early exit: `none`, `logit` lens or `tuned` lens.
      lens: `tuned`: the directory of a probe's results that holds a tuned lens of this network.
    """

    tasks: tuple[str, ...] = ("primitives",)
    limit: int = 0
    shots: int = -1
    seed: int = 0
    data_dir: str = ""
    batch_tokens: int = 0
    dtype: str = "float32"
    keep_items: bool = False
    sweeps: tuple[str, ...] = ()
    run_lengths: tuple[int, ...] = ()
    repeats: int = 1
    exits: str = "none"
    lens: str = ""


def validate(cfg: EvalConfig) -> None:
    """Refuses settings that mean nothing. Raises `UserError` naming the field."""
    require(len(cfg.tasks) > 0, "eval.tasks", cfg.tasks, "must name at least one task")
    for field, least in (("limit", 0), ("shots", -1), ("seed", 0), ("batch_tokens", 0), ("repeats", 1)):
        value = getattr(cfg, field)
        require(value >= least, f"eval.{field}", value, f"must be {least} or more")
    where = pathlib.Path(cfg.data_dir).expanduser()
    require(not cfg.data_dir or where.is_dir(), "eval.data_dir", cfg.data_dir, "must be a directory")
    for name in cfg.sweeps:
        require_choice("eval.sweeps", name, SWEEPS)
    require_choice("eval.exits", cfg.exits, EXITS)
    require_choice("eval.dtype", cfg.dtype, DTYPES)
    require(all(n >= 1 for n in cfg.run_lengths), "eval.run_lengths", cfg.run_lengths, "must be positive")
    require(
        bool(cfg.sweeps) or not cfg.run_lengths,
        "eval.run_lengths",
        cfg.run_lengths,
        "is for eval.sweeps, which is empty",
    )
    tuned = cfg.exits == "tuned"
    require(
        tuned == bool(cfg.lens), "eval.lens", cfg.lens, "must be given with eval.exits=tuned, and only then"
    )
