"""The glue of `launch.py eval`: a network and tasks in; a result file for each task, and a table, out."""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import depthgrow_jax
from depthgrow_jax import results
from depthgrow_jax.config import to_dict
from depthgrow_jax.corpora import tokenizer_of, vocabulary_of
from depthgrow_jax.data.tokenizer import Tokenizer
from depthgrow_jax.errors import UserError
from depthgrow_jax.eval_plan import Plan
from depthgrow_jax.evals import files, running
from depthgrow_jax.evals.config import EvalConfig
from depthgrow_jax.evals.interventions import Sweep, sweeps
from depthgrow_jax.evals.items import Item
from depthgrow_jax.evals.outcomes import Outcome
from depthgrow_jax.evals.prompting import Encoder
from depthgrow_jax.evals.registry import resolve
from depthgrow_jax.evals.running import Asked, Write, ask
from depthgrow_jax.evals.task import Task
from depthgrow_jax.generating import continuations
from depthgrow_jax.interop import is_reference
from depthgrow_jax.model import Sampling, parse_order, reorder, unroll
from depthgrow_jax.probes.inputs import Subject, Watch
from depthgrow_jax.probes.lens import Translators
from depthgrow_jax.report.eval_table import eval_table
from depthgrow_jax.rundir import locked, open_directory, read_json, write_json
from depthgrow_jax.subjects import Loaded, load_network
from depthgrow_jax.telling import line, watch

FORMAT = 1
_WRITTEN_AT_ONCE = 16


def evaluate_network(
    place: str,
    plan: Plan,
    *,
    flag: str = "--run",
    step: int | None = None,
    out: str | None = None,
    order: str | None = None,
    other: str | None = None,
) -> int:
    """Asks every task that is not done, and prints a table of all that were asked for.

    Tasks, files, devices and the network are looked at before the first item is asked. Each task's result is
    written when it is done: a command that is stopped goes on with the next.

    Args:
      place, flag, step: see `subjects.load_network`.
      plan: results go to `evals/step{N}-{plan.name}` in the run.
      out: another directory; a pretrained network needs one.
      order: the layers to run (`model.parse_order`); None: as they are.
      other: a second network, asked the same items, whose outcomes are compared with those of the first.

    Returns the exit code, 0. Raises `UserError` for anything the user can mend.
    """
    config = plan.eval
    if is_reference(place) and out is None:
        raise UserError(f"{flag}={place!r}: has no directory of its own; give one for the results with --out")
    tasks = resolve(config.tasks)
    items = {task.name: _items(task, config) for task in tasks}
    loaded = load_network(place, step, flag=flag, dtype=config.dtype, mesh=plan.mesh)
    subject = loaded.subject
    if order is not None:
        program = reorder(subject.program, parse_order(order, subject.steps))
        subject = subject._replace(program=program)
    moved = sweeps(config.sweeps, subject.steps, config.run_lengths, config.repeats)
    translators = _translators(config.lens, subject) if config.exits == "tuned" else None
    ours, theirs = _reader(loaded, subject, items, config), None
    if other:
        rival = load_network(other, flag="--other", dtype=config.dtype, mesh=plan.mesh)
        theirs = _reader(rival, rival.subject, items, config)
    directory = pathlib.Path(
        out or pathlib.Path(place, "evals", f"step{loaded.step}-{plan.name}")
    ).expanduser()
    request = _request(config, loaded, order, theirs)
    requests = {name: request | {"content": _content(asked)} for name, asked in ours.asked.items()}
    done = {
        name
        for name in items
        if _is_done(
            directory / f"{name}.json", requests[name], ours.asked[name] if config.keep_items else None
        )
    }
    header = loaded.facts | {
        "preset": plan.name,
        "devices": subject.devices,
        "versions": {"jax": jax.__version__, "depthgrow_jax": depthgrow_jax.__version__},
    }
    with locked(open_directory(directory, "--out" if out else flag)):
        for name in items:
            if name in done:
                line(f"{name}: already done")
                continue
            if cut := ours.asked[name].cut:
                shots = _shots(items[name][0], config)
                line(
                    f"{name}: {cut} of {len(ours.asked[name].items)} items are longer than the context of "
                    f"{loaded.context} tokens{f' with their {shots} examples' if shots else ''}, and lose "
                    "their beginning"
                )
            result, found = _evaluate(name, ours, config, moved, translators)
            if theirs is not None:
                result |= _compared(found, name, theirs, config)
            if config.keep_items:
                _write_items(directory / f"{name}.jsonl", ours.asked[name], found)
            write_json(
                directory / f"{name}.json",
                {"format": FORMAT, "task": name, "header": header, "request": requests[name]} | result,
            )
    print(f"{loaded.facts['run']}: {directory}\n")
    print(eval_table({name: read_json(directory / f"{name}.json") for name in items}))
    return 0


