"""Accuracies, perplexities and paired comparisons: by hand, and against scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from depthgrow_jax.evals import metrics
from depthgrow_jax.evals.items import Choice, Completion, Substitution


def test_accuracy():
    correct = np.random.default_rng(0).random(400) < 0.3
    found = metrics.accuracy(correct.tolist())
    assert (found.mean, found.n) == (pytest.approx(correct.mean()), 400)
    assert found.stderr == pytest.approx(scipy.stats.sem(correct))
    # The percentile bootstrap of a mean over many items is close to the normal interval.
    assert found.low == pytest.approx(found.mean - 1.96 * found.stderr, abs=0.006)
    assert found.high == pytest.approx(found.mean + 1.96 * found.stderr, abs=0.006)


def test_accuracy_of_one_item_has_no_interval():
    found = metrics.accuracy([1.0])
    assert (found.mean, found.n) == (1.0, 1)
    assert all(math.isnan(value) for value in (found.stderr, found.low, found.high))


def test_perplexity_of_words():
    found = metrics.perplexity([-math.log(2), -math.log(8)])
    assert found.mean == pytest.approx(4.0)  # the geometric mean
    # sd of the exponent (log 2 and 3 log 2) is log(2) * sqrt(2); over sqrt(2) items; times the perplexity
    assert found.stderr == pytest.approx(4 * math.log(2))
    assert found.low == pytest.approx(2.0) and found.high == pytest.approx(8.0)


def test_a_perplexity_beyond_a_float_is_infinite():
    assert metrics.perplexity([-800.0, -900.0]).mean == math.inf


def test_perplexity_of_tokens_weighs_items_by_their_length():
    assert metrics.perplexity([-math.log(2), -3 * math.log(8)], [1, 3]).mean == pytest.approx(2**2.5)
    equal = metrics.perplexity([-2 * math.log(5), -7 * math.log(5)], [2, 7])
    assert equal[0] == pytest.approx(5) and equal.stderr == pytest.approx(0, abs=1e-9)


def test_chance():
    items = [
        Choice("p", ("a", "b"), 0),
        Choice("p", ("a", "b", "c", "d"), 0),
        Substitution(("a", "b"), "t", 0),
    ]
    assert metrics.chance(items) == pytest.approx((1 / 2 + 1 / 4 + 1 / 2) / 3)
    assert math.isnan(metrics.chance([Completion("p", "t")]))


def test_choose():
    assert metrics.choose([-4.0, -3.0, -12.0]) == 1
    assert metrics.choose([-1.0, -1.0]) == 0


def test_ties_share_the_credit():
    assert metrics.credit([-1.0, -2.0], 0) == 1.0
    assert metrics.credit([-1.0, -2.0], 1) == 0.0
    assert metrics.credit([-1.0, -2.0, -1.0, -1.0], 2) == pytest.approx(1 / 3)
    assert metrics.credit([-4.0, -2.0], 1, [2, 1]) == 0.5
    assert metrics.credit([-30.0, -30.0 - 1e-6], 1) == 0.5  # rounding
    assert metrics.credit([-30.0, -30.001], 1) == 0.0


def outcomes(both, only_a, only_b, neither):
    a = [1.0] * (both + only_a) + [0.0] * (only_b + neither)
    b = [1.0] * both + [0.0] * only_a + [1.0] * only_b + [0.0] * neither
    return a, b


@pytest.mark.parametrize(("only_a", "only_b"), [(1, 9), (12, 12), (0, 5), (7, 6), (24, 0)])
def test_few_pairs_get_the_exact_test(only_a, only_b):
    found = metrics.paired(*outcomes(10, only_a, only_b, 20))
    assert (found.only_a, found.only_b) == (only_a, only_b)
    assert found.p == pytest.approx(scipy.stats.binomtest(only_a, only_a + only_b, 0.5).pvalue)


@pytest.mark.parametrize(("only_a", "only_b"), [(25, 0), (10, 15), (60, 90), (50, 50)])
def test_many_pairs_get_mcnemars_statistic(only_a, only_b):
    found = metrics.paired(*outcomes(10, only_a, only_b, 20))
    expected = max(abs(only_a - only_b) - 1, 0) ** 2 / (only_a + only_b)
    assert found.statistic == pytest.approx(expected)
    assert found.p == pytest.approx(scipy.stats.chi2.sf(expected, df=1))


def test_mcnemars_statistic_by_hand():
    assert metrics.paired(*outcomes(0, 30, 10, 0)).statistic == pytest.approx(19**2 / 40)


def test_paired_difference():
    a, b = outcomes(100, 40, 20, 40)
    found = metrics.paired(a, b)
    assert (found.n, found.difference) == (200, pytest.approx(0.1))
    assert found.stderr == pytest.approx(scipy.stats.sem(np.subtract(a, b)))
    # Far smaller than that of two independent accuracies.
    assert found.low == pytest.approx(0.1 - 1.96 * found.stderr, abs=0.01)
    assert found.high == pytest.approx(0.1 + 1.96 * found.stderr, abs=0.01)
    assert metrics.paired(b, a).difference == pytest.approx(-0.1)


def test_models_that_never_differ():
    found = metrics.paired([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (found.difference, found.p) == (0.0, 1.0)
    assert math.isnan(found.statistic)


def test_outcomes_of_different_items_are_not_compared():
    with pytest.raises(ValueError, match="3 and 2 items"):
        metrics.paired([1.0, 0.0, 1.0], [1.0, 0.0])
