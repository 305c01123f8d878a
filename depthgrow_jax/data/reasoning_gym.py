"""Questions of the optional package reasoning-gym, by the name of their generator.

The package draws item i of a data set of seed s from s + i, so neighbouring seeds share items: the seeds used
here are too far apart for that. Questions are split by their content into those to train on and those to ask,
as the examples of `depthgrow_jax.data.primitive_text` are.
"""

import types
from collections.abc import Iterator
from typing import NamedTuple

from depthgrow_jax.data.readers import one_line, optional_package
from depthgrow_jax.data.splits import split_of
from depthgrow_jax.errors import UserError, require

# Some generators make all items of a data set when it is created.
_AT_ONCE = 500
# Seeds of numpy end at 2**32: 2**20 items for each of 2**12 seeds.
_APART, _SEEDS = 2**20, 2**12
# So many items without a new question: there are no more.
_PATIENCE = 4 * _AT_ONCE


class Solved(NamedTuple):
    """A question, ending on `Answer:`, and its answer, which follows after a space."""

    prompt: str
    answer: str

    @property
    def text(self) -> str:
        """The question with its answer."""
        return f"{self.prompt} {self.answer}"


def check(name: str, seed: int, field: str) -> None:
    """Raises `UserError` naming `field` where the package is missing or cannot make `name`; for the seed."""
    _made(name, 1, _first(seed, field), field)


def questions(name: str, seed: int, split: str, field: str) -> Iterator[Solved]:
    """Questions of a generator, none twice; question i is a function of the arguments and i.

    They end where a generator has no more of them (2,000 draws bring nothing new). Raises `UserError` as
    `check`, and for an answer that is not a text (some generators leave it to a program to judge answers).
    """
    seen: set[str] = set()
    drawn_for_nothing = 0
    start = _first(seed, field)
    for first in range(start, start + _APART, _AT_ONCE):
        for entry in _made(name, _AT_ONCE, first, field):
            question, answer = entry["question"].strip(), entry["answer"]
            if not isinstance(answer, str) or not answer.strip():
                raise UserError(f"{field}: the generator {name} has answer={answer!r}: must be a text")
            drawn_for_nothing += 1
            if question not in seen and split_of(question) == split:
                seen.add(question)
                drawn_for_nothing = 0
                yield Solved(f"Question: {question}\nAnswer:", answer.strip())
        if drawn_for_nothing >= _PATIENCE:
            return


def _first(seed: int, field: str) -> int:
    require(0 <= seed < _SEEDS, f"{field}: seed", seed, f"must be from 0 to {_SEEDS - 1}")
    return seed * _APART


def _made(name: str, size: int, seed: int, field: str):
    package = optional_package("reasoning_gym", "reasoning-gym", field)
    try:
        return package.create_dataset(name, size=size, seed=seed)
    # It asserts what it expects of a configuration.
    except (ValueError, AssertionError) as e:
        raise UserError(f"{field}: {one_line(e)}; names: {', '.join(_names(package))}") from e


def _names(package: types.ModuleType) -> list[str]:
    return sorted(package.factory.DATASETS)