class _Reader(NamedTuple):
    """A network that is asked: how it runs, every task as it reads it, and how it writes."""

    loaded: Loaded
    subject: Subject
    asked: dict[str, Asked]
    write: Write


def _reader(
    loaded: Loaded,
    subject: Subject,
    items: dict[str, tuple[Task, list[Item], list[Item] | None]],
    config: EvalConfig,
) -> _Reader:
    tokenizer, vocabulary = tokenizer_of(loaded, line), vocabulary_of(loaded, line)
    prefix = vocabulary.prefix if vocabulary else ()
    encoder = Encoder(tokenizer, prefix, tokenizer.separator_id, loaded.context)
    asked = {
        name: ask(
            task, found, pool, encoder, shots=_shots(task, config), seed=config.seed, limit=config.limit
        )
        for name, (task, found, pool) in items.items()
    }
    return _Reader(loaded, subject, asked, _writer(tokenizer, vocabulary.ends if vocabulary else ()))


def _items(task: Task, config: EvalConfig) -> tuple[Task, list[Item], list[Item] | None]:
    """A task, all its items, and what its examples are taken from."""
    items = files.read(task, config.data_dir, config.seed)
    if not items:
        raise UserError(f"{task.name}: has no items")
    pool = files.read_examples(task, config.data_dir, config.seed) if _shots(task, config) else None
    return task, items, pool


def _shots(task: Task, config: EvalConfig) -> int:
    return task.shots if config.shots < 0 else config.shots


def _watch(name: str) -> Watch:
    """Shows how much of the work for a task is done."""
    return lambda what, total, items: watch(f"{name}: {what}", total, items)


def _precision(config: EvalConfig):
    return jax.default_matmul_precision("highest" if config.dtype == "float32" else "default")


def _compared(found: Sequence[Outcome], name: str, theirs: _Reader, config: EvalConfig) -> dict[str, Any]:
    """What the second network got, and the first network's outcomes against its, by metric."""
    with _precision(config):
        other = running.outcomes(
            theirs.asked[name],
            theirs.subject,
            theirs.write,
            batch_tokens=config.batch_tokens,
            watch=_watch(f"{name} of --other"),
        )
    asked = theirs.asked[name]
    facts = {"run": theirs.loaded.facts["run"], "step": theirs.loaded.step, "cut": asked.cut}
    return {"other": facts | running.summarise(asked, other), "paired": running.compared(found, other)}


def _evaluate(
    name: str, reader: _Reader, config: EvalConfig, moved: Sequence[Sweep], lens: Translators | None
) -> tuple[dict[str, Any], list[Outcome]]:
    """What is written of one task, and what its items got by the whole network."""
    _, subject, tasks, write = reader
    asked = tasks[name]
    options: dict[str, Any] = {"batch_tokens": config.batch_tokens, "watch": _watch(name)}
    with _precision(config):
        found = running.outcomes(asked, subject, write, **options)
        result = {
            "n": len(asked.items),
            "shots": _shots(asked.task, config),
            "cut": asked.cut,
            "prefix": list(asked.encoder.prefix),
        } | running.summarise(asked, found)
        result["sweeps"] = []
        for sweep in moved:
            programs = [reorder(subject.program, order) for order in sweep.orders]
            by_start = running.outcomes_by_program(asked, subject, programs, write, **options)
            result["sweeps"].append(
                {
                    "operation": sweep.operation,
                    "run_length": sweep.run_length,
                    "starts": sweep.starts,
                    "results": [running.summarise(asked, outcomes) for outcomes in by_start],
                }
            )
        if config.exits != "none":
            by_exit = running.outcomes_by_exit(asked, subject, lens=lens, **options)
            result["exits"] = {
                "lens": config.exits,
                "after": list(range(len(by_exit))),
                "results": [running.summarise(asked, outcomes) for outcomes in by_exit],
            }
    return result, found


def _writer(tokenizer: Tokenizer, ends: Sequence[int]) -> Write:
    """A function that continues the prompts of a task, the longest first, some at once."""

    def write(subject: Subject, task: Task, prompts: Sequence[tuple[int, ...]]) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        texts = [""] * len(prompts)
        unrolled = unroll(subject.cfg, subject.params, subject.program)
        starts = range(0, len(order), _WRITTEN_AT_ONCE)
        for start in watch(f"{task.name}: writing", len(starts), iter(starts)):
            chosen = order[start : start + _WRITTEN_AT_ONCE]
            made = continuations(
                subject,
                tokenizer,
                [prompts[i] for i in chosen],
                ends=ends,
                sampling=Sampling(),
                max_tokens=task.max_tokens,
                stops=task.stops,
                unrolled=unrolled,
            )
            for i, text in zip(chosen, made, strict=True):
                texts[i] = text.text
        return texts

    return write


