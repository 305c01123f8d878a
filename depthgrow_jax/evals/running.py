"""A task, asked of a network: as it is, under other orders of its layers, and at its early exits."""

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.items import Completion, Item, Question
from depthgrow_jax.evals.metrics import Summary, accuracy, chance, paired, perplexity
from depthgrow_jax.evals.outcomes import Outcome, answer_of, outcome_of, pairs_of
from depthgrow_jax.evals.prompting import Encoder, few_shot
from depthgrow_jax.evals.scoring import (
    Likelihood,
    likelihoods_by_exit,
    likelihoods_by_program,
    log_likelihoods,
)
from depthgrow_jax.evals.task import Task
from depthgrow_jax.evals.trees import Request
from depthgrow_jax.model import LayerProgram
from depthgrow_jax.probes.inputs import Subject, Watch, no_watch
from depthgrow_jax.probes.lens import Translators

# (subject, task, prompts as ids) -> texts
Write = Callable[[Subject, Task, Sequence[tuple[int, ...]]], list[str]]


class Asked(NamedTuple):
    """A task's items as they are put to a network.

    Attributes:
      before: what stands before each item.
      requests: all likelihoods that are needed.
      spans: of each item, where its requests are.
      prompts: of the items whose answers are generated, by item.
      cut: items of which something is longer than the context, and so loses its beginning.
    """

    task: Task
    items: list[Item]
    before: list[str]
    requests: list[Request]
    spans: list[slice]
    prompts: dict[int, tuple[int, ...]]
    cut: int
    encoder: Encoder


def ask(
    task: Task,
    items: Sequence[Item],
    pool: Sequence[Item] | None,
    encoder: Encoder,
    *,
    shots: int,
    seed: int = 0,
    limit: int = 0,
) -> Asked:
    """Puts the first `limit` of `items` (0: all) behind `shots` examples of `pool` (None: of all the items).

    Host work alone. An item's examples do not depend on `limit`.

    Raises `UserError` naming the item for one that cannot be asked.
    """
    try:
        before = few_shot(items, pool, shots, task.separator, seed)
    except UserError as error:
        raise UserError(f"{task.name}: {error}") from None
    requests: list[Request] = []
    spans, prompts, cut = [], {}, 0
    items = items[: limit or None]
    before = before[: limit or None]
    pairs = [
        [(shown + prompt, rest) for prompt, rest in pairs_of(item)]
        for item, shown in zip(items, before, strict=True)
    ]
    encoded = encoder.requests(list(itertools.chain(*pairs)))
    for index, (item, shown) in enumerate(zip(items, before, strict=True)):
        try:
            new = list(itertools.islice(encoded, len(pairs[index])))
            lost = max((request.cut for request in new), default=0)
            if isinstance(item, Question):
                prompts[index], lost = encoder.prompt(shown + item.prompt, room=task.max_tokens)
        except UserError as error:
            raise UserError(f"{task.name}, item {index}: {error}") from None
        spans.append(slice(len(requests), len(requests) + len(new)))
        requests += new
        cut += lost > 0
    return Asked(task, list(items), before, requests, spans, prompts, cut, encoder)


def outcomes(
    asked: Asked,
    subject: Subject,
    write: Write,
    *,
    batch_tokens: int = 0,
    watch: Watch = no_watch,
) -> list[Outcome]:
    """What every item gets by the network as its program runs it."""
    found = log_likelihoods(subject, asked.requests, batch_tokens=batch_tokens, watch=watch)
    return _judged(asked, found, _texts(asked, subject, write))


def outcomes_by_program(
    asked: Asked,
    subject: Subject,
    programs: Sequence[LayerProgram],
    write: Write,
    *,
    batch_tokens: int = 0,
    watch: Watch = no_watch,
) -> list[list[Outcome]]:
    """The same under each of `programs`, of the same number of steps: compiled once."""
    found = likelihoods_by_program(subject, asked.requests, programs, batch_tokens=batch_tokens, watch=watch)
    return [
        _judged(asked, likelihoods, _texts(asked, subject._replace(program=program), write))
        for likelihoods, program in zip(found, programs, strict=True)
    ]


def outcomes_by_exit(
    asked: Asked,
    subject: Subject,
    *,
    lens: Translators | None = None,
    batch_tokens: int = 0,
    watch: Watch = no_watch,
) -> list[list[Outcome]]:
    """The same after 0, 1, ..., K steps; see `scoring.likelihoods_by_exit`.

    Raises `UserError` for a task whose answers are generated.
    """
    if any(isinstance(item, Question) for item in asked.items):
        raise UserError(f"{asked.task.name}: generates its answers, which early exits do not; leave it out")
    found = likelihoods_by_exit(subject, asked.requests, lens=lens, batch_tokens=batch_tokens, watch=watch)
    return [_judged(asked, likelihoods, {}) for likelihoods in found]


def _texts(asked: Asked, subject: Subject, write: Write) -> dict[int, str]:
    """What the network writes for each question, by item."""
    if not asked.prompts:
        return {}
    texts = write(subject, asked.task, list(asked.prompts.values()))
    return dict(zip(asked.prompts, texts, strict=True))


def _judged(asked: Asked, likelihoods: Sequence[Likelihood], texts: dict[int, str]) -> list[Outcome]:
    judged = []
    for i, (item, span) in enumerate(zip(asked.items, asked.spans, strict=True)):
        if isinstance(item, Question):
            judged.append(answer_of(asked.task, item, texts[i]))
        else:
            judged.append(outcome_of(item, likelihoods[span]))
    return judged


def summarise(asked: Asked, found: Sequence[Outcome]) -> dict[str, Any]:
    """Every score with its uncertainty, as JSON: `metrics`, `chance`, and `groups` where there are several.

    Of language modelling also the perplexity of a target.
    """
    summary = _summary(asked.items, found)
    groups = collections.defaultdict(list)
    for index, item in enumerate(asked.items):
        groups[item.group].append(index)
    if len(groups) > 1:
        summary["groups"] = {
            name or "none": _summary([asked.items[i] for i in members], [found[i] for i in members])
            for name, members in groups.items()
        }
    return summary


def _summary(items: Sequence[Item], found: Sequence[Outcome]) -> dict[str, Any]:
    names = [name for name in found[0].scores if name != "log_prob"]
    metrics: dict[str, Summary] = {
        name: accuracy([outcome.scores[name] for outcome in found]) for name in names
    }
    if all(isinstance(item, Completion) for item in items):
        metrics["perplexity"] = perplexity([outcome.scores["log_prob"] for outcome in found])
    return {
        "metrics": {
            name: {field: _number(number) for field, number in value._asdict().items()}
            for name, value in metrics.items()
        },
        "chance": _number(chance(items)),
    }


def compared(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Two networks' outcomes on the same items, by metric, as JSON; see `metrics.paired`.

    `log_prob` is that of the right answer, nats.
    """
    names = list(ours[0].scores)
    pairs = {name: paired([a.scores[name] for a in ours], [b.scores[name] for b in theirs]) for name in names}
    return {
        name: {field: _number(number) for field, number in value._asdict().items()}
        for name, value in pairs.items()
    }


def _number(value: float) -> float | None:
    """JSON has no nan, and no infinity: the perplexity of a network that is nearly sure of something else."""
    return value if math.isfinite(value) else None
