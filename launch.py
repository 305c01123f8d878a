"""The one entry point.

python launch.py train --config=configs/quickstart.py --workdir=DIR [--config.a.b=value ...]
python launch.py plan  --config=configs/smollm_360m.py:lidas
python launch.py probe --run=DIR/static/seed0 [--probes=geometry,ablation] [--config.probe.a.b=value ...]
python launch.py eval  --run=DIR/static/seed0 --tasks=primitives,lambada [--config.eval.a=value ...]
python launch.py generate --run=DIR/static/seed0 --prompt="def main" [--max_tokens=64 --temperature=0.8 ...]
python launch.py export --run=DIR/static/seed0 --out=DIR [--dtype=bfloat16]

`probe` measures how a trained run uses its depth (docs/probes.md). Its config is configs/probe.py, with the
conventions of `--preset`; results go to `probes/` in the run, and probes that are done are not run again.
`eval` asks tasks, as the network is and with its layers moved (docs/evals.md); its config is configs/eval.py.
`generate` continues prompts; `export` writes what transformers, vLLM and llama.cpp's converter read
(docs/interop.md). In the place of `--run`, `--model=hf:DIR`, `hf:org/name`, `gguf:FILE` or `gguf:PACKAGE`
takes a pretrained network.

Exit codes: 0 done; 2 something to mend in the command, config or files (one line says what);
3 a loss or gradient was not finite; 75 stopped on request, saved, the same command goes on; 130 interrupted
before the first step, or between probes, of which the finished are kept.
"""

import io
import os
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import flags, logging
from ml_collections import config_flags

from depthgrow_jax.allocator import keep_freed_memory
from depthgrow_jax.config_files import CONFIGS, check_fields, first_line, given, load_config, wrong_value
from depthgrow_jax.errors import Preempted, UserError, require_choice

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    "config", None, "An experiment of configs/, with `:argument` where it takes one."
)
flags.DEFINE_string("workdir", None, "Where the runs live.")
flags.DEFINE_list("arms", [], "Only these arms of the config (the summary covers all that are finished).")
flags.DEFINE_bool(
    "keep_memory", True, "Keep freed memory: faster on CPU, a larger process (Linux; not eval)."
)
flags.DEFINE_string("figure", None, "plan: also draw the stages and the descent of their layers to this PNG.")
flags.DEFINE_string("run", None, "probe, eval, generate, export: the directory of a trained run.")
flags.DEFINE_string(
    "model", None, "... or a pretrained network: hf:DIR, hf:org/name, gguf:FILE or gguf:PACKAGE."
)
flags.DEFINE_integer(
    "step", None, "probe, eval, generate, export: which checkpoint; the newest if not given."
)
flags.DEFINE_list("probes", [], "probe: only these.")
flags.DEFINE_string(
    "preset", None, "probe: default, quick, or of csordas (arXiv 2505.13898) or paper (2512.08819)."
)
flags.DEFINE_list("tasks", [], "eval: tasks and groups of tasks, instead of the config's.")
flags.DEFINE_integer(
    "limit", None, "eval: items of each task, the first ones, instead of the config's; 0 for all."
)
flags.DEFINE_string("out", None, "probe, eval: another directory for the results; export: a new directory.")
flags.DEFINE_string(
    "other", None, "probe: a second network, for the probes that compare two; eval: asked the same."
)
flags.DEFINE_string("dtype", "float32", "export: float32, bfloat16 or float16.")
flags.DEFINE_string(
    "program",
    None,
    "eval, generate, export: the layers to run, such as 0-3,2-3,4-7; as they are if not given.",
)
flags.DEFINE_multi_string("prompt", [], "generate: a text to continue; may be given several times.")
flags.DEFINE_integer("max_tokens", 64, "generate: new tokens at most.")
flags.DEFINE_float("temperature", 0.0, "generate: 0 takes the most likely token.")
flags.DEFINE_integer("top_k", 0, "generate: draw among the k most likely tokens; 0: all.")
flags.DEFINE_float("top_p", 1.0, "generate: draw among the most likely tokens of this probability together.")
flags.DEFINE_integer("seed", 0, "generate: of the draws.")
flags.DEFINE_multi_string("stop", [], "generate: a text that ends the continuation, and is left out.")
flags.DEFINE_string(
    "distributed", None, "Several processes: `auto` (SLURM, TPU, ...) or `HOST:PORT,PROCESSES,INDEX` by hand."
)


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
    return experiment


