"""The one entry point.

python launch.py train --config=configs/quickstart.py --workdir=DIR [--config.a.b=value ...]
python launch.py plan  --config=configs/smollm_360m.py:lidas

Exit codes: 0 done; 2 something to mend in the command, config or files (one line says what);
3 a loss or gradient was not finite; 75 stopped on request, saved, the same command goes on.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags
from ml_collections import config_flags

from depthgrow_jax.errors import Diverged, Preempted, UserError

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    "config", None, "An experiment of configs/, with `:argument` where it takes one."
)
flags.DEFINE_string("workdir", None, "Where the runs live.")
flags.DEFINE_list("arms", [], "Only these arms of the config.")
flags.DEFINE_bool("distributed", False, "Several processes: call jax.distributed.initialize() first.")


def _experiment():
    from depthgrow_jax.config import parse

    if FLAGS.config is None:
        raise UserError("--config is missing; for example --config=configs/quickstart.py")
    experiment = parse(FLAGS.config)
    known = list(dict.fromkeys(arm for arm, _ in experiment.runs))
    for arm in FLAGS.arms:
        if arm not in known:
            raise UserError(
                f"--arms={arm}: not an arm of this config; legal: {', '.join(filter(None, known)) or 'none'}"
            )
    chosen = {key: run for key, run in experiment.runs.items() if not FLAGS.arms or key[0] in FLAGS.arms}
    return experiment._replace(runs=chosen)


def plan() -> int:
    """Prints what every stage trains, copies and costs; runs nothing."""
    from depthgrow_jax.experiment import plan_experiment

    print(plan_experiment(_experiment()))
    return 0


def train() -> int:
    """Trains every arm and seed that is not finished, resuming where one was stopped."""
    experiment = _experiment()
    if not FLAGS.workdir:
        raise UserError("--workdir is missing: the directory that the runs are written to")
    if FLAGS.distributed:
        import jax

        jax.distributed.initialize()
    from depthgrow_jax.experiment import train_experiment

    return train_experiment(experiment, FLAGS.workdir)


VERBS = {"train": train, "plan": plan}


def _parse(argv: list[str]) -> str:
    """Reads the flags and returns the verb. Raises `UserError` for what absl or ml_collections refuse."""
    try:
        rest = FLAGS(argv)[1:]
    except SystemExit:
        raise
    except Exception as error:  # a config file may raise anything; the line names what and where
        message = str(error.args[0] if error.args else error).strip().split("\n")[0]
        raise UserError(f"{message} ({type(error).__name__}; while reading the command line)") from error
    if len(rest) != 1 or rest[0] not in VERBS:
        raise UserError(f"expected one verb, got {' '.join(rest) or 'none'}; legal: {', '.join(VERBS)}")
    return rest[0]


def main(argv: list[str]) -> int:
    """Runs one verb; returns the exit code."""
    try:
        return VERBS[_parse(argv)]()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except Preempted as error:
        print(error, file=sys.stderr)
        return 75


if __name__ == "__main__":
    sys.exit(main(sys.argv))
