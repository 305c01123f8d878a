"""Items of an evaluation, of four kinds, whatever file or generator they come from.

Texts are exactly what the model reads: white space between a prompt and what follows belongs to one of them.
"""

from typing import NamedTuple


class Choice(NamedTuple):
    """A multiple-choice item: which of `choices` does the model find most likely after `prompt`?

    Attributes:
      prompt: few-shot examples apart.
      choices: the continuations, at least two, different from each other.
      gold: index of the right one.
      group: a subset of the task (a depth, a category), for accuracies apart; empty for none.
      shown: how the item reads as a few-shot example, answer included; empty: `prompt + choices[gold]`.
    """

    prompt: str
    choices: tuple[str, ...]
    gold: int
    group: str = ""
    shown: str = ""


class Substitution(NamedTuple):
    """Partial evaluation (Trinh and Le 2018): after which of `prompts` is `target` most likely?

    The prompts differ in a word, the target is what follows it in all of them; it is scored, they are not.
    """

    prompts: tuple[str, ...]
    target: str
    gold: int
    group: str = ""
    shown: str = ""


class Completion(NamedTuple):
    """Language modelling: how likely is `target` after `prompt`, and is it the greedy continuation?"""

    prompt: str
    target: str
    group: str = ""
    shown: str = ""


class Question(NamedTuple):
    """A question whose answer is generated, extracted, and compared with `answers` (any of them is right)."""

    prompt: str
    answers: tuple[str, ...]
    group: str = ""
    shown: str = ""


Item = Choice | Substitution | Completion | Question


def example(item: Item) -> str:
    """How an item reads as a few-shot example."""
    if item.shown:
        return item.shown
    if isinstance(item, Choice):
        return item.prompt + item.choices[item.gold]
    if isinstance(item, Substitution):
        return item.prompts[item.gold] + item.target
    if isinstance(item, Completion):
        return item.prompt + item.target
    return item.prompt + item.answers[0]
