"""From token values to numbers with intervals."""

import numpy as np
import pytest
import scipy.stats

from depthgrow_jax.probes.result import over_tokens, quantity, score, token_quantity


def test_token_statistics_are_numpys():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 5, 11)).astype(np.float32)
    counted = rng.random((3, 1, 11)) < 0.6
    counted[1] = np.arange(11) == 4  # a single token
    got = np.asarray(over_tokens(values, counted))
    for i in range(3):
        chosen = values[i][:, counted[i, 0]].astype(np.float64)
        expected = [
            chosen.mean(-1),
            np.median(chosen, -1),
            np.quantile(chosen, 0.95, axis=-1),
            chosen.max(-1),
        ]
        np.testing.assert_allclose(got[:, i], expected, rtol=1e-5, atol=1e-6)


def test_nothing_counted_gives_zero():
    assert (np.asarray(over_tokens(np.ones((2, 4), np.float32), np.zeros((2, 4), bool))) == 0).all()


def test_means_pool_tokens_or_examples():
    by_example = {"mean": np.array([[1.0], [4.0]])}
    assert quantity(("x",), "", by_example).statistics["mean"] == pytest.approx(2.5)
    weighted = quantity(("x",), "", by_example, np.array([2.0, 1.0]))
    assert weighted.statistics["mean"] == pytest.approx(2.0)


def test_maxima_of_examples():
    made = token_quantity(
        ("x",), "", np.array([[[1.0], [2.0]], [[1.0], [2.0]], [[1.5], [2.5]], [[3.0], [7.0]]])
    )
    assert made.statistics["max"] == 7 and made.statistics["mean_of_max"] == 5
    assert "max_low" not in made.statistics and made.statistics["p95"] == 2


def test_intervals_agree_with_scipy():
    values = np.random.default_rng(1).lognormal(size=(40, 2))
    made = quantity(("x",), "", {"mean": values})
    for column in range(2):
        reference = scipy.stats.bootstrap(
            (values[:, column],),
            np.mean,
            n_resamples=20000,
            method="percentile",
            rng=np.random.default_rng(2),
        ).confidence_interval
        width = reference.high - reference.low
        assert abs(made.statistics["mean_low"][column] - reference.low) < 0.1 * width
        assert abs(made.statistics["mean_high"][column] - reference.high) < 0.1 * width


def test_one_example_has_no_interval():
    made = quantity(("x",), "", {"mean": np.ones((1, 3))})
    assert np.isnan(made.statistics["mean_low"]).all() and (made.statistics["mean"] == 1).all()


def test_a_score_resamples_its_arrays_together():
    """A ratio of two arrays that are proportional in every example has no spread, whatever is drawn."""
    values = np.random.default_rng(3).lognormal(size=(20, 4))
    made = score(
        lambda a, b: a.sum(axis=1) / b.sum(axis=1),
        [values, 2 * values],
        "ratio",
        scale=(0.0, 2.0),
        null=np.arange(101),
    )
    assert made.value == made.low == made.high == pytest.approx(0.5)
    assert made.normalised == pytest.approx(0.25)
    assert (made.null_low, made.null_high) == pytest.approx((2.5, 97.5))
