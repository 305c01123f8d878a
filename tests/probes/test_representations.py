"""Cosine maps and CKA against NumPy in float64, and HSIC against its definition as a U-statistic."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.config import SimilarityConfig
from depthgrow_jax.probes.representations import _cka, _products, representations
from depthgrow_jax.probes.settings import Settings

SETTINGS = Settings(batch_size=2)
CONFIG = SimilarityConfig(cka_tokens=8)
# The counted tokens 1..n-1 of prompts of 20, 14 and 17 tokens, of which CKA takes 8.
LENGTHS = (20, 14, 17)


def mean(result, name):
    return result.quantities[name].statistics["mean"]


def streams(subject, prompts):
    """(h `[K+1, n, D]`, c `[K, n, D]`) of every prompt's n positions, float64, from one forward pass."""
    taps = {"h": lambda t: t.h, "c": lambda t: t.attn + t.mlp}
    tokens = jnp.asarray(prompts.inputs)
    run = model.apply(subject.cfg, subject.params, tokens, program=subject.program, taps=taps)
    h = np.concatenate([run.taps["h"], run.hidden[None]]).astype(np.float64)
    c = np.asarray(run.taps["c"], np.float64)
    return [(h[:, i, :length], c[:, i, :length]) for i, length in enumerate(LENGTHS)]


def hsic(x, y):
    """Unbiased HSIC of linear kernels, the matrix formula of Song et al. (2012)."""
    n = len(x)
    k, l = x @ x.T, y @ y.T  # noqa: E741
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    one = np.ones(n)
    terms = (
        np.trace(k @ l),
        one @ k @ one * (one @ l @ one) / ((n - 1) * (n - 2)),
        2 / (n - 2) * one @ k @ l @ one,
    )
    return (terms[0] + terms[1] - terms[2]) / (n * (n - 3))


def hsic_by_definition(x, y):
    """Mean of k_ij (l_ij + l_qr - 2 l_iq) over all ordered quadruples of distinct samples."""
    k, l = x @ x.T, y @ y.T  # noqa: E741
    quadruples = itertools.permutations(range(len(x)), 4)
    return np.mean([k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in quadruples])


