r"""Reasoning primitives as text: copying and variable assignment (Kapl et al. 2025, arXiv 2512.08819).

    copy_random, copy_real    ten words, then five of them in a row: which word comes next?
    assign_FORM_DEPTH         five variables, then DEPTH layers of five aliases: what is the value of one of
                              the last five? FORM is `basic`, `code` or `math`
    psm                       pre-school math (Saunshi et al. 2024, arXiv 2409.19044): two variables and their
                              sum or difference

The papers print samples of copying and of `basic`; `code` and `math` follow a re-implementation. The form of
`psm` is this project's: `k=12`, `j=8`, `l=k+j`, `l=___. ->`, with five consecutive numbers to choose from.

The *content* of an example is its words, or its equations: all but the question and the text around. Its hash
decides the split of the example, so no seed can bring anything of one split into the other: not in another
form, nor with another question.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from depthgrow_jax.data.primitive_words import WORDS
from depthgrow_jax.data.splits import SPLITS, split_of
from depthgrow_jax.errors import UserError, require, require_choice

SEPARATOR = "\n\n"
SHOTS = 5
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LARGEST = 25
_VARIABLES = 5
_WORDS_SHOWN, _WORDS_REPEATED = 10, 5
# Below it five consecutive numbers around a result might have to start below 1.
_SMALLEST_RESULT = 5
_ATTEMPTS = 1000


class Example(NamedTuple):
    """A question with its candidates, in random order, none the beginning of another.

    Without the last condition a shorter candidate would always be at least as likely as a longer one.

    Attributes:
      prompt: ends before the space that every candidate begins with.
      choices: the candidates.
      gold: index of the right one.
      content: what the question is about; see the module.
      questions: every question that this content answers, with its answer and without the content; of the
        assignments only.
    """

    prompt: str
    choices: tuple[str, ...]
    gold: int
    content: str
    questions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The example with its answer."""
        return self.prompt + self.choices[self.gold]


Build = Callable[[random.Random], Example]
Equations = list[tuple[str, object]]


class Form(NamedTuple):
    """How equations, and a question about them, are written; `{}` of `question` is the variable."""

    before: str
    equals: str
    after: str
    question: str

    def content(self, equations: Equations) -> str:
        """All that stands before the question."""
        return f"{self.before}{_lines(equations, self.equals)}{self.after}"


_BASIC = Form("Fill in blank:\n", "=", "\n", "{}=___. ->\nAnswer:")
_CODE = Form(
    "The following is a very short Python program. Use the program to resolve the value of the variable in "
    "the question.\nProgram:\n",
    " = ",
    "\n\nQuestion:\n",
    "What is the value of {}?\nAnswer:",
)
_MATH = Form(
    "The following is a set of simple mathematical equations.\n\n",
    "=",
    "\n",
    "What is the numerical value of {}?\nAnswer:",
)


def examples(name: str, seed: int, split: str) -> Iterator[Example]:
    """Examples without end, no content twice. Example i is a function of the arguments and i.

    Raises `UserError` for an unknown name or split, and where no new content is found.
    """
    require_choice("primitive", name, NAMES)
    require_choice("split", split, SPLITS)
    seen: set[str] = set()
    for index in itertools.count():
        # The standard generator: its `random()` is the same in every version of Python.
        rng = random.Random(f"{name} {seed} {index}")
        for _ in range(_ATTEMPTS):
            example = _BUILDERS[name](rng)
            if example.content not in seen and split_of(example.content) == split:
                break
        else:
            raise UserError(f"primitive={name!r}: has no more than about {index} different examples")
        seen.add(example.content)
        yield example


def documents(
    names: Sequence[str], seed: int, *, count: int = SHOTS + 1, questions: int = 1
) -> Iterator[str]:
    """Training documents without end. Primitives take turns; no content comes twice.

    Args:
      names: primitives.
      seed: of the examples.
      count: solved examples of a document, all of one primitive.
      questions: how often each content is asked about; more than once of the assignments only. The questions
        after the first are drawn with replacement. A small model then sees an answer every few tokens, and
        learns to look them up much sooner.
    """
    streams = [examples(name, seed, "train") for name in names]
    for number, stream in enumerate(itertools.cycle(streams)):
        rng = random.Random(f"questions {seed} {number}")
        solved = itertools.islice(stream, count)
        yield SEPARATOR.join(_with_questions(rng, example, questions - 1) for example in solved)


def names_of(spec: str, field: str) -> tuple[str, ...]:
    """The primitives of a comma-separated list, in which names of `GROUPS` may stand too.

    Raises `UserError` naming `field` for what is neither, and for one that is named twice.
    """
    names: list[str] = []
    for part in (part.strip() for part in spec.split(",")):
        require_choice(field, part, (*GROUPS, *NAMES))
        names += GROUPS.get(part, (part,))
    require(len(set(names)) == len(names), field, spec, "must name a primitive once")
    return tuple(names)


