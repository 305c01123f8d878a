"""Uncertainty of means over examples: one bootstrap for scalars, arrays and scores made of them.

A resample of n examples is n draws with replacement; here it is kept as how often each example was drawn, so
that every mean of a resample is one matrix product.
"""

import numpy as np


def resample_counts(examples: int, *, resamples: int = 1000, seed: int = 0) -> np.ndarray:
    """`[resamples, examples]`: how often each example is drawn (Efron 1979). The same at every call."""
    draws = np.random.default_rng(seed).integers(examples, size=(resamples, examples))
    counts = np.zeros((resamples, examples))
    np.add.at(counts, (np.arange(resamples)[:, None], draws), 1.0)
    return counts


def resampled_means(values: np.ndarray, weights: np.ndarray | None, counts: np.ndarray) -> np.ndarray:
    """Weighted means over the examples of every resample, `[resamples, ...]`.

    Args:
      values: `[n, ...]`, one value of each example.
      weights: `[n]`, for instance its number of tokens; None for ones.
      counts: `[resamples, n]` of `resample_counts`.
    """
    values = np.asarray(values, np.float64)
    weighted = counts if weights is None else counts * np.asarray(weights, np.float64)
    means = weighted @ values.reshape(len(values), -1) / weighted.sum(axis=1, keepdims=True)
    return means.reshape(len(counts), *values.shape[1:])


def interval(resampled: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), the percentile interval over the leading axis."""
    tail = (1 - level) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=0)
    return low, high


def bootstrap_interval(
    values: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of `sum(values) / sum(weights)` over examples (Efron 1979).

    Args:
      values: `[n]` sums of each example.
      weights: `[n]` counts of each example; None for ones, which makes it the interval of the mean.
      level: coverage.

    Returns:
      (low, high); both nan for fewer than two examples.
    """
    values = np.asarray(values, np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, np.float64)
    if len(values) < 2:
        return float("nan"), float("nan")
    counts = resample_counts(len(values), resamples=resamples, seed=seed)
    low, high = interval((counts @ values) / (counts @ weights), level)
    return float(low), float(high)
