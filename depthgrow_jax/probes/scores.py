"""Scalars of depth use, several definitions side by side, from the answers of the other probes.

They disagree, which is the point of showing them together. All have intervals over examples, a value in
[0, 1] beside their own, and, where they weigh layers by position, a null from shuffled layers.
"""

from collections.abc import Mapping

import numpy as np
from scipy.stats import rankdata

from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.config import ScoresConfig
from depthgrow_jax.probes.result import Quantity, Result, Score, layer_axis, score

NEEDED = {
    "ablation": ("future.layer.prob_l2", "future.layer.effect", "current.layer.loss_increase"),
    "geometry": ("cosine.attention", "cosine.mlp", "cosine.layer", "block_influence"),
    "logit_lens": ("kl_reverse", "topk_overlap"),
}


def center_of_mass(weights: np.ndarray) -> np.ndarray:
    """sum_s s w_s / sum_s w_s over the last axis, layers counted from 0; nan where nothing weighs."""
    total = weights.sum(axis=-1)
    moment = weights @ np.arange(weights.shape[-1], dtype=np.float64)
    return np.where(total > 0, moment / np.where(total > 0, total, 1.0), np.nan)


def mean_effect(effect: np.ndarray) -> np.ndarray:
    """e_s = sum_l E[s, l] / max(K - 1 - s, 1): `[..., K, K]` to `[..., K]` (Csordas et al.)."""
    steps = effect.shape[-1]
    return effect.sum(axis=-1) / np.maximum(steps - 1 - np.arange(steps), 1)


def last_sign_change(curve: np.ndarray) -> np.ndarray:
    """The last layer l with curve[l - 1] < 0 <= curve[l], over the last axis; nan where there is none."""
    steps = curve.shape[-1]
    rises = (curve[..., :-1] < 0) & (curve[..., 1:] >= 0)
    last = steps - 1 - np.argmax(rises[..., ::-1], axis=-1)
    return np.where(rises.any(axis=-1), last, np.nan)


def first_true(found: np.ndarray) -> np.ndarray:
    """Index of the first True over the last axis; its length where there is none."""
    return np.where(found.any(axis=-1), np.argmax(found, axis=-1), found.shape[-1])


def rank_correlation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Spearman's correlation over the last axis; nan where one side is constant."""
    one, other = (rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2 for x in (one, other))
    scale = np.sqrt((one**2).sum(axis=-1) * (other**2).sum(axis=-1))
    return np.where(scale > 0, (one * other).sum(axis=-1) / np.where(scale > 0, scale, 1.0), np.nan)


def check(results: Mapping[str, Result]) -> None:
    """Raises `UserError` naming the probes and quantities that scores are made of and that are missing."""
    for probe, names in NEEDED.items():
        if probe not in results:
            raise UserError(
                f"probe.probes: scores needs the results of {', '.join(NEEDED)}; {probe} is missing"
            )
        for name in names:
            if name not in results[probe].quantities:
                raise UserError(
                    f"probe.probes: scores needs the quantity {name} of {probe}, which was not measured"
                )


def scores(results: Mapping[str, Result], config: ScoresConfig) -> Result:
    """Scalars from the results of `ablation`, `geometry` and `logit_lens` on the same prompts.

    Depth scores (0 to K - 1): `depth_score` (Kapl et al., arXiv 2512.08819) weighs layer s by the mean over
    examples of the maximum over tokens of ||p - p_without_s||_2, future mode; `depth_score.output_max` takes
    the maximum over examples too; `depth_score.effect_mean`, `depth_score.effect_max` (Csordas et al., arXiv
    2505.13898) weigh it by its mean effect on later layers.

    Effective depths (arXiv 2512.14064), 1 to K: the layer after which `cosine` of the contributions with the
    stream turns positive for good, the lens `kl` has fallen below a threshold, the lens `overlap` has risen
    above one.

    Copies, so that one page shows all: `lens_kl_area`, `second_half_share.*`, `residual_growth`. And rank
    correlations over layers of the loss increase of skipping with block influence, and with the first-order
    estimate where `gradients` is among the results.

    Raises `UserError` as `check` does, and for results over different numbers of examples.
    """
    check(results)
    used = {name: results[name] for name in (*NEEDED, "gradients") if name in results}
    examples = {result.examples for result in used.values()}
    if len(examples) > 1:
        raise UserError(
            f"probe.probes: scores needs results on the same prompts, got {sorted(examples)} examples"
        )
    ablated, geometry, lens = (results[name] for name in NEEDED)
    steps = ablated.steps
    made = _depth_scores(ablated, steps, config) | _effective_depths(geometry, lens, steps, config)
    made["lens_kl_area"] = lens.scores["lens_kl_area"]
    made |= {name: value for name, value in ablated.scores.items() if name.startswith("second_half_share")}
    made["residual_growth"] = geometry.scores["residual_growth"]
    damage = ablated.quantities["current.layer.loss_increase"]
    made["rank_correlation.block_influence"] = _correlation(
        damage, geometry.quantities["block_influence"], "block influence 1 - cos(h_l, h_l+1)"
    )
    if "gradients" in results:
        made["rank_correlation.first_order"] = _correlation(
            damage, results["gradients"].quantities["first_order.loss_increase"], "its first-order estimate"
        )
    conventions: dict[str, str] = {}
    for name, result in used.items():
        conventions |= {f"{name}: {key}": words for key, words in result.conventions.items()}
    conventions["thresholds"] = (
        f"kl below {config.kl_threshold} of its maximum, overlap above {config.overlap_threshold}"
    )
    return Result(
        probe="scores",
        steps=steps,
        axes={"layer": layer_axis(steps)},
        quantities={},
        conventions=conventions,
        examples=ablated.examples,
        tokens=ablated.tokens,
        scores=made,
    )