def _join_processes(how: str) -> None:
    """Connects to the run's other processes. Raises `UserError` for a bad `how`, or if they are not met."""
    import jax

    by_hand = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", how)
    if how != "auto" and not by_hand:
        raise UserError(f"--distributed={how}: must be auto or HOST:PORT,PROCESSES,INDEX")
    try:
        if by_hand:
            jax.distributed.initialize(by_hand[1], int(by_hand[2]), int(by_hand[3]))
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--distributed={how}: {first_line(error)}") from error


def plan() -> int:
    """Prints what every stage trains, copies and costs; runs nothing."""
    from depthgrow_jax.experiment import draw_stages, plan_experiment

    experiment = _experiment()
    if FLAGS.arms:
        runs = {key: run for key, run in experiment.runs.items() if key[0] in FLAGS.arms}
        experiment = experiment._replace(runs=runs)
    print(plan_experiment(experiment))
    if FLAGS.figure:
        draw_stages(experiment, FLAGS.figure)
    return 0


def train() -> int:
    """Trains every arm and seed that is not finished, resuming where one was stopped."""
    if FLAGS.keep_memory:
        keep_freed_memory()
    experiment = _experiment()
    if not FLAGS.workdir:
        raise UserError("--workdir is missing: the directory that the runs are written to")
    if FLAGS.distributed:
        _join_processes(FLAGS.distributed)
    from depthgrow_jax.experiment import train_experiment

    return train_experiment(experiment, FLAGS.workdir, FLAGS.arms)


def _network() -> tuple[str, str]:
    """The network of the command, and the flag that named it. Raises `UserError` unless it is one."""
    if FLAGS.run and FLAGS.model:
        raise UserError("--run and --model: one network at a time")
    if not FLAGS.run and not FLAGS.model:
        raise UserError("--run is missing: the directory of a run; or --model, a pretrained network")
    from depthgrow_jax.interop import is_reference

    if FLAGS.run:
        return FLAGS.run, "--run"
    if not is_reference(FLAGS.model):
        raise UserError(
            f"--model={FLAGS.model!r}: is no model; must be hf:DIR, hf:org/name, gguf:FILE or gguf:PACKAGE"
        )
    return FLAGS.model, "--model"


def _run_without_training(verb: str) -> None:
    """Sets the process up. Raises `UserError` if it should be one of several."""
    if FLAGS.distributed:
        raise UserError(f"--distributed={FLAGS.distributed}: {verb} runs in one process, on all its devices")
    # An evaluation reads many texts, which the threads of the tokenizer cannot do at once from one heap.
    if FLAGS.keep_memory and verb != "eval":
        keep_freed_memory()
    from depthgrow_jax.executables import keep_executables

    keep_executables()


def probe() -> int:
    """Measures how a network uses its depth."""
    place, flag = _network()
    _run_without_training("probe")
    from depthgrow_jax.probe_plan import parse
    from depthgrow_jax.probing import probe_network

    plan = parse(FLAGS.config, FLAGS.probes)
    try:
        return probe_network(place, plan, flag=flag, step=FLAGS.step, out=FLAGS.out, other=FLAGS.other)
    except KeyboardInterrupt:
        print("interrupted; finished probes are kept", file=sys.stderr)
        # A computation may still run on other threads: to take the interpreter down under it is to crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)


def evaluate() -> int:
    """Asks a network the items of tasks."""
    place, flag = _network()
    _run_without_training("eval")
    from depthgrow_jax.eval_plan import parse
    from depthgrow_jax.evaluating import evaluate_network

    for name, value in (("tasks", "".join(FLAGS.tasks)), ("out", FLAGS.out)):
        if FLAGS[name].present and not value:
            raise UserError(f"--{name}=: is empty; leave it out for the default")
    plan = parse(FLAGS.config, FLAGS.tasks, FLAGS.limit)
    return evaluate_network(
        place,
        plan,
        flag=flag,
        step=FLAGS.step,
        out=FLAGS.out,
        order=FLAGS.program,
        other=FLAGS.other,
    )