@pytest.mark.parametrize("name", toy_models.EVERY)
def test_every_architecture_against_numpy(name):
    subject = toy_models.subject(**toy_models.ARCHITECTURES[name])
    prompts = toy_models.ragged(LENGTHS)
    result, found = representations(subject, prompts, SETTINGS, CONFIG), streams(subject, prompts)
    for which, quantity, cka in ((0, "cosine.stream", "cka"), (1, "cosine.contribution", "cka.contribution")):
        cosines, products = [], []
        for prompt in found:
            points = prompt[which][:, 1:]
            unit = points / np.linalg.norm(points, axis=-1, keepdims=True)
            cosines.append(np.einsum("itd,jtd->tij", unit, unit))
            chosen = points[:, np.arange(8) * points.shape[1] // 8]
            products.append([[hsic(x, y) for y in chosen] for x in chosen])
        everything = np.concatenate(cosines)
        np.testing.assert_allclose(mean(result, quantity), everything.mean(axis=0), atol=2e-6)
        statistics = result.quantities[quantity].statistics
        np.testing.assert_allclose(statistics["max"], everything.max(axis=0), atol=2e-6)
        medians = [np.median(x, axis=0) for x in cosines]
        np.testing.assert_allclose(statistics["median"], np.mean(medians, axis=0), atol=2e-6)
        want = np.mean(products, axis=0)
        want = want / np.sqrt(np.outer(np.diag(want), np.diag(want)))
        np.testing.assert_allclose(mean(result, cka), want, atol=2e-5)
        np.testing.assert_allclose(np.diag(mean(result, cka)), 1.0, atol=1e-5)
    assert result.examples == 3 and result.tokens == sum(LENGTHS) - 3 and result.notes["cka_tokens"] == 24
    for quantity in result.quantities.values():
        shape = tuple(len(result.axes[axis].values) for axis in quantity.axes)
        assert all(values.shape == shape for values in quantity.statistics.values())


def test_formula_is_the_u_statistic():
    rng = np.random.default_rng(0)
    points = rng.standard_normal((2, 7, 3)) + 4
    points[1] = points[0] @ rng.standard_normal((3, 3)) + 0.5 * points[1]
    want = [[hsic_by_definition(x, y) for y in points] for x in points]
    np.testing.assert_allclose([[hsic(x, y) for y in points] for x in points], want, rtol=1e-9)
    # Three more samples that do not count.
    padded = np.concatenate([points, rng.standard_normal((2, 3, 3)) * 100], axis=1)[None].astype(np.float32)
    got, scale = _products(jnp.asarray(padded), jnp.arange(10)[None] < 7)
    squared = np.square(np.asarray(scale[0]))
    np.testing.assert_allclose(got[0] * squared[:, None] * squared[None], want, rtol=1e-4)


def test_hsic_of_independent_points_is_zero_on_average():
    """Which the biased estimator is not: in this setting it would be about 0.02."""
    x = jax.random.normal(jax.random.key(0), (3000, 2, 8, 4))
    got, scale = _products(x, jnp.ones((3000, 8), bool))
    products = np.asarray(got) * np.asarray(scale)[:, :, None] ** 2 * np.asarray(scale)[:, None] ** 2
    apart = products[:, 0, 1]
    assert abs(apart.mean()) < 4 * apart.std() / np.sqrt(3000)
    assert products[:, 0, 0].mean() > 20 * apart.std() / np.sqrt(3000)


def test_large_means_and_scales_do_not_hurt():
    """Streams of trained networks: a common vector far larger than what differs, and huge late layers."""
    rng = np.random.default_rng(1)
    points = rng.standard_normal((1, 3, 12, 6))
    points[:, 1] += 0.5 * points[:, 0]
    want = [[hsic(x, y) for y in points[0]] for x in points[0]]
    sizes = np.asarray([1.0, 1e6, 1e-6])[:, None, None]
    moved = sizes * (points + 300 * rng.standard_normal(6))
    got, scale = (
        np.asarray(x, np.float64) for x in _products(moved.astype(np.float32), jnp.ones((1, 12), bool))
    )
    products = got * scale[:, :, None] ** 2 * scale[:, None] ** 2
    cka = _cka(("stream", "stream_to"), products).statistics["mean"]
    want = np.asarray(want)
    np.testing.assert_allclose(cka, want / np.sqrt(np.outer(np.diag(want), np.diag(want))), atol=2e-4)


def test_constant_points_give_zero_never_nan():
    """Layers without a contribution, and a stream that is the same at every token."""
    subject = toy_models.subject(**toy_models.ARCHITECTURES["pre"])
    off = subject.program._replace(gate=subject.program.gate.at[1].set(0.0))
    prompts = toy_models.ragged(LENGTHS)
    prompts = prompts._replace(inputs=np.full_like(prompts.inputs, 5))
    result = representations(subject._replace(program=off), prompts, SETTINGS, CONFIG)
    for quantity in result.quantities.values():
        assert all(np.isfinite(values).all() for values in quantity.statistics.values())
    assert (mean(result, "cka")[0] == 0).all()
    assert (mean(result, "cka.contribution")[1] == 0).all()
    assert (mean(result, "cosine.contribution")[1] == 0).all()


def test_padding_batches_and_devices_do_not_matter():
    subject = toy_models.subject(**toy_models.ARCHITECTURES["pre"])
    prompts = toy_models.text(3, 14)
    wider = prompts._replace(
        **{
            name: np.pad(getattr(prompts, name), ((0, 0), (0, 6)))
            for name in ("inputs", "targets", "scored", "valid")
        }
    )
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("batch",))
    sharded = subject._replace(batch_sharding=NamedSharding(mesh, PartitionSpec("batch")), devices=2)
    want = representations(subject, prompts, SETTINGS, CONFIG)
    for other, given, settings in (
        (subject, wider, SETTINGS),
        (subject, prompts, Settings(batch_size=3)),
        (sharded, prompts, SETTINGS),
    ):
        got = representations(other, given, settings, CONFIG)
        for name, quantity in want.quantities.items():
            for statistic, values in quantity.statistics.items():
                np.testing.assert_allclose(got.quantities[name].statistics[statistic], values, atol=2e-5)


def test_interval_of_cka_is_the_bootstrap_of_the_ratio():
    """Two prompts: half of the resamples hold both, a quarter one of them twice."""
    products = np.asarray([[[1.0, 0.2], [0.2, 1.0]], [[4.0, 2.0], [2.0, 1.0]]])
    statistics = _cka(("stream", "stream_to"), products).statistics
    np.testing.assert_allclose(statistics["mean"][0, 1], 1.1 / np.sqrt(2.5))
    np.testing.assert_allclose(statistics["mean_low"][0, 1], 0.2)
    np.testing.assert_allclose(statistics["mean_high"][0, 1], 1.0)
    alone = _cka(("stream", "stream_to"), products[:1]).statistics
    assert np.isnan(alone["mean_low"]).all() and alone["mean"][0, 1] == 0.2


def test_too_few_tokens_are_refused_by_name():
    subject = toy_models.subject(**toy_models.ARCHITECTURES["pre"])
    with pytest.raises(UserError, match="prompt 2 has 3 counted tokens; CKA needs at least 4"):
        representations(subject, toy_models.ragged((20, 4, 17)), SETTINGS, CONFIG)
    with pytest.raises(UserError, match="cka_tokens=3: must be at least 4"):
        representations(subject, toy_models.ragged(LENGTHS), SETTINGS, SimilarityConfig(cka_tokens=3))
