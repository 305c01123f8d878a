"""The bootstrap interval: covers as it says, weighs examples, and is the same at every call."""

import numpy as np

from depthgrow_jax.stats import bootstrap_interval


def test_agrees_with_the_normal_interval_of_a_mean():
    values = np.random.default_rng(0).normal(2.0, 3.0, size=400)
    low, high = bootstrap_interval(values, resamples=4000)
    half = 1.96 * values.std() / np.sqrt(400)
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.05)


def test_covers_at_its_level():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        low, high = bootstrap_interval(rng.normal(size=60), level=0.8, resamples=300)
        hits += low <= 0 <= high
    assert 0.7 < hits / 200 < 0.88


def test_sums_are_divided_by_counts():
    """Examples of equal mean per target give an interval of no width, whatever their lengths."""
    counts = np.array([1.0, 5.0, 2.0, 9.0])
    np.testing.assert_allclose(bootstrap_interval(3.0 * counts, counts), (3.0, 3.0))


def test_one_example_says_nothing_and_draws_are_fixed():
    assert np.isnan(bootstrap_interval(np.array([1.0]))).all()
    values = np.arange(10.0)
    assert bootstrap_interval(values) == bootstrap_interval(values) != bootstrap_interval(values, seed=1)