def _with_questions(rng: random.Random, example: Example, more: int) -> str:
    asked = (example.questions[_below(rng, len(example.questions))] for _ in range(more))
    return "\n".join([example.text, *asked])


def _example(
    rng: random.Random, prompt: str, candidates: Sequence[object], gold: object, content: str
) -> Example:
    choices = tuple(f" {candidate}" for candidate in _drawn(rng, candidates, len(candidates)))
    return Example(prompt, choices, choices.index(f" {gold}"), content)


def _copying(words: Callable[[random.Random], list[str]]) -> Build:
    def build(rng: random.Random) -> Example:
        shown = _until_prefix_free(lambda: words(rng))
        start = _below(rng, _WORDS_SHOWN - _WORDS_REPEATED)
        end = start + _WORDS_REPEATED
        content = " ".join(shown)
        prompt = f"Fill in the blank:\n{content} {' '.join(shown[start:end])} ___. ->\nAnswer:"
        return _example(rng, prompt, shown, shown[end], content)

    return build


def _random_words(rng: random.Random) -> list[str]:
    return ["".join(_LETTERS[_below(rng, len(_LETTERS))] for _ in range(3)) for _ in range(_WORDS_SHOWN)]


def _real_words(rng: random.Random) -> list[str]:
    return _drawn(rng, WORDS, _WORDS_SHOWN)


def _assignment(form: Form, depth: int) -> Build:
    def build(rng: random.Random) -> Example:
        letters = _drawn(rng, _LETTERS, _VARIABLES * (depth + 1))
        values = _until_prefix_free(lambda: _drawn(rng, range(1, _LARGEST + 1), _VARIABLES))
        layer = letters[:_VARIABLES]
        value_of = dict(zip(layer, values, strict=True))
        equations: Equations = list(value_of.items())
        for first in range(_VARIABLES, len(letters), _VARIABLES):
            aliases = letters[first : first + _VARIABLES]
            for alias, target in zip(aliases, _drawn(rng, layer, _VARIABLES), strict=True):
                equations.append((alias, target))
                value_of[alias] = value_of[target]
            layer = aliases
        asked = layer[_below(rng, _VARIABLES)]
        prompt = form.content(equations) + form.question.format(asked)
        example = _example(rng, prompt, values, value_of[asked], _lines(equations))
        return example._replace(
            questions=tuple(f"{form.question.format(variable)} {value_of[variable]}" for variable in layer)
        )

    return build


def _lines(equations: Equations, equals: str = "=") -> str:
    return "\n".join(f"{variable}{equals}{value}" for variable, value in equations)


def _psm(rng: random.Random) -> Example:
    first, second, result = _drawn(rng, _LETTERS, 3)
    while True:
        a, b = 1 + _below(rng, _LARGEST), 1 + _below(rng, _LARGEST)
        sign, value = (("+", a + b), ("-", a - b))[_below(rng, 2)]
        if value >= _SMALLEST_RESULT:
            break
    equations: Equations = [(first, a), (second, b)]
    if _below(rng, 2):
        equations.reverse()
    equations.append((result, f"{first}{sign}{second}"))
    # The right one is the smallest, ..., the largest of them equally often: its size says nothing.
    lowest = value - _below(rng, 5)
    prompt = _BASIC.content(equations) + _BASIC.question.format(result)
    return _example(rng, prompt, range(lowest, lowest + 5), value, _lines(equations))


def _below(rng: random.Random, count: int) -> int:
    return int(rng.random() * count)


def _drawn(rng: random.Random, items: Sequence, count: int) -> list:
    """`count` different items in random order."""
    pool = list(items)
    for i in range(count):
        j = i + _below(rng, len(pool) - i)
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]


def _until_prefix_free(draw: Callable[[], list]) -> list:
    while True:
        items = draw()
        ordered = sorted(map(str, items))
        # In this order a text stands right before those that begin with it.
        if not any(later.startswith(earlier) for earlier, later in itertools.pairwise(ordered)):
            return items


_BUILDERS: dict[str, Build] = {
    "copy_random": _copying(_random_words),
    "copy_real": _copying(_real_words),
    **{
        f"assign_{name}_{depth}": _assignment(form, depth)
        for name, form in (("basic", _BASIC), ("code", _CODE), ("math", _MATH))
        for depth in (0, 1, 2)
    },
    "psm": _psm,
}
NAMES = tuple(_BUILDERS)
# `primitives` are the five that Kapl et al. report.
GROUPS = {
    "primitives": ("copy_random", "copy_real", "assign_basic_0", "assign_code_0", "assign_math_0"),
    "all": NAMES,
}
