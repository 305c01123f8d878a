"""Reasoning primitives as evaluation tasks; what they look like: `depthgrow_jax.data.primitive_text`.

Scored as in Kapl et al. 2025 (arXiv 2512.08819): multiple choice after five solved examples, 1,000 items.
"""

import itertools
from collections.abc import Sequence

from depthgrow_jax.data.primitive_text import NAMES, SEPARATOR, SHOTS, examples
from depthgrow_jax.errors import require
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


def documents_for_finetuning(names: Sequence[str], count: int, seed: int) -> list[str]:
    """`count` solved examples of the split `train`, an equal share of each name, taking turns.

    Kapl et al. 2026 (arXiv 2602.16490) fine-tune on 64, 128, 256 and 512 examples of `assign_code_1` and
    `assign_code_2`; the fewer are the first of the more. They are also the first of a training source
    of the same primitives and seed: take another seed.

    Raises `UserError` where `count` cannot be shared equally.
    """
    require(
        count > 0 and len(names) > 0 and count % len(names) == 0,
        "count",
        count,
        f"must be a positive multiple of the number of primitives, {len(names)}",
    )
    shares = [
        [e.text for e in itertools.islice(examples(name, seed, "train"), count // len(names))]
        for name in names
    ]
    return [text for row in zip(*shares, strict=True) for text in row]


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
