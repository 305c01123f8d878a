"""Scalars by hand, on small made-up results."""

import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.config import ScoresConfig
from depthgrow_jax.probes.result import Quantity, Result, Score, quantity, token_quantity
from depthgrow_jax.probes.scores import (
    center_of_mass,
    check,
    first_true,
    last_sign_change,
    mean_effect,
    rank_correlation,
    scores,
)

STEPS = 4


def tokens(values: np.ndarray) -> Quantity:
    """A quantity of tokens whose every statistic is `values` `[P, ...]`."""
    return token_quantity(("x",), "", np.stack([np.asarray(values, float)] * 4))


def copied(name: str) -> dict[str, Score]:
    return {name: Score(0.5, 0.4, 0.6, 0.5, 0.4, 0.6, "made up")}


def made_up(probe: str, quantities: dict[str, Quantity], made: dict[str, Score]) -> Result:
    return Result(probe, STEPS, {}, quantities, {"kl": "a direction"}, 2, 10, made)


def results() -> dict[str, Result]:
    output = np.array([[4.0, 2.0, 2.0, 0.0], [0.0, 2.0, 2.0, 4.0]])
    effect = np.zeros((2, STEPS, STEPS))
    effect[:, 0, 1:] = 0.3
    effect[:, 1, 2:] = 0.8
    effect[0, 2, 3], effect[1, 2, 3] = 0.4, 0.8
    loss = tokens([[4.0, 1.0, 2.0, 3.0]] * 2)
    quantities = {
        "future.layer.prob_l2": tokens(output),
        "future.layer.effect": tokens(effect),
        "current.layer.loss_increase": loss,
    }
    curve = tokens([[-1.0, 0.5, -0.2, 0.3]] * 2)
    geometry = {f"cosine.{part}": curve for part in ("attention", "mlp", "layer")}
    geometry["block_influence"] = tokens([[0.9, 0.2, 0.1, 0.3]] * 2)
    lens = {
        "kl_reverse": tokens([[8.0, 6.0, 3.9, 1.0, 0.0]] * 2),
        "topk_overlap": tokens([[0.0, 0.1, 0.25, 0.4, 1.0]] * 2),
    }
    return {
        "ablation": made_up("ablation", quantities, copied("second_half_share.future")),
        "geometry": made_up("geometry", geometry, copied("residual_growth")),
        "logit_lens": made_up("logit_lens", lens, copied("lens_kl_area")),
    }


def test_scores_by_hand():
    made = scores(results(), ScoresConfig()).scores
    # Means 2, 2, 2, 2; maxima 4, 2, 2, 4.
    assert made["depth_score"].value == pytest.approx(1.5)
    assert made["depth_score"].normalised == pytest.approx(0.5)
    assert made["depth_score.output_max"].value == pytest.approx((2 + 4 + 12) / 12)
    # e = 0.9/3, 1.6/2, then 0.6 (mean) or 0.8 (maximum), and 0 for the last layer.
    assert made["depth_score.effect_mean"].value == pytest.approx((0.8 + 1.2) / (0.3 + 0.8 + 0.6))
    assert made["depth_score.effect_max"].value == pytest.approx((0.8 + 1.6) / (0.3 + 0.8 + 0.8))
    assert made["effective_depth.cosine"].value == 4 and made["effective_depth.cosine"].normalised == 1
    assert made["effective_depth.kl"].value == 3  # 3.9 < 0.5 * 8 at layer 2
    assert made["effective_depth.overlap"].value == 4
    # Ranks 4 1 2 3 and 4 2 1 3: 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15).
    assert made["rank_correlation.block_influence"].value == pytest.approx(0.8)
    for name in ("lens_kl_area", "second_half_share.future", "residual_growth"):
        assert made[name].definition == "made up"


def test_intervals_are_those_of_the_four_possible_resamples():
    """Two examples: the mean weights are (4,2,2,0), (2,2,2,2) or (0,2,2,4), with depths 0.75, 1.5, 2.25."""
    made = scores(results(), ScoresConfig()).scores["depth_score"]
    assert (made.low, made.high) == pytest.approx((0.75, 2.25))


def test_the_null_shuffles_layers():
    """All weights equal: every shuffle gives the middle. One heavy layer: its place is uniform."""
    even = scores(results(), ScoresConfig()).scores["depth_score"]
    assert even.null_low == even.null_high == pytest.approx(1.5)
    heavy = results()
    weights = np.array([[0.0, 0.0, 0.0, 1.0]] * 2)
    heavy["ablation"].quantities["future.layer.prob_l2"] = tokens(weights)
    made = scores(heavy, ScoresConfig()).scores["depth_score"]
    assert made.value == 3 and (made.null_low, made.null_high) == (0, 3)


def test_helpers_at_their_edges():
    assert np.isnan(center_of_mass(np.zeros(3)))
    np.testing.assert_allclose(mean_effect(np.ones((2, 2))), [2.0, 2.0])
    assert np.isnan(last_sign_change(np.array([0.1, 0.2, 0.3])))
    assert last_sign_change(np.array([-0.1, 0.2, -0.3, 0.0])) == 3
    assert first_true(np.array([False, False])) == 2 and first_true(np.array([True, False])) == 0
    assert np.isnan(rank_correlation(np.ones(3), np.arange(3.0)))
    assert rank_correlation(np.arange(3.0), -np.arange(3.0)) == -1


def test_what_is_missing_is_named():
    without = results()
    del without["geometry"]
    with pytest.raises(UserError, match="geometry is missing"):
        check(without)
    partly = results()
    del partly["ablation"].quantities["future.layer.effect"]
    with pytest.raises(UserError, match=r"future\.layer\.effect of ablation"):
        check(partly)
    uneven = results()
    uneven["geometry"] = uneven["geometry"]._replace(examples=3)
    with pytest.raises(UserError, match="same prompts"):
        scores(uneven, ScoresConfig())


def test_a_weighted_mean_is_used_where_tokens_are_pooled():
    weighted = results()
    curve = {"mean": np.array([[-1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, 1.0]])}
    for part in ("attention", "mlp", "layer"):
        weighted["geometry"].quantities[f"cosine.{part}"] = quantity(
            ("layer",), "", curve, np.array([3.0, 1.0])
        )
    assert scores(weighted, ScoresConfig()).scores["effective_depth.cosine"].value == 2