def _depth_scores(ablated: Result, steps: int, config: ScoresConfig) -> dict[str, Score]:
    output = ablated.quantities["future.layer.prob_l2"].by_example["max"]
    effect = ablated.quantities["future.layer.effect"].by_example["max"]
    scale = (0.0, float(max(steps - 1, 1)))

    def one(values, weigh, reduce, words):
        weights = weigh(values.mean(axis=0) if reduce == "mean" else values.max(axis=0))
        rng = np.random.default_rng(config.seed)
        shuffled = np.stack([rng.permutation(weights) for _ in range(config.shuffles)])
        null = center_of_mass(shuffled)
        return score(
            lambda reduced: center_of_mass(weigh(reduced)),
            [values],
            f"sum of s w_s / sum of w_s, s from 0; w_s = {words}",
            over_examples=reduce,
            scale=scale,
            null=null if np.isfinite(null).all() else None,
        )

    as_is = lambda d: d  # noqa: E731
    d = "maximum over tokens of ||p - p_without_s||_2, future mode"
    e = "sum over later layers of the maximum over tokens of the effect, future mode, / max(K - 1 - s, 1)"
    mean, largest = (f"{e}, {how} over examples (arXiv 2505.13898)" for how in ("mean", "maximum"))
    return {
        "depth_score": one(output, as_is, "mean", f"mean over examples of the {d} (arXiv 2512.08819)"),
        "depth_score.output_max": one(output, as_is, "max", f"maximum over examples of the {d}"),
        "depth_score.effect_mean": one(effect, mean_effect, "mean", mean),
        "depth_score.effect_max": one(effect, mean_effect, "max", largest),
    }


def _effective_depths(geometry: Result, lens: Result, steps: int, config: ScoresConfig) -> dict[str, Score]:
    scale = (0.0, float(steps))
    cosines = [geometry.quantities[f"cosine.{part}"] for part in ("attention", "mlp", "layer")]

    def one(fn, quantities: list[Quantity], words: str) -> Score:
        return score(
            lambda *means: np.minimum(fn(*means) + 1, steps),
            [q.by_example["mean"] for q in quantities],
            f"l + 1, l = {words} (arXiv 2512.14064)",
            weights=[q.weights for q in quantities],
            scale=scale,
        )

    def kl_is_small(kl):
        inputs = kl[:, :steps]  # of the layers; the last point is the model itself
        return inputs < config.kl_threshold * inputs.max(axis=1, keepdims=True)

    return {
        "effective_depth.cosine": one(
            lambda a, m, c: last_sign_change((a + m + c) / 3),
            cosines,
            "last layer at which the mean of cos(a, h), cos(m, h + a), cos(a + m, h) turns from below 0; "
            "nan without such a layer",
        ),
        "effective_depth.kl": one(
            lambda kl: first_true(kl_is_small(kl)),
            [lens.quantities["kl_reverse"]],
            f"first layer whose input has KL(lens || final) below {config.kl_threshold} of the maximum",
        ),
        "effective_depth.overlap": one(
            lambda overlap: first_true(overlap[:, :steps] > config.overlap_threshold),
            [lens.quantities["topk_overlap"]],
            f"first layer whose input has a top-k overlap above {config.overlap_threshold}",
        ),
    }


def _correlation(damage: Quantity, other: Quantity, words: str) -> Score:
    return score(
        rank_correlation,
        [damage.by_example["mean"], other.by_example["mean"]],
        f"Spearman correlation over layers of the loss increase of skipping (current mode) with {words}",
        weights=[damage.weights, other.weights],
        scale=(-1.0, 1.0),
    )
