"""The one shape of every probe's answer, and how examples become numbers with intervals.

A probe measures values at tokens. They are reduced twice, and each reduction is named: over the counted
tokens of one example (mean, median, p95, max), then over examples.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from depthgrow_jax.stats import interval, resample_counts, resampled_means

TOKEN_STATISTICS = ("mean", "median", "p95", "max")
RESAMPLES = 1000


class Axis(NamedTuple):
    """Coordinates along one axis of a quantity, and the same in [0, 1] where depth can be compared."""

    values: np.ndarray
    normalised: np.ndarray | None = None


def layer_axis(steps: int) -> Axis:
    """Layers 0..K-1; normalised to the middle of each layer, (l + 1/2) / K."""
    return Axis(np.arange(steps), (np.arange(steps) + 0.5) / steps)


def stream_axis(steps: int) -> Axis:
    """Points h_0..h_K of the residual stream; normalised l / K."""
    return Axis(np.arange(steps + 1), np.arange(steps + 1) / steps)


class Quantity(NamedTuple):
    """One measured quantity.

    Attributes:
      axes: names of its axes, keys of `Result.axes`.
      unit: of its values.
      statistics: name -> `[*axes]`. `mean` always; with examples also `mean_low`, `mean_high`. Quantities of
        tokens add `median` and `p95` (means over examples of the example's own, each with `_low`, `_high`),
        `max` (over everything) and `mean_of_max` (mean over examples of the example's maximum, with its
        interval). `max` has no interval: the bootstrap does not cover extremes.
      by_example: name of a token statistic -> `[P, *axes]`.
      noise_floor: the largest absolute value that a no-op intervention gives through the same kernels.
      weights: `[P]` of the examples in `mean`, None for equal.
    """

    axes: tuple[str, ...]
    unit: str
    statistics: dict[str, np.ndarray]
    by_example: dict[str, np.ndarray] = {}  # noqa: RUF012
    noise_floor: float | None = None
    weights: np.ndarray | None = None


class Score(NamedTuple):
    """A scalar with its interval, also normalised to [0, 1], and what it would be without structure.

    `null` is the interval of the score when layers are shuffled; `definition` says the formula.
    """

    value: float
    low: float
    high: float
    normalised: float
    normalised_low: float
    normalised_high: float
    definition: str
    null_low: float = float("nan")
    null_high: float = float("nan")


class Result(NamedTuple):
    """What a probe returns.

    Attributes:
      probe: its name.
      steps: K, the layers that ran.
      axes: name -> coordinates.
      quantities, scores: name -> value.
      conventions: what must agree for two results to be compared: name -> words.
      examples, tokens: how many were counted (tokens: the largest count of any quantity).
      notes: anything else worth keeping, as JSON values.
      arrays: parameters that the probe fitted (a tuned lens), not statistics.
    """

    probe: str
    steps: int
    axes: dict[str, Axis]
    quantities: dict[str, Quantity]
    conventions: dict[str, str]
    examples: int
    tokens: int
    scores: dict[str, Score] = {}  # noqa: RUF012
    notes: dict[str, Any] = {}  # noqa: RUF012
    arrays: dict[str, np.ndarray] = {}  # noqa: RUF012


def over_tokens(values: jax.Array, counted: jax.Array) -> jax.Array:
    """The four `TOKEN_STATISTICS` over the last axis, `[4, ...]`, float32.

    Args:
      values: `[..., n]`.
      counted: bool, broadcastable to `values`; the others are left out. Where none is counted: 0.

    Quantiles interpolate linearly between order statistics, as `numpy.quantile` does.
    """
    values = values.astype(jnp.float32)
    counted = jnp.broadcast_to(counted, values.shape)
    number = jnp.sum(counted, axis=-1)
    mean = jnp.sum(jnp.where(counted, values, 0.0), axis=-1) / jnp.maximum(number, 1)
    ordered = jnp.sort(jnp.where(counted, values, jnp.inf), axis=-1)

    def quantile(q):
        place = q * jnp.maximum(number - 1, 0).astype(jnp.float32)
        below = jnp.floor(place).astype(jnp.int32)
        above = jnp.ceil(place).astype(jnp.int32)
        low, high = (jnp.take_along_axis(ordered, i[..., None], axis=-1)[..., 0] for i in (below, above))
        return low + (high - low) * (place - below)

    some = number > 0
    statistics = [mean, *(jnp.where(some, quantile(q), 0.0) for q in (0.5, 0.95, 1.0))]
    return jnp.stack(statistics)


def quantity(
    axes: tuple[str, ...],
    unit: str,
    by_example: Mapping[str, np.ndarray],
    weights: np.ndarray | None = None,
    noise_floor: float | None = None,
) -> Quantity:
    """Reduces examples to statistics with 95% bootstrap intervals.

    Args:
      by_example: `mean` alone, or all `TOKEN_STATISTICS`: `[P, *axes]` each.
      weights: `[P]` tokens of each example, so that the mean is over all tokens; None gives every example
        the same weight. Medians, p95 and maxima are always averaged with equal weights.
    """
    by_example = {name: np.asarray(values) for name, values in by_example.items()}
    examples = len(by_example["mean"])
    counts = resample_counts(examples, resamples=RESAMPLES) if examples > 1 else None
    statistics = {}
    for name, values in by_example.items():
        label, share = ("mean_of_max" if name == "max" else name), (weights if name == "mean" else None)
        statistics[label] = resampled_means(values, share, np.ones((1, examples)))[0]
        if counts is None:
            low = high = np.full(values.shape[1:], np.nan)
        else:
            low, high = interval(resampled_means(values, share, counts))
        statistics[f"{label}_low"], statistics[f"{label}_high"] = low, high
        if name == "max":
            statistics["max"] = values.max(axis=0)
    return Quantity(axes, unit, statistics, by_example, noise_floor, weights)


def constant(axes: tuple[str, ...], unit: str, values: np.ndarray) -> Quantity:
    """A quantity that has no examples: of the parameters, or a count."""
    return Quantity(axes, unit, {"mean": np.asarray(values)})


def token_quantity(
    axes: tuple[str, ...],
    unit: str,
    statistics: np.ndarray,
    weights: np.ndarray | None = None,
    noise_floor: float | None = None,
) -> Quantity:
    """`quantity` of what `over_tokens` gave: `[4, P, *axes]`."""
    return quantity(axes, unit, dict(zip(TOKEN_STATISTICS, statistics, strict=True)), weights, noise_floor)


def score(
    fn: Callable[..., np.ndarray],
    by_example: list[np.ndarray],
    definition: str,
    *,
    weights: list[np.ndarray | None] | None = None,
    over_examples: str = "mean",
    scale: tuple[float, float] = (0.0, 1.0),
    null: np.ndarray | None = None,
) -> Score:
    """A scalar function of means (or maxima) over examples, with its bootstrap interval.

    Args:
      fn: takes the reduced arrays, `[R, *axes]` each, and returns `[R]`.
      by_example: arrays `[P, *axes]` over the same examples, resampled together.
      weights: of the examples, one entry an array; None for equal.
      over_examples: `mean` or `max`.
      scale: the values that are 0 and 1 when normalised.
      null: `[R]` values of the score under shuffled layers.

    A score that is not finite in some resamples has no interval.
    """
    shares = weights or [None] * len(by_example)
    examples = len(by_example[0])

    def evaluate(counts):
        pairs = zip(by_example, shares, strict=True)
        if over_examples == "max":
            return np.asarray(fn(*(_resampled_maxima(values, counts) for values, _ in pairs)))
        return np.asarray(fn(*(resampled_means(values, share, counts) for values, share in pairs)))

    value = float(evaluate(np.ones((1, examples)))[0])
    low = high = float("nan")
    if examples > 1:
        resampled = evaluate(resample_counts(examples, resamples=RESAMPLES))
        if np.isfinite(resampled).all():
            low, high = (float(x) for x in interval(resampled))
    bottom, top = scale
    null_low, null_high = (float(x) for x in interval(null)) if null is not None else (float("nan"),) * 2
    return Score(
        value,
        low,
        high,
        normalised=(value - bottom) / (top - bottom),
        normalised_low=(low - bottom) / (top - bottom),
        normalised_high=(high - bottom) / (top - bottom),
        definition=definition,
        null_low=null_low,
        null_high=null_high,
    )


def _resampled_maxima(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Maxima over the examples that each resample drew, `[R, ...]`."""
    maxima = np.full((len(counts), *values.shape[1:]), -np.inf)
    for example, drawn in zip(values, counts.T > 0, strict=True):
        maxima[drawn] = np.maximum(maxima[drawn], example)
    return maxima
