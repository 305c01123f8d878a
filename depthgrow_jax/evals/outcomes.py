"""What is asked of a model for each item, and what the item got by the answer."""

from collections.abc import Sequence
from typing import NamedTuple

from depthgrow_jax.evals.answers import grade
from depthgrow_jax.evals.items import Choice, Completion, Item, Question, Substitution
from depthgrow_jax.evals.metrics import choose, credit
from depthgrow_jax.evals.scoring import Likelihood
from depthgrow_jax.evals.task import Task


class Outcome(NamedTuple):
    """What one item got.

    Attributes:
      scores: by metric. `accuracy` and `exact` are 0 or 1 (shared by ties), F1 between; `log_prob` is that of
        the right answer, nats.
      prediction: what the model chose, or the answer in what it wrote.
      log_probs: of every choice, nats.
      text: what the model wrote.
    """

    scores: dict[str, float]
    prediction: str
    log_probs: tuple[float, ...] = ()
    text: str = ""


def pairs_of(item: Item) -> list[tuple[str, str]]:
    """(prompt, continuation) whose likelihoods decide an item; a question has none, its answer is written."""
    if isinstance(item, Choice):
        return [(item.prompt, choice) for choice in item.choices]
    if isinstance(item, Substitution):
        return [(prompt, item.target) for prompt in item.prompts]
    if isinstance(item, Completion):
        return [(item.prompt, item.target)]
    return []


def outcome_of(item: Item, likelihoods: Sequence[Likelihood]) -> Outcome:
    """The outcome of an item that is decided by likelihoods.

    `accuracy_norm` divides the log likelihood of a choice by its number of characters, as
    lm-evaluation-harness does: a long choice is not unlikely for being long. Ties share the credit.
    """
    log_prob = [likelihood.log_prob for likelihood in likelihoods]
    if isinstance(item, Completion):
        greedy = likelihoods[0].greedy
        return Outcome({"accuracy": float(greedy), "log_prob": log_prob[0]}, item.target if greedy else "")
    assert isinstance(item, Choice | Substitution)
    scores = {"accuracy": credit(log_prob, item.gold), "log_prob": log_prob[item.gold]}
    if isinstance(item, Substitution):
        return Outcome(scores, item.prompts[choose(log_prob)], tuple(log_prob))
    lengths = [max(len(choice.strip()), 1) for choice in item.choices]
    scores["accuracy_norm"] = credit(log_prob, item.gold, lengths)
    return Outcome(scores, item.choices[choose(log_prob)], tuple(log_prob))


def answer_of(task: Task, item: Question, text: str) -> Outcome:
    """The outcome of a question, of what the model wrote."""
    found, scores = grade(task, text, item)
    return Outcome(scores, found or "", text=text)