def generate() -> int:
    """Continues prompts."""
    place, flag = _network()
    _run_without_training("generate")
    from depthgrow_jax.generating import continue_texts
    from depthgrow_jax.model import Sampling

    return continue_texts(
        place,
        FLAGS.prompt,
        flag=flag,
        step=FLAGS.step,
        sampling=Sampling(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p),
        max_tokens=FLAGS.max_tokens,
        seed=FLAGS.seed,
        stops=FLAGS.stop,
        order=FLAGS.program,
    )


def export() -> int:
    """Writes a network as a Hugging Face directory."""
    place, flag = _network()
    _run_without_training("export")
    if not FLAGS.out:
        raise UserError("--out is missing: the directory to write")
    from depthgrow_jax.exporting import export_network

    return export_network(
        place, FLAGS.out, flag=flag, step=FLAGS.step, dtype=FLAGS.dtype, order=FLAGS.program
    )


VERBS = {
    "train": train,
    "plan": plan,
    "probe": probe,
    "eval": evaluate,
    "generate": generate,
    "export": export,
}


def _with_config(argv: list[str]) -> list[str]:
    """`argv`, with the config of the verb where it is `probe` or `eval` and none is given."""
    preset = given(argv, "preset")
    verb = next((argument for argument in argv[1:] if argument in VERBS), None)
    if verb != "probe" or given(argv, "config") is not None:
        if preset is not None:
            raise UserError(
                f"--preset={preset}: is for probe without --config; name it --config=FILE:{preset}"
            )
        if verb == "eval" and given(argv, "config") is None:
            return [argv[0], f"--config={CONFIGS / 'eval.py'}", *argv[1:]]
        return argv
    from depthgrow_jax.probes.config import PRESETS

    preset = "default" if preset is None else preset
    require_choice("--preset", preset, PRESETS)
    # In front: overrides are known only after the config that they change.
    return [argv[0], f"--config={CONFIGS / 'probe.py'}:{preset}", *argv[1:]]


def _check_homes() -> None:
    """Raises `UserError` for a path that begins with the home of somebody who is not there."""
    for name in ("workdir", "run", "model", "other", "out", "figure"):
        path = (FLAGS[name].value or "").removeprefix("hf:").removeprefix("gguf:")
        if path.startswith("~") and os.path.expanduser(path).startswith("~"):
            raise UserError(f"--{name}={FLAGS[name].value!r}: no such user, or no home directory")


def _wrong_flag(error: Exception) -> str | None:
    """What a flag of this file that has a value of another type should have been; None for other errors."""
    wrong = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
    return wrong and f"--{wrong[1]}={wrong[2]!r}: must be of type {FLAGS[wrong[1]].flag_type()}"


def _parse(argv: list[str]) -> str:
    """Reads the flags and returns the verb. Raises `UserError` for what absl or ml_collections refuse."""
    # ml_collections describes a faulty config file or override in many lines: both are looked at first.
    argv = _with_config(argv)
    argument = given(argv, "config")
    config = None if argument is None else load_config(argument)
    if config is not None:
        check_fields(config, argv)
    try:
        rest = FLAGS(argv)[1:]
    except Exception as error:  # absl and ml_collections raise many kinds
        message = first_line(error) if config is None else wrong_value(config, error)
        raise UserError(_wrong_flag(error) or message) from error
    _check_homes()
    if not FLAGS["verbosity"].present:
        # What the libraries warn of is not for the reader of a progress bar.
        logging.set_verbosity(logging.ERROR)
    if len(rest) != 1 or rest[0] not in VERBS:
        raise UserError(f"expected one verb, got {' '.join(rest) or 'none'}; legal: {', '.join(VERBS)}")
    return rest[0]


def main(argv: list[str]) -> int:
    """Runs one verb; returns the exit code."""
    if len(argv) == 1 or "--help" in argv:
        print(__doc__, FLAGS.main_module_help(), sep="\n")
        return 0
    try:
        return VERBS[_parse(argv)]()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Preempted as error:
        print(error, file=sys.stderr)
        return 75
    except OSError as error:  # a full disk, a name too long, a directory in the place of a file
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the first step: nothing to save
        print("interrupted", file=sys.stderr)
        return 130
    except SystemExit as error:  # a config file may do that
        return error.code if isinstance(error.code, int) else 2


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that lacks a character shows its number.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main(sys.argv))
