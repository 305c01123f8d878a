"""Generators of the optional package reasoning-gym, by name, as tasks and as training text.

Item i of a data set of seed s is drawn from s + i, so neighbouring seeds share items: the seeds used here are
too far apart for that, and those of training far from those of evaluation.
"""

import itertools
from collections.abc import Collection, Iterator

from depthgrow_jax.data.readers import one_line, optional_package
from depthgrow_jax.errors import UserError, require
from depthgrow_jax.evals.answers import final_answer
from depthgrow_jax.evals.items import Question, example
from depthgrow_jax.evals.task import Task

PREFIX = "reasoning_gym:"
_ITEMS = 500
# Seeds of numpy end at 2**32: 2**20 items for each of 2**11 seeds, the upper half for training.
_APART, _TRAINING, _SEEDS = 2**20, 2**31, 2**11


def task(name: str) -> Task:
    """The task `reasoning_gym:NAME`: 500 questions, answers that must be equal as texts.

    Raises `UserError` where the package is missing or knows no such generator.
    """
    _data_set(name, 1, 0)
    return Task(
        PREFIX + name,
        read=lambda path, seed: list(_questions(name, _ITEMS, _first(seed))),
        source="https://github.com/open-thought/reasoning-gym",
        licence="Apache-2.0",
        shots_read=lambda path, seed: list(_questions(name, _ITEMS, _TRAINING + _first(seed))),
        metric="exact",
        extract=final_answer,
        max_tokens=128,
    )


def documents(name: str, count: int, seed: int, held_out: Collection[str] = ()) -> list[str]:
    """`count` questions with their answers, to train on, no question twice.

    Args:
      held_out: prompts of evaluation items, which are left out: a generator of few questions repeats them.

    Raises `UserError` as `task`, and where there are fewer questions than asked for.
    """
    seen = set(held_out)
    texts = []
    for question in itertools.islice(_questions(name, _APART, _TRAINING + _first(seed)), 10 * count + 1000):
        if len(texts) == count:
            break
        if question.prompt not in seen:
            seen.add(question.prompt)
            texts.append(example(question))
    if len(texts) < count:
        raise UserError(f"{PREFIX}{name}: count={count}: finds only {len(texts)} different questions")
    return texts


def _first(seed: int) -> int:
    require(0 <= seed < _SEEDS, "seed", seed, f"must be from 0 to {_SEEDS - 1}")
    return seed * _APART


def _questions(name: str, count: int, first: int) -> Iterator[Question]:
    for index, entry in enumerate(_data_set(name, count, first)):
        answer = entry["answer"]
        if not isinstance(answer, str) or not answer.strip():
            raise UserError(f"{PREFIX}{name}: item {index} has answer={answer!r}: must be a text")
        prompt = f"Question: {entry['question'].strip()}\nAnswer:"
        yield Question(prompt, (answer.strip(),), shown=f"{prompt} {answer.strip()}")


def _data_set(name: str, size: int, seed: int):
    package = optional_package("reasoning_gym", "reasoning-gym", PREFIX + name)
    try:
        return package.create_dataset(name, size=size, seed=seed)
    except ValueError as e:
        raise UserError(f"{PREFIX}{name}: {one_line(e)}; names: {', '.join(_names(package))}") from e


def _names(package) -> list[str]:
    return sorted(package.factory.DATASETS)
