"""Geometry of the stream against plain loops in float64, and where it has to be exactly zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import ARCHITECTURES, ragged, subject, text

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.geometry import angular_distance, geometry, residual_growth
from depthgrow_jax.probes.inputs import Prompts
from depthgrow_jax.probes.settings import Settings

DEPTH = 3
TAPS = {name: functools.partial(lambda name, tap: getattr(tap, name), name) for name in ("h", "attn", "mlp")}
STATISTICS = {"mean": np.mean, "median": np.median, "p95": lambda x: np.quantile(x, 0.95), "max": np.max}
IDENTITIES = ("pre", "pre_lns", "sandwich", "scaled")


@functools.cache
def network(name, **fields):
    return subject(DEPTH, **ARCHITECTURES[name], **fields)


@functools.partial(jax.jit, static_argnums=0)
def run(cfg, params, inputs, program):
    return model.apply(cfg, params, inputs, program=program, taps=TAPS)


def streams(net, prompts):
    """Float64 `h [K + 1, P, T, D]`, `a`, `m [K, P, T, D]`."""
    out = run(net.cfg, net.params, prompts.inputs, net.program)
    h, a, m = (np.asarray(out.taps[name], np.float64) for name in TAPS)
    return np.concatenate([h, np.asarray(out.hidden, np.float64)[None]]), a, m


def cosine(x, y):
    return x @ y / (np.linalg.norm(x) * np.linalg.norm(y))


def at_token(h, a, m):
    """Every quantity of one token: `h [K + 1, D]`, `a`, `m [K, D]`."""
    of_layers = []
    for low, high, attn, mlp in zip(h[:-1], h[1:], a, m, strict=True):
        of_layers.append(
            {
                "relative.attention": np.linalg.norm(attn) / np.linalg.norm(low),
                "relative.mlp": np.linalg.norm(mlp) / np.linalg.norm(low + attn),
                "relative.layer": np.linalg.norm(high - low) / np.linalg.norm(low),
                "cosine.attention": cosine(attn, low),
                "cosine.mlp": cosine(mlp, low + attn),
                "cosine.layer": cosine(high - low, low),
                "block_influence": 1 - cosine(low, high),
                "norm.attention": np.linalg.norm(attn),
                "norm.mlp": np.linalg.norm(mlp),
                "norm.layer": np.linalg.norm(high - low),
                "log_rms.attention": np.log(np.std(attn - attn.mean()) ** 2 + attn.mean() ** 2) / 2,
                "log_rms.mlp": np.log(np.mean(mlp**2)) / 2,
            }
        )
    values = {name: np.array([layer[name] for layer in of_layers]) for name in of_layers[0]}
    values["rms"] = np.array([np.sqrt(np.mean(x**2)) for x in h])
    values["log_rms"] = np.log(values["rms"])
    cosines = np.array([[cosine(x, y) for y in h] for x in h])
    np.fill_diagonal(cosines, 1.0)
    return values | {"angular": np.arccos(np.clip(cosines, -1, 1)) / np.pi}


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantities_are_those_of_a_plain_loop(name):
    net, prompts = network(name), ragged()
    got = geometry(net, prompts, Settings(uncounted=2))
    equal = geometry(net, prompts, Settings(uncounted=2, pooling="examples"))
    h, a, m = streams(net, prompts)
    loop = [
        [at_token(h[:, p, t], a[:, p, t], m[:, p, t]) for t in range(length)]
        for p, length in enumerate(prompts.lengths)
    ]
    names = set(loop[0][0])
    assert set(got.quantities) == names | {f"first.{n}" for n in names - {"angular"}} | {"angular.last"}
    for n in names:
        by_example = [np.array([token[n] for token in tokens[2:]]) for tokens in loop]
        found = got.quantities[n]
        assert found.statistics["mean"].shape == tuple(len(got.axes[axis].values) for axis in found.axes)
        for statistic, fn in STATISTICS.items():
            want = [np.apply_along_axis(fn, 0, values) for values in by_example]
            close(found.by_example[statistic], want)
        close(found.statistics["mean"], np.concatenate(by_example).mean(axis=0))
        close(equal.quantities[n].statistics["mean"], np.mean([v.mean(axis=0) for v in by_example], axis=0))
        if n != "angular":
            first = got.quantities[f"first.{n}"]
            close(first.by_example["mean"], [tokens[0][n] for tokens in loop])
            close(first.statistics["mean"], np.mean([tokens[0][n] for tokens in loop], axis=0))
    close(got.quantities["angular.last"].by_example["mean"], [tokens[-1]["angular"] for tokens in loop])
    assert got.examples == 3 and got.tokens == 20 + 14 + 17 - 3 * 2


def same(one, other, example=slice(None)):
    for name, found in one.quantities.items():
        for statistic, values in found.by_example.items():
            want = other.quantities[name].by_example[statistic][example]
            np.testing.assert_allclose(values, want, rtol=2e-5, atol=2e-6, err_msg=name)


def test_padding_does_not_count():
    net, prompts = network("pre"), ragged()
    shortest = (field[1:2, :14] for field in prompts[:4])
    alone = geometry(net, Prompts(*shortest, prompts.answer[1:2]), Settings())
    same(alone, geometry(net, prompts, Settings()), slice(1, 2))


def test_batches_and_devices_do_not_count():
    net, prompts = network("pre"), text(11)
    found = geometry(net, prompts, Settings(batch_size=3))
    assert len(found.quantities["rms"].by_example["mean"]) == 11
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = Settings(batch_size=11)
    same(geometry(net._replace(batch_sharding=split, devices=8), prompts, whole), found)


def without_layer(net, layer):
    """The network with every parameter of one layer 0, which then adds nothing."""
    layers = jax.tree.map(lambda leaf: leaf.at[layer].set(0.0), net.params["layers"])
    return net._replace(params={**net.params, "layers": layers})


@pytest.mark.parametrize("name", IDENTITIES)
def test_layer_of_zero_weights_moves_nothing(name):
    net = without_layer(network(name), 1)
    got = geometry(net, ragged(), Settings()).quantities
    parts = ("attention", "mlp", "layer")
    zero = [f"{kind}.{part}" for kind in ("norm", "relative", "cosine") for part in parts]
    for n in (*zero, "block_influence"):
        values = np.stack(list(got[n].by_example.values()))
        assert (values[..., 1] == 0).all() and (values[..., [0, 2]] != 0).all(), n
    assert (got["angular"].by_example["max"][:, 1, 2] == 0).all()
    assert (got["angular"].by_example["mean"][:, 0, 1] > 0).all()
    np.testing.assert_allclose(got["log_rms.mlp"].statistics["mean"][1], np.log(1e-12), rtol=1e-6)


def test_equal_streams_and_zero_streams_in_bfloat16():
    """Token 0 of the vocabulary has a zero vector: a stream that may stay 0."""
    net = without_layer(network("pre", dtype="bfloat16"), 1)
    table = net.params["embed"]["table"].at[0].set(0.0)
    net = net._replace(params={**net.params, "embed": {"table": table}})
    prompts = text(8, 40)
    prompts.inputs[0] = 0
    got = geometry(net, prompts, Settings(uncounted=0))
    for n, found in got.quantities.items():
        assert all(np.isfinite(values).all() for values in found.by_example.values()), n
        assert all(np.isfinite(values).all() for values in found.statistics.values()), n
    angles = got.quantities["angular"].by_example["max"]
    assert (angles[:, np.arange(DEPTH + 1), np.arange(DEPTH + 1)] == 0).all()
    assert (angles[:, 1, 2] == 0).all() and (angles[1:, 0, 1] > 0).all()
    assert (got.quantities["block_influence"].by_example["max"][:, 1] == 0).all()
    # Without attention biases nothing comes out of a zero stream: every point is zero, every angle 0.
    assert (angles[0] == 0).all() and (got.quantities["block_influence"].by_example["max"][0] == 0).all()


def test_angular_distance_of_known_angles():
    rng = np.random.default_rng(0)
    u = rng.normal(size=(2000, 24))
    u = (u / np.linalg.norm(u, axis=1, keepdims=True)).astype(np.float32)
    across = rng.normal(size=u.shape)
    across -= np.sum(across * u, axis=1, keepdims=True) * u
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    assert (angular_distance(jnp.asarray(u), jnp.asarray(u)) == 0).all()
    for angle in (1e-4, 1e-2, 1.0, np.pi / 2, 3.0, np.pi):
        v = (np.cos(angle) * u + np.sin(angle) * across).astype(np.float32)
        got = angular_distance(jnp.asarray(u), jnp.asarray(v))
        np.testing.assert_allclose(got, angle / np.pi, rtol=5e-3 if angle < 1e-3 else 1e-4)
    zero = jnp.zeros_like(u)
    np.testing.assert_allclose(angular_distance(jnp.asarray(u), zero), 0.5, rtol=1e-6)
    assert (angular_distance(zero, zero) == 0).all()


def test_growth_of_a_geometric_stream_by_hand():
    layers = np.arange(7)
    rates = np.array([1.1, 1.3, 1.2])
    log_rms = np.log(0.05) + layers[None] * np.log(rates)[:, None]
    found = residual_growth(log_rms)
    np.testing.assert_allclose(found.value, (1.1 * 1.3 * 1.2) ** (1 / 3), rtol=1e-12)
    assert 1.1 <= found.low < found.value < found.high <= 1.3
    weighted = residual_growth(log_rms, np.array([1, 4, 5]))
    np.testing.assert_allclose(weighted.value, 1.1**0.1 * 1.3**0.4 * 1.2**0.5, rtol=1e-12)
    doubling = residual_growth((layers * np.log(2.0))[None])
    np.testing.assert_allclose([doubling.value, doubling.normalised], [2.0, 0.5], rtol=1e-12)
    assert residual_growth((-0.1 * layers)[None]).normalised == 0
    constant = residual_growth(np.full((1, 7), -0.7))
    assert abs(constant.value - 1) < 1e-12 and abs(constant.normalised) < 1e-12 and np.isnan(constant.low)


@pytest.mark.parametrize("pooling", ["tokens", "examples"])
def test_growth_is_the_slope_of_the_fitted_line(pooling):
    net, prompts = network("pre"), ragged()
    found = geometry(net, prompts, Settings(pooling=pooling)).scores["residual_growth"]
    h = streams(net, prompts)[0]
    by_example = [np.log(np.sqrt(np.mean(h[:, p, 1:n] ** 2, axis=-1))) for p, n in enumerate(prompts.lengths)]
    pooled = np.concatenate(by_example, axis=1) if pooling == "tokens" else np.stack(
        [values.mean(axis=1) for values in by_example], axis=1
    )  # fmt: skip
    slope = np.polyfit(np.arange(DEPTH + 1), pooled.mean(axis=1), 1)[0]
    np.testing.assert_allclose(found.value, np.exp(slope), rtol=1e-5)
    assert found.low <= found.value <= found.high


def test_a_prompt_without_counted_tokens_is_refused():
    with pytest.raises(UserError, match=r"probe\.uncounted=14: must be below 14"):
        geometry(network("pre"), ragged(), Settings(uncounted=14))
