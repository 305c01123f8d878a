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
Lines = list[tuple[str, object]]


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


def documents(names: Sequence[str], seed: int, questions: int = 1) -> Iterator[str]:
    """Training documents without end. Primitives take turns; no content comes twice.

    With one question a document is solved examples of one primitive, as many as an evaluation shows. With
    more it is one example of assignments and further questions about the same, drawn with replacement: a
    small model sees an answer every few tokens, and learns to look them up much sooner.
    """
    streams = [examples(name, seed, "train") for name in names]
    for number, stream in enumerate(itertools.cycle(streams)):
        if questions == 1:
            yield SEPARATOR.join(example.text for example in itertools.islice(stream, SHOTS + 1))
            continue
        example = next(stream)
        rng = random.Random(f"questions {seed} {number}")
        asked = [example.questions[_below(rng, len(example.questions))] for _ in range(questions - 1)]
        yield "\n".join([example.text, *asked])


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


def _assignment(form: Callable[[Lines, str], str], depth: int) -> Build:
    def build(rng: random.Random) -> Example:
        letters = _drawn(rng, _LETTERS, _VARIABLES * (depth + 1))
        values = _until_prefix_free(lambda: _drawn(rng, range(1, _LARGEST + 1), _VARIABLES))
        layer = letters[:_VARIABLES]
        value_of = dict(zip(layer, values, strict=True))
        lines: Lines = list(value_of.items())
        for first in range(_VARIABLES, len(letters), _VARIABLES):
            aliases = letters[first : first + _VARIABLES]
            for alias, target in zip(aliases, _drawn(rng, layer, _VARIABLES), strict=True):
                lines.append((alias, target))
                value_of[alias] = value_of[target]
            layer = aliases
        asked = layer[_below(rng, _VARIABLES)]
        example = _example(rng, form(lines, asked), values, value_of[asked], _equations(lines))
        return example._replace(questions=tuple(f"{_question(form, lines, v)} {value_of[v]}" for v in layer))

    return build


def _question(form: Callable[[Lines, str], str], lines: Lines, asked: str) -> str:
    """The last lines of a form, from where the question begins: what differs between two questions."""
    whole, other = form(lines, asked), form(lines, "?")
    first = next(i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b)
    return whole[whole.rindex("\n", 0, first) + 1 :]


def _equations(lines: Lines, equals: str = "=") -> str:
    return "\n".join(f"{variable}{equals}{value}" for variable, value in lines)


def _basic(lines: Lines, asked: str) -> str:
    return f"Fill in blank:\n{_equations(lines)}\n{asked}=___. ->\nAnswer:"


def _code(lines: Lines, asked: str) -> str:
    return (
        "The following is a very short Python program. Use the program to resolve the value of the variable "
        f"in the question.\nProgram:\n{_equations(lines, ' = ')}\n\n"
        f"Question:\nWhat is the value of {asked}?\nAnswer:"
    )


def _math(lines: Lines, asked: str) -> str:
    return (
        f"The following is a set of simple mathematical equations.\n\n{_equations(lines)}\n"
        f"What is the numerical value of {asked}?\nAnswer:"
    )


def _psm(rng: random.Random) -> Example:
    first, second, result = _drawn(rng, _LETTERS, 3)
    while True:
        a, b = 1 + _below(rng, _LARGEST), 1 + _below(rng, _LARGEST)
        sign, value = (("+", a + b), ("-", a - b))[_below(rng, 2)]
        if value >= _SMALLEST_RESULT:
            break
    lines: Lines = [(first, a), (second, b)]
    if _below(rng, 2):
        lines.reverse()
    lines.append((result, f"{first}{sign}{second}"))
    # The right one is the smallest, ..., the largest of them equally often: its size says nothing.
    lowest = value - _below(rng, 5)
    return _example(rng, _basic(lines, result), range(lowest, lowest + 5), value, _equations(lines))


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
        for name, form in (("basic", _basic), ("code", _code), ("math", _math))
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