def _lens_file(place: str) -> pathlib.Path:
    return pathlib.Path(place).expanduser() / "tuned_lens.json"


def _translators(place: str, subject: Subject) -> Translators:
    """A tuned lens that a probe has trained. Raises `UserError` if it is not one of this network."""
    try:
        result, _ = results.load(_lens_file(place))
    except UserError as error:
        raise UserError(f"eval.lens={place!r}: {error}") from None
    found = Translators(*(jnp.asarray(result.arrays[f"translator.{name}"]) for name in ("kernel", "bias")))
    wanted = (subject.steps, subject.cfg.width)
    if found.bias.shape != wanted:
        raise UserError(
            f"eval.lens={place!r}: is of {found.bias.shape[0]} layers of width {found.bias.shape[1]}; "
            f"the network has {wanted[0]} of {wanted[1]}"
        )
    return found


def _request(config: EvalConfig, loaded: Loaded, order: str | None, theirs: _Reader | None) -> dict[str, Any]:
    """What decides the numbers of a task, as JSON values."""
    lens = results.describe(_lens_file(config.lens))["npz_sha256"] if config.lens else ""
    free = ("tasks", "batch_tokens", "keep_items", "data_dir")
    fields = {name: value for name, value in to_dict(config).items() if name not in free}
    network = {"config_hash": loaded.meta["config_hash"], "step": loaded.step, "program": order}
    other = theirs and {"config_hash": theirs.loaded.meta["config_hash"], "step": theirs.loaded.step}
    return json.loads(json.dumps(fields | network | {"other": other, "lens_content": lens}))


def _content(asked: Asked) -> str:
    """A hash of the items, and of what stands before them: files change."""
    shown = [[before, item] for before, item in zip(asked.before, asked.items, strict=True)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def _is_done(path: pathlib.Path, request: dict[str, Any], kept: Asked | None) -> bool:
    """Whether there is a result of this request, and its items where these are to be `kept`.

    Raises `UserError` if there is one of another.
    """
    done, items = _has_result(path, request), path.with_suffix(".jsonl")
    if kept and done and not items.exists():
        raise UserError(
            f"eval.keep_items=True: {path} was made without it; remove that file or use --out=DIR"
        )
    if kept:
        _check_items(items, kept)
    return done


def _has_result(path: pathlib.Path, request: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    try:
        stored = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; remove it or use --out=DIR") from None
    made = stored.get("request") if isinstance(stored, dict) else None
    if not isinstance(made, dict) or stored.get("format") != FORMAT or "metrics" not in stored:
        raise UserError(f"{path}: is not the result of an evaluation; remove it or use --out=DIR")
    differing = sorted(name for name in {*made, *request} if made.get(name) != request.get(name))
    if differing:
        shown = "; ".join(f"{n} was {made.get(n)!r}, now {request.get(n)!r}" for n in differing)
        raise UserError(
            f"{path}: was made with other settings ({shown}); use --out=DIR or --config.name=NAME"
        )
    return True


def _kept_items(path: pathlib.Path) -> list[tuple[Any, Any, dict[str, float]]]:
    """(what stood before, item, scores) of every line of a file of items; empty for another file."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        return [
            (record["before"], record["item"], {k: float(v) for k, v in record["scores"].items()})
            for record in records
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _check_items(path: pathlib.Path, asked: Asked, found: Sequence[Outcome] | None = None) -> None:
    """Raises `UserError` for a file of other items than these, or of others than the outcomes `found`.

    One of these was left by a command that was killed before it wrote the result. In other batches scores
    differ by rounding.
    """
    if not path.exists():
        return
    kept = _kept_items(path)
    wanted = [(before, item._asdict()) for before, item in zip(asked.before, asked.items, strict=True)]
    same = json.dumps([line[:2] for line in kept]) == json.dumps(wanted)
    if same and found is not None:
        scores = [(line[2], outcome.scores) for line, outcome in zip(kept, found, strict=True)]
        same = all(
            old.keys() == new.keys() and np.allclose(list(old.values()), list(new.values()), 1e-3, 1e-3)
            for old, new in scores
        )
    if not same:
        raise UserError(f"{path}: is there already, and not of this evaluation; move it or use --out=DIR")


def _write_items(path: pathlib.Path, asked: Asked, found: Sequence[Outcome]) -> None:
    """One line for each item: what it is, what stood before it, what the model made of it.

    Raises `UserError` for a file that is there and says something else.
    """
    _check_items(path, asked, found)
    lines = []
    for item, before, outcome in zip(asked.items, asked.before, found, strict=True):
        record = {"before": before, "item": item._asdict()} | outcome._asdict()
        lines.append(json.dumps(record, ensure_ascii=False))
    text = "".join(line + "\n" for line in lines)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
