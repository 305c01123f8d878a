"""Accuracies and perplexities with their uncertainty, chance levels, and two models on the same items."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from depthgrow_jax.evals.items import Choice, Item, Substitution
from depthgrow_jax.stats import bootstrap_interval

# Fewer discordant pairs than this: the exact test.
_FEW_PAIRS = 25
# Scores closer than this, relatively, differ by rounding only.
_TIE = 1e-6


class Summary(NamedTuple):
    """A value over `n` items, its standard error and its 95% bootstrap interval (nan for one item)."""

    mean: float
    n: int
    stderr: float
    low: float
    high: float


class Paired(NamedTuple):
    """Model A against model B on the same items.

    Attributes:
      difference, n, stderr, low, high: of A minus B, as in `Summary`.
      only_a, only_b: items on which A did better than B, and B better than A.
      statistic: McNemar's, with continuity correction; nan if the models never differ.
      p: two-sided; exact binomial for fewer than 25 items that differ, else that of `statistic` (chi-square,
        one degree of freedom); 1 if they never differ.
    """

    difference: float
    n: int
    stderr: float
    low: float
    high: float
    only_a: int
    only_b: int
    statistic: float
    p: float


def accuracy(correct: Sequence[float]) -> Summary:
    """Mean of 0/1 outcomes, or of any score of each item (F1); at least one item."""
    values = np.asarray(correct, np.float64)
    low, high = bootstrap_interval(values)
    return Summary(float(values.mean()), len(values), _stderr(values), low, high)


def perplexity(log_probs: Sequence[float], tokens: Sequence[int] | None = None) -> Summary:
    """`exp(-sum(log_probs) / sum(tokens))`; without `tokens`, one an item: LAMBADA's, of a whole word.

    The standard error is that of the exponent times the perplexity (delta method).
    """
    values = -np.asarray(log_probs, np.float64)
    weights = np.ones_like(values) if tokens is None else np.asarray(tokens, np.float64)
    mean = values.sum() / weights.sum()
    with np.errstate(over="ignore"):  # above 709 nats: infinite
        low, high = np.exp(bootstrap_interval(values, weights))
        value = float(np.exp(mean))
    stderr = _stderr((values - mean * weights) / weights.mean())
    return Summary(value, len(values), value * stderr, float(low), float(high))


def chance(items: Sequence[Item]) -> float:
    """Expected accuracy of guessing; nan where there is nothing to choose from."""
    return float(np.mean([1 / size if (size := _size(item)) else math.nan for item in items]))


def choose(scores: Sequence[float]) -> int:
    """Index of the largest score; the first of ties."""
    return int(_best(scores, None)[0])


def credit(scores: Sequence[float], gold: int, lengths: Sequence[int] | None = None) -> float:
    """1 if `gold` is chosen, 1/k if k choices tie and it is one of them, else 0.

    So a model that prefers nothing is at chance, wherever the right choices stand. With `lengths` the scores
    are divided by them; lm-evaluation-harness's `acc_norm` takes characters, without the space in front.
    """
    best = _best(scores, lengths)
    return float(gold in best) / len(best)


def paired(correct_a: Sequence[float], correct_b: Sequence[float]) -> Paired:
    """Compares two models by their outcomes on the same items, in the same order."""
    a, b = np.asarray(correct_a, np.float64), np.asarray(correct_b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"outcomes of {len(a)} and {len(b)} items")
    difference = accuracy((a - b).tolist())
    only_a, only_b = int((a > b).sum()), int((a < b).sum())
    return Paired(*difference, only_a, only_b, *_mcnemar(only_a, only_b))


def _mcnemar(only_a: int, only_b: int) -> tuple[float, float]:
    pairs = only_a + only_b
    if not pairs:
        return math.nan, 1.0
    statistic = max(abs(only_a - only_b) - 1, 0) ** 2 / pairs
    if pairs >= _FEW_PAIRS:
        return statistic, math.erfc(math.sqrt(statistic / 2))
    tail = sum(math.comb(pairs, k) for k in range(min(only_a, only_b) + 1)) / 2**pairs
    return statistic, min(1.0, 2 * tail)


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _size(item: Item) -> int:
    if isinstance(item, Choice):
        return len(item.choices)
    return len(item.prompts) if isinstance(item, Substitution) else 0


def _best(scores: Sequence[float], lengths: Sequence[int] | None) -> np.ndarray:
    values = np.asarray(scores, np.float64)
    if lengths is not None:
        values = values / np.asarray(lengths, np.float64)
    return np.flatnonzero(values >= values.max() - _TIE * abs(values.max()))
