"""The logit lens against dense float64 arithmetic on the logits of early exits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models
from scipy.spatial.distance import jensenshannon
from scipy.special import log_softmax, rel_entr

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes import lens
from depthgrow_jax.probes.config import LensConfig
from depthgrow_jax.probes.inputs import Prompts, Subject
from depthgrow_jax.probes.settings import Settings

SETTINGS = Settings(batch_size=2)
CONFIG = LensConfig(top_k=4)
PROMPTS = toy_models.ragged()
ORDER = (2, 0, 2, 1)


@functools.cache
def subject_of(name):
    """A network of `ARCHITECTURES`, one that runs four steps over its three layers, or one in bfloat16."""
    if name == "reordered":
        subject = toy_models.subject(**toy_models.ARCHITECTURES["sandwich"])
        return subject._replace(program=model.reorder(subject.program, ORDER))
    if name == "bfloat16":
        return toy_models.subject(dtype="bfloat16")
    return toy_models.subject(**toy_models.ARCHITECTURES[name])


@functools.cache
def result_of(name):
    return lens.logit_lens(subject_of(name), PROMPTS, SETTINGS, CONFIG)


@functools.cache
def exits(name):
    """Float64 logits `[K+1, P, T, V]` of the network cut off after every number of steps."""
    cfg, params, program = subject_of(name)[:3]
    tokens = jnp.asarray(PROMPTS.inputs)
    cut = jax.jit(lambda stop: model.apply(cfg, params, tokens, program=program, stop=stop).logits)
    return np.stack([np.asarray(cut(stop), np.float64) for stop in range(program.steps + 1)])


def dense(logits, final, targets, k):
    """Every measure of one token, from float64 logits `[V]`."""
    log_q, log_p = log_softmax(logits), log_softmax(final)
    q, p = np.exp(log_q), np.exp(log_p)
    first = int(np.argmax(final))
    top_q, top_p = (set(np.argsort(-x, kind="stable")[:k].tolist()) for x in (logits, final))
    return {
        "kl": rel_entr(p, q).sum(),
        "kl_reverse": rel_entr(q, p).sum(),
        "js": jensenshannon(p, q) ** 2,
        "top1_agreement": float(np.argmax(logits) == first),
        "topk_overlap": len(top_q & top_p) / k,
        "rank": float(1 + sum(x >= logits[first] for v, x in enumerate(logits) if v != first)),
        "entropy": -(q * log_q).sum(),
        "loss": -log_q[targets],
        "accuracy": float(np.argmax(logits) == targets),
    }


@pytest.mark.parametrize("name", [*toy_models.EVERY, "reordered"])
def test_every_measure_of_every_token(name):
    result, logits = result_of(name), exits(name)
    # Every position that is not padding has a target; the first of each prompt is not counted.
    sizes = PROMPTS.lengths - 1
    assert result.tokens == sizes.sum() and result.examples == 3 and result.steps == len(logits) - 1
    for name_of_measure in lens.MEASURES:
        quantity = result.quantities[name_of_measure]
        assert quantity.axes == ("stream",)
        for point in range(len(logits)):
            by_example = []
            for row in range(3):
                tokens = range(1, int(PROMPTS.lengths[row]))
                values = [
                    dense(logits[point, row, t], logits[-1, row, t], PROMPTS.targets[row, t], CONFIG.top_k)[
                        name_of_measure
                    ]
                    for t in tokens
                ]
                by_example.append(values)
                for statistic, expected in (
                    ("mean", np.mean(values)),
                    ("median", np.median(values)),
                    ("p95", np.quantile(values, 0.95)),
                    ("max", np.max(values)),
                ):
                    got = quantity.by_example[statistic][row, point]
                    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-6)
            pooled = np.mean(np.concatenate(by_example))
            np.testing.assert_allclose(quantity.statistics["mean"][point], pooled, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", toy_models.EVERY)
def test_after_the_last_layer_the_lens_is_the_model(name):
    result = result_of(name)
    for measure in lens.DIVERGENCES:
        assert result.quantities[measure].noise_floor == 0
        for values in result.quantities[measure].by_example.values():
            assert (values[:, -1] == 0).all() and (np.abs(values[:, 0]) > 1e-3).all()
    for measure in ("top1_agreement", "topk_overlap", "rank"):
        for values in result.quantities[measure].by_example.values():
            assert (values[:, -1] == 1).all()


def test_rounding_in_bfloat16_is_reported():
    result = result_of("bfloat16")
    for measure in lens.DIVERGENCES:
        assert result.quantities[measure].noise_floor < 1e-6
        assert result.quantities[measure].statistics["mean"][0] > 1e-2
    for measure in ("top1_agreement", "topk_overlap", "rank"):
        assert (result.quantities[measure].by_example["mean"][:, -1] == 1).all()


@pytest.mark.parametrize("name", ["pre", "reordered"])
def test_stable_depth_is_counted_from_the_end(name):
    result, logits = result_of(name), exits(name)
    top = logits.argmax(axis=-1)
    depths = np.zeros(top.shape[1:], int)
    for point in reversed(range(len(top))):
        depths[(top[point:] == top[-1]).all(axis=0)] = point
    for row in range(3):
        counted = depths[row, 1 : PROMPTS.lengths[row]]
        share = result.quantities["stable_depth.share"].by_example["mean"][row]
        np.testing.assert_allclose(share, [np.mean(counted == point) for point in range(len(top))], rtol=1e-6)
        np.testing.assert_allclose(
            result.quantities["stable_depth"].by_example["mean"][row], counted.mean(), rtol=1e-6
        )
        assert result.quantities["stable_depth"].by_example["max"][row] == counted.max()
    assert result.quantities["stable_depth"].axes == ()
    np.testing.assert_allclose(result.quantities["stable_depth.share"].statistics["mean"].sum(), 1, rtol=1e-6)


def test_stable_depth_by_hand():
    # Columns: always; only at the end; agrees, leaves, returns; from point 1 on; never (only in rounding).
    agreement = np.array(
        [
            [1, 0, 1, 0, 0],
            [1, 0, 0, 1, 0],
            [1, 0, 1, 1, 0],
            [1, 1, 1, 1, 0],
        ],
        np.float32,
    )
    np.testing.assert_array_equal(lens.stable_depth(jnp.asarray(agreement[:, None]))[0], [0, 3, 2, 1, 3])


@pytest.mark.parametrize(("batch_size", "chunk_bytes"), [(2, 1), (2, 7 * 2 * 37 * 4), (8, 8 << 20)])
def test_blocks_and_batches_change_nothing(batch_size, chunk_bytes):
    settings = Settings(batch_size=batch_size, chunk_bytes=chunk_bytes)
    result = lens.logit_lens(subject_of("post"), PROMPTS, settings, CONFIG)
    for name, quantity in result_of("post").quantities.items():
        for statistic, values in quantity.by_example.items():
            got = result.quantities[name].by_example[statistic]
            np.testing.assert_allclose(got, values, rtol=1e-4, atol=1e-6, err_msg=name)


def test_padding_changes_nothing():
    noise = toy_models.text(3, seed=7)
    hidden = Prompts(
        np.where(PROMPTS.valid, PROMPTS.inputs, noise.inputs),
        np.where(PROMPTS.valid, PROMPTS.targets, noise.targets),
        *PROMPTS[2:],
    )
    assert (hidden.inputs != PROMPTS.inputs).any()
    result = lens.logit_lens(subject_of("pre"), hidden, SETTINGS, CONFIG)
    for name, quantity in result_of("pre").quantities.items():
        for statistic, values in quantity.by_example.items():
            np.testing.assert_array_equal(result.quantities[name].by_example[statistic], values)


def test_an_empty_stream_predicts_everything_alike():
    subject = subject_of("pre_lns")
    final = jax.random.normal(jax.random.key(1), (2, 5, 16))
    found = lens.compare(
        subject.cfg,
        subject.params,
        final,
        jnp.stack([0 * final, final]),
        jnp.zeros((2, 5), int),
        4,
        8 << 20,
    )
    uniform = np.log(toy_models.VOCABULARY)
    np.testing.assert_allclose(found["loss"][0], uniform, rtol=1e-6)
    np.testing.assert_allclose(found["entropy"][0], uniform, rtol=1e-6)
    np.testing.assert_allclose(found["kl"][0], uniform - found["entropy"][1], rtol=1e-4)
    # All tokens tie: the final top-1 comes last, though a sort would list some token first.
    np.testing.assert_array_equal(found["rank"][0], toy_models.VOCABULARY)


def test_certain_and_disagreeing_predictions_stay_finite():
    subject = subject_of("pre_lns")
    head = subject.params["head"]
    louder = subject.params | {"head": head | {"kernel": 200 * head["kernel"]}}
    subject = subject._replace(params=louder)
    quantities = lens.logit_lens(subject, PROMPTS, SETTINGS, CONFIG).quantities
    # Probabilities underflow: the divergence of distributions without common support is ln 2.
    assert quantities["kl"].statistics["max"][0] > 200
    np.testing.assert_allclose(quantities["js"].statistics["max"][0], np.log(2), rtol=1e-5)
    for quantity in quantities.values():
        assert np.isfinite(quantity.by_example["mean"]).all()


def test_area_under_the_curve():
    curves = np.array([[4.0, 2.0, 0.0], [4.0, 0.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(lens.kl_area(curves), [0.5, 0.25, 0.625, 0.0])


def test_score_is_the_area_of_the_pooled_curve():
    result = result_of("sandwich")
    kl = result.quantities["kl"].statistics["mean"]
    area = sum((kl[i] + kl[i + 1]) / 2 for i in range(3)) / 3 / max(kl)
    score = result.scores["lens_kl_area"]
    np.testing.assert_allclose(score.value, area, rtol=1e-12)
    assert score.low <= score.value <= score.high and score.normalised == score.value
    by_example = lens.logit_lens(
        subject_of("sandwich"), PROMPTS, Settings(batch_size=2, pooling="examples"), CONFIG
    )
    equal = by_example.quantities["kl"].by_example["mean"].mean(axis=0)
    area = sum((equal[i] + equal[i + 1]) / 2 for i in range(3)) / 3 / max(equal)
    np.testing.assert_allclose(by_example.scores["lens_kl_area"].value, area, rtol=1e-6)
    assert abs(by_example.scores["lens_kl_area"].value - score.value) > 1e-5


def test_devices_share_the_batch():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    subject = subject_of("pre")
    everywhere = jax.device_put(subject.params, jax.sharding.NamedSharding(mesh, jax.P()))
    sharded = subject._replace(
        params=everywhere,
        batch_sharding=jax.sharding.NamedSharding(mesh, jax.P("data")),
        devices=8,
    )
    result = lens.logit_lens(sharded, PROMPTS, SETTINGS, CONFIG)
    for name, quantity in result_of("pre").quantities.items():
        got = result.quantities[name].by_example["mean"]
        np.testing.assert_allclose(got, quantity.by_example["mean"], rtol=1e-4, atol=1e-6)


def test_other_weights_and_programs_need_no_compilation():
    result_of("pre")
    compiled = lens._statistics._cache_size()
    cfg, params = subject_of("pre")[:2]
    program = model.layer_program(cfg, 3, gate=jnp.array([1.0, 0.0, 1.0]))
    other = Subject(cfg, jax.tree.map(lambda leaf: 1.1 * leaf, params), program)
    result = lens.logit_lens(other, toy_models.ragged(seed=3), SETTINGS, CONFIG)
    assert lens._statistics._cache_size() == compiled
    # Step 1 is removed, so points 1 and 2 are one stream.
    kl = result.quantities["kl"].statistics["mean"]
    assert kl[1] == kl[2] != kl[0]


def test_refusals():
    subject = subject_of("pre")
    with pytest.raises(UserError, match=r"probe\.lens\.top_k=38: must be at most the vocabulary of 37"):
        lens.logit_lens(subject, PROMPTS, SETTINGS, LensConfig(top_k=38))
    with pytest.raises(UserError, match=r"prompt 1 .* has none that counts .* probe\.uncounted=20"):
        lens.logit_lens(subject, PROMPTS, Settings(uncounted=20), CONFIG)
