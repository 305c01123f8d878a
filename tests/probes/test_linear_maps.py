"""Ridge from Gram matrices against `numpy.linalg.lstsq` in float64 on the streams themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes import linear_maps as module
from depthgrow_jax.probes.config import SimilarityConfig
from depthgrow_jax.probes.linear_maps import linear_maps
from depthgrow_jax.probes.settings import Settings

SETTINGS = Settings(batch_size=2)
CONFIG = SimilarityConfig(ridge=1e-2, seed=3)
LENGTHS = (20, 14, 17, 20, 11, 19)


def mean(result, name):
    return result.quantities[name].statistics["mean"]


def streams(subject, prompts):
    """h `[K+1, P, T, D]`, float64, from one forward pass."""
    taps = {"h": lambda t: t.h}
    run = model.apply(
        subject.cfg, subject.params, jnp.asarray(prompts.inputs), program=subject.program, taps=taps
    )
    return np.concatenate([run.taps["h"], run.hidden[None]]).astype(np.float64)


def expected(source, target, prompts, config):
    """r2, relative error `[K1+1, K2+1]`: least squares with the penalty as rows of the system."""
    x_all, y_all = streams(source, prompts), streams(target, prompts)
    counts = prompts.valid & (np.arange(prompts.valid.shape[1]) >= 1)
    order = np.random.default_rng(config.seed).permutation(len(counts))
    fitted, held_out = np.split(order, [(len(order) + 1) // 2])
    r2, relative = np.zeros((2, len(x_all), len(y_all)))
    for i, h in enumerate(x_all):
        x, x_new = (h[half][counts[half]] for half in (fitted, held_out))
        penalty = np.sqrt(len(x) * config.ridge * x.var(axis=0).mean()) * np.eye(x.shape[1] + 1)
        penalty[-1] = 0
        system = np.vstack([np.hstack([x, np.ones((len(x), 1))]), penalty])
        for j, g in enumerate(y_all):
            y, y_new = (g[half][counts[half]] for half in (fitted, held_out))
            answer = np.vstack([y, np.zeros((len(penalty), y.shape[1]))])
            solution = np.linalg.lstsq(system, answer, rcond=None)[0]
            error = y_new - np.hstack([x_new, np.ones((len(x_new), 1))]) @ solution
            r2[i, j] = 1 - np.sum(error**2) / np.sum((y_new - y.mean(axis=0)) ** 2)
            relative[i, j] = np.sum(np.linalg.norm(error, axis=1)) / np.sum(np.linalg.norm(y_new, axis=1))
    return r2, relative


@pytest.mark.parametrize("name", toy_models.EVERY)
def test_every_architecture_to_itself(name):
    subject, prompts = toy_models.subject(**toy_models.ARCHITECTURES[name]), toy_models.ragged(LENGTHS)
    result = linear_maps(subject, subject, prompts, SETTINGS, CONFIG)
    r2, relative = expected(subject, subject, prompts, CONFIG)
    np.testing.assert_allclose(mean(result, "r2"), r2, atol=1e-4)
    np.testing.assert_allclose(mean(result, "relative_error"), relative, atol=1e-4)
    np.testing.assert_array_equal(mean(result, "r2.embedding"), mean(result, "r2")[0])
    assert result.examples == 6 and result.tokens == sum(LENGTHS) - 6
    assert result.notes["fitted_prompts"] == 3
    assert result.notes["fitted_tokens"] + result.notes["held_out_tokens"] == result.tokens
    for quantity in result.quantities.values():
        shape = tuple(len(result.axes[axis].values) for axis in quantity.axes)
        assert all(values.shape == shape for values in quantity.statistics.values())


def test_another_network_of_other_width_and_depth_a_few_source_points_at_a_time(monkeypatch):
    source = toy_models.subject(3, **toy_models.ARCHITECTURES["pre"])
    target = toy_models.subject(2, seed=1, width=8, heads=2, norm_placement="post")
    prompts = toy_models.ragged(LENGTHS)
    r2, relative = expected(source, target, prompts, CONFIG)
    # Three at a time: the second pass over the prompts has one point left, and fills up with two.
    monkeypatch.setattr(module, "GRAM_BYTES", 3 * 4 * 3 * 16 * 8)
    result = linear_maps(source, target, prompts, SETTINGS, CONFIG)
    np.testing.assert_allclose(mean(result, "r2"), r2, atol=1e-4)
    np.testing.assert_allclose(mean(result, "relative_error"), relative, atol=1e-4)
    assert mean(result, "r2").shape == (4, 3)


def test_an_exact_affine_relation_gives_one():
    """The target's embedding is an affine function of the source's, which is far from centred."""
    source = toy_models.subject(1, **toy_models.ARCHITECTURES["pre"])
    target = toy_models.subject(1, seed=1, width=8, heads=2)
    rng = np.random.default_rng(0)
    far = np.asarray(source.params["embed"]["table"]) + 50 * rng.standard_normal(16).astype(np.float32)
    table = (far @ rng.standard_normal((16, 8)) + 7).astype(np.float32)
    source = source._replace(params=source.params | {"embed": {"table": jnp.asarray(far)}})
    target = target._replace(params=target.params | {"embed": {"table": jnp.asarray(table)}})
    exact = SimilarityConfig(ridge=1e-6)
    result = linear_maps(source, target, toy_models.text(8), SETTINGS, exact)
    np.testing.assert_allclose(mean(result, "r2")[0, 0], 1.0, atol=1e-5)


@pytest.mark.slow  # four compilations of three networks
def test_padding_batches_and_devices_do_not_matter():
    subject, prompts = toy_models.subject(**toy_models.ARCHITECTURES["pre"]), toy_models.text(5, 14)
    wider = prompts._replace(
        **{
            name: np.pad(getattr(prompts, name), ((0, 0), (0, 6)))
            for name in ("inputs", "targets", "scored", "valid")
        }
    )
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("batch",))
    sharded = subject._replace(batch_sharding=NamedSharding(mesh, PartitionSpec("batch")), devices=2)
    want = linear_maps(subject, subject, prompts, SETTINGS, CONFIG)
    for other, given, settings in ((subject, wider, Settings(batch_size=3)), (sharded, prompts, SETTINGS)):
        got = linear_maps(other, other, given, settings, CONFIG)
        for name, quantity in want.quantities.items():
            for statistic, values in quantity.statistics.items():
                np.testing.assert_allclose(got.quantities[name].statistics[statistic], values, atol=1e-4)


def test_seed_decides_the_split_and_intervals_hold_the_value():
    subject, prompts = toy_models.subject(**toy_models.ARCHITECTURES["pre"]), toy_models.ragged(LENGTHS)
    first, again, other = (
        linear_maps(subject, subject, prompts, SETTINGS, SimilarityConfig(ridge=1e-2, seed=seed))
        for seed in (3, 3, 4)
    )
    for name, quantity in first.quantities.items():
        for statistic, values in quantity.statistics.items():
            np.testing.assert_array_equal(values, again.quantities[name].statistics[statistic])
        statistics = quantity.statistics
        assert (statistics["mean_low"] <= statistics["mean"]).all()
        assert (statistics["mean"] <= statistics["mean_high"]).all()
    assert (mean(first, "r2") != mean(other, "r2")).any()
    alone = module._ratio(("source", "target"), np.ones((1, 2, 3)), np.full((1, 3), 4.0), lambda x: 1 - x)
    assert np.isnan(alone.statistics["mean_low"]).all() and (alone.statistics["mean"] == 0.75).all()


def test_a_constant_source_predicts_the_mean_and_never_gives_nan():
    """One token everywhere in the source's vocabulary: h_0 says nothing, and r2 is that of the mean."""
    subject, prompts = toy_models.subject(1, **toy_models.ARCHITECTURES["pre"]), toy_models.text(6)
    blind = subject._replace(
        params=subject.params | {"embed": {"table": jnp.ones_like(subject.params["embed"]["table"])}}
    )
    result = linear_maps(blind, subject, prompts, SETTINGS, CONFIG)
    np.testing.assert_allclose(mean(result, "r2")[0], 0.0, atol=1e-5)
    result = linear_maps(subject, blind, prompts, SETTINGS, CONFIG)
    assert all(np.isfinite(quantity.statistics["mean"]).all() for quantity in result.quantities.values())


def test_wrong_input_is_refused():
    subject, prompts = toy_models.subject(**toy_models.ARCHITECTURES["pre"]), toy_models.text(2)
    larger = subject._replace(cfg=dataclasses.replace(subject.cfg, vocab_size=40))
    with pytest.raises(UserError, match=r"target.vocab_size=40: must equal the source's 37"):
        linear_maps(subject, larger, prompts, SETTINGS, CONFIG)
    with pytest.raises(UserError, match=r"probe.prompts.examples=1: must be at least 2"):
        linear_maps(subject, subject, toy_models.text(1), SETTINGS, CONFIG)
    with pytest.raises(UserError, match="no counted token"):
        linear_maps(subject, subject, prompts, Settings(uncounted=20), CONFIG)
