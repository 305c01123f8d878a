"""Uncertainty of a mean over examples."""

import numpy as np


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
    draws = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    means = values[draws].sum(axis=1) / weights[draws].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
