"""Generators of the optional package reasoning-gym as tasks: `reasoning_gym:NAME`."""

import itertools

from depthgrow_jax.data import reasoning_gym
from depthgrow_jax.evals.answers import final_answer
from depthgrow_jax.evals.items import Question
from depthgrow_jax.evals.task import Task

PREFIX = "reasoning_gym:"
_ITEMS = 500


def task(name: str) -> Task:
    """500 questions, or as many as there are; answers must be equal as texts.

    Raises `UserError` where the package is missing or knows no such generator.
    """
    reasoning_gym.check(name, 0, PREFIX + name)
    return Task(
        PREFIX + name,
        read=lambda path, seed: _questions(name, seed, "test"),
        source="https://github.com/open-thought/reasoning-gym",
        licence="Apache-2.0",
        shots_read=lambda path, seed: _questions(name, seed, "train"),
        metric="exact",
        extract=final_answer,
        max_tokens=128,
    )


def _questions(name: str, seed: int, split: str) -> list[Question]:
    found = itertools.islice(reasoning_gym.questions(name, seed, split, PREFIX + name), _ITEMS)
    return [Question(q.prompt, (q.answer,), shown=q.text) for q in found]
