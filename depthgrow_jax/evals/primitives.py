"""Reasoning primitives as evaluation tasks; what they look like: `depthgrow_jax.data.primitive_text`.

Scored as in Kapl et al. 2025 (arXiv 2512.08819): multiple choice after five solved examples, 1,000 items.
"""

import itertools

from depthgrow_jax.data.primitive_text import NAMES, SEPARATOR, SHOTS, examples
from depthgrow_jax.evals.items import Choice
from depthgrow_jax.evals.task import Task

_ITEMS = 1000


def generate(name: str, count: int, seed: int, split: str = "test") -> list[Choice]:
    """The first `count` items of a primitive, whatever is asked for after them.

    Nothing that a `train` item of any seed is about comes in a `test` item of any seed, nor the other way.

    Raises `UserError` for an unknown name or split, or more items than there are.
    """
    found = itertools.islice(examples(name, seed, split), count)
    return [Choice(e.prompt, e.choices, e.gold, group=name) for e in found]


def _task(name: str) -> Task:
    return Task(
        name=name,
        read=lambda path, seed: generate(name, _ITEMS, seed),
        shots=SHOTS,
        shots_read=lambda path, seed: generate(name, _ITEMS, seed, split="train"),
        separator=SEPARATOR,
        metric="accuracy",
    )


PRIMITIVES: dict[str, Task] = {name: _task(name) for name in NAMES}
