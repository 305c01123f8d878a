"""Similarity of weights against NumPy and SciPy on the same matrices; baselines against permutations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import toy_models

from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.config import SimilarityConfig
from depthgrow_jax.probes.settings import Settings
from depthgrow_jax.probes.weights import _random_overlaps, weights

DEPTH, RANK = 4, 3
CONFIG = SimilarityConfig(rank=RANK, draws=20)


def measure(subject, block_size=1, config=CONFIG):
    return weights(subject, Settings(), config, block_size=block_size)


def mean(result, name):
    return result.quantities[name].statistics["mean"]


def kernels(subject, group, i):
    """The matrices of one sub-layer of layer i, float64."""
    parts = subject.params["layers"][group]
    return {name: np.asarray(parts[name]["kernel"][i], np.float64) for name in parts}


def scale(subject, name, i):
    return np.asarray(subject.params["layers"][name]["scale"][i], np.float64)


def cosine(x, y):
    return x @ y / np.sqrt((x @ x) * (y @ y))


def with_layers(subject, fn):
    return subject._replace(params=subject.params | {"layers": fn(subject.params["layers"])})


@pytest.mark.parametrize("name", toy_models.EVERY)
def test_cosines_norms_and_ranks_of_every_architecture(name):
    subject = toy_models.subject(DEPTH, **toy_models.ARCHITECTURES[name])
    result = measure(subject, block_size=2)
    flat = [np.concatenate([k.ravel() for k in kernels(subject, "mlp", i).values()]) for i in range(DEPTH)]
    blocks = [np.concatenate(flat[:2]), np.concatenate(flat[2:])]
    want = [[cosine(x, y) for y in blocks] for x in blocks]
    np.testing.assert_allclose(mean(result, "block_cosine"), want, atol=1e-6)
    np.testing.assert_allclose(result.scores["adjacent_block_cosine"].value, want[0][1], atol=1e-6)
    want = [[cosine(x, y) for y in flat] for x in flat]
    np.testing.assert_allclose(mean(result, "layer_cosine.mlp"), want, atol=1e-6)
    np.testing.assert_allclose(mean(result, "norm.mlp"), [np.linalg.norm(x) for x in flat], rtol=1e-5)
    flat = [np.concatenate([k.ravel() for k in kernels(subject, "attn", i).values()]) for i in range(DEPTH)]
    want = [[cosine(x, y) for y in flat] for x in flat]
    np.testing.assert_allclose(mean(result, "layer_cosine.attention"), want, atol=1e-6)
    np.testing.assert_allclose(mean(result, "norm.attention"), [np.linalg.norm(x) for x in flat], rtol=1e-5)
    for part, group, out in (("attention", "attn", "o"), ("mlp", "mlp", "down")):
        for i in range(DEPTH):
            write = kernels(subject, group, i)[out]
            if name == "sandwich":
                write = write * scale(subject, f"{group}_post_norm", i)
            values = np.linalg.svd(write, compute_uv=False)
            got = mean(result, f"stable_rank.{part}")[i]
            np.testing.assert_allclose(got, np.sum(values**2) / values[0] ** 2, rtol=1e-4)
    for quantity in result.quantities.values():
        shape = tuple(len(result.axes[axis].values) for axis in quantity.axes)
        assert quantity.statistics["mean"].shape == shape


def read_and_written(subject, group, i):
    """The matrices whose columns span what a sub-layer reads and writes, by its definition."""
    cfg, parts = subject.cfg, kernels(subject, group, i)
    centre = np.eye(cfg.width) - (1 / cfg.width if cfg.norm == "layer" else 0.0)
    names, out = (("q", "k", "v"), "o") if group == "attn" else (("up", "gate"), "down")
    read = np.hstack([parts[name] for name in names if name in parts])
    if cfg.norm_placement != "post":
        read = centre @ np.diag(scale(subject, f"{group}_norm", i)) @ read
    write = parts[out].T
    if cfg.norm_placement == "sandwich":
        write = np.diag(scale(subject, f"{group}_post_norm", i)) @ centre @ write
    return read, write


@pytest.mark.parametrize(
    "fields",
    [*toy_models.ARCHITECTURES.values(), {"norm": "layer"}, {"norm": "layer", "norm_placement": "sandwich"}],
    ids=[*toy_models.ARCHITECTURES, "layer norm", "layer norm sandwich"],
)
def test_overlap_is_the_mean_squared_cosine_of_the_principal_angles(fields):
    subject = toy_models.subject(DEPTH, **fields)
    result = measure(subject)
    for part, group in (("attention", "attn"), ("mlp", "mlp")):
        for which, side in enumerate(("read", "write")):
            bases = [
                np.linalg.svd(read_and_written(subject, group, i)[which])[0][:, :RANK] for i in range(DEPTH)
            ]
            want = [[np.mean(np.cos(scipy.linalg.subspace_angles(u, v)) ** 2) for v in bases] for u in bases]
            np.testing.assert_allclose(mean(result, f"{side}_overlap.{part}"), want, atol=2e-4)


def test_identical_layers_are_similar_and_random_ones_lie_in_the_null_interval():
    one = toy_models.subject(1, width=32, mlp_dim=48)
    copies = with_layers(one, lambda layers: jax.tree.map(lambda x: jnp.repeat(x, DEPTH, axis=0), layers))
    result = measure(copies, block_size=2)
    for name in ("block_cosine", "layer_cosine.mlp", "layer_cosine.attention", "write_overlap.mlp"):
        np.testing.assert_allclose(mean(result, name), 1.0, atol=1e-5)
    assert result.scores["adjacent_block_cosine"].value > result.scores["adjacent_block_cosine"].null_high

    depth = 12
    result = measure(toy_models.subject(depth, width=32, mlp_dim=48), config=SimilarityConfig(draws=40))
    off = ~np.eye(depth, dtype=bool)
    for name in ("layer_cosine.mlp", "layer_cosine.attention", "write_overlap.mlp"):
        values = mean(result, name)[off]
        low, high = (np.broadcast_to(mean(result, f"{name}.null_{x}"), off.shape) for x in ("low", "high"))
        low, high = low[off], high[off]
        assert np.mean((values >= low) & (values <= high)) > 0.85, name
        # Not because the interval is wide: 95% of a normal variable span 3.9 of its deviations.
        assert (high - low < 5 * values.std()).all(), name


def test_null_of_cosines_is_that_of_permuted_matrices():
    """Entries with a mean of their own, so that the null is not centred on 0."""
    subject = toy_models.subject(2, width=8, mlp_dim=10, mlp="gelu")
    shifted = with_layers(subject, lambda layers: jax.tree.map(lambda x: x + 0.1, layers))
    result, rng, draws = measure(shifted), np.random.default_rng(0), []
    first, second = (kernels(shifted, "mlp", i) for i in range(2))
    for _ in range(4000):
        x = np.concatenate([first[name].ravel() for name in ("up", "down")])
        y = np.concatenate([rng.permutation(second[name].ravel()) for name in ("up", "down")])
        draws.append(cosine(x, y))
    for name in ("block_cosine", "layer_cosine.mlp"):
        got = [mean(result, f"{name}.null_{side}")[0, 1] for side in ("low", "high")]
        np.testing.assert_allclose(got, np.quantile(draws, [0.025, 0.975]), atol=0.1 * np.std(draws))
    score = result.scores["adjacent_block_cosine"]
    np.testing.assert_allclose([score.null_low, score.null_high], got, rtol=1e-6)
    assert (score.null_low + score.null_high) / 2 > 0.05


def test_random_subspaces_are_those_of_gaussian_matrices():
    width, rank, rng = 16, 3, np.random.default_rng(5)
    bases = [np.linalg.svd(rng.standard_normal((width, 24)))[0][:, :rank] for _ in range(60)]
    want = [np.sum((u.T @ v) ** 2) / rank for i, u in enumerate(bases) for v in bases[:i]]
    got = _random_overlaps(width, rank, 60, 0)
    np.testing.assert_allclose(np.mean(got), rank / width, atol=0.01)
    np.testing.assert_allclose(np.quantile(got, [0.025, 0.975]), np.quantile(want, [0.025, 0.975]), atol=0.02)


def test_seed_decides_the_baseline_and_the_default_rank_is_an_eighth_of_the_width():
    subject = toy_models.subject(DEPTH, **toy_models.ARCHITECTURES["pre"])
    default = dataclasses.replace(CONFIG, rank=0)
    low = [
        mean(measure(subject, config=dataclasses.replace(default, seed=seed)), "read_overlap.mlp.null_low")
        for seed in (0, 0, 1)
    ]
    assert low[0] == low[1] != low[2]
    result = measure(subject, config=default)
    assert mean(result, "read_overlap.mlp.null_mean") == 2 / 16
    assert "top eighth of the singular directions" in result.conventions["subspace"]


def test_wrong_block_size_and_rank_are_refused():
    subject = toy_models.subject(DEPTH, **toy_models.ARCHITECTURES["pre"])
    with pytest.raises(UserError, match=r"block_size=3: must divide depth 4; legal: \[1, 2, 4\]"):
        measure(subject, block_size=3)
    with pytest.raises(UserError, match=r"rank=17: must be at most 16"):
        measure(subject, config=SimilarityConfig(rank=17))
    assert measure(subject, block_size=4).scores == {}
