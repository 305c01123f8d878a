"""Effects of orders against full forward passes and float64 numpy."""

import functools

import jax
import numpy as np
import pytest
from scipy.special import log_softmax
from toy_models import ARCHITECTURES, EVERY, ragged, subject, text

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes import order as order_module
from depthgrow_jax.probes import programs
from depthgrow_jax.probes.config import OrderConfig
from depthgrow_jax.probes.order import OPERATIONS, check, order
from depthgrow_jax.probes.settings import Settings

DEPTH = 4
SETTINGS = Settings(batch_size=2)
CONFIG = OrderConfig(run_lengths=(1, 2, 3), permutations=2, seed=3)


@functools.partial(jax.jit, static_argnames="cfg")
def logits_of(cfg, params, inputs, program):
    return model.apply(cfg, params, inputs, program=program).logits


@functools.cache
def probed(name):
    network, prompts = subject(DEPTH, **ARCHITECTURES[name]), ragged()
    return network, prompts, order(network, prompts, SETTINGS, CONFIG)


def naive(network, prompts, changed):
    """`[P, T]` arrays of every effect of running the steps `changed`."""
    clean, got = (
        np.asarray(logits_of(*network[:2], prompts.inputs, program), np.float64)
        for program in (network.program, model.reorder(network.program, np.asarray(changed)))
    )
    log_p, log_q = log_softmax(clean, axis=-1), log_softmax(got, axis=-1)
    p, q = np.exp(log_p), np.exp(log_q)
    target = np.take_along_axis(log_p - log_q, prompts.targets[..., None], axis=-1)[..., 0]
    return {
        "kl": (p * (log_p - log_q)).sum(-1),
        "kl_reverse": (q * (log_q - log_p)).sum(-1),
        "prob_l2": np.linalg.norm(q - p, axis=-1),
        "loss_increase": target,
        "top1_agreement": (clean.argmax(-1) == got.argmax(-1)).astype(float),
    }


@pytest.mark.parametrize("name", EVERY)
def test_effects_are_those_of_full_forward_passes(name):
    network, prompts, result = probed(name)
    counted = prompts.valid & prompts.scored & (np.arange(prompts.valid.shape[1]) >= 1)
    assert result.tokens == counted.sum() and result.examples == 3
    for operation, row, start, changed in [
        ("skip", 0, 2, (0, 1, 3)),
        ("swap", 0, 1, (0, 2, 1, 3)),
        ("swap", 1, 0, (2, 3, 0, 1)),
        ("reverse", 2, 1, (0, 3, 2, 1)),
        ("repeat", 0, 3, (0, 1, 2, 3, 3)),
    ]:
        for effect, values in naive(network, prompts, changed).items():
            quantity = result.quantities[f"{operation}.{effect}"]
            at = (row, start)
            close = {"atol": 2e-5, "rtol": 2e-5}
            np.testing.assert_allclose(quantity.statistics["mean"][at], values[counted].mean(), **close)
            np.testing.assert_allclose(quantity.statistics["max"][at], values[counted].max(), **close)
            medians = [np.median(v[c]) for v, c in zip(values, counted, strict=True)]
            np.testing.assert_allclose(quantity.by_example["median"][:, *at], medians, **close)


def test_every_draw_is_its_own_random_order():
    network, prompts, result = probed("pre_lns")
    counted = prompts.valid & prompts.scored & (np.arange(prompts.valid.shape[1]) >= 1)
    quantity = result.quantities["permute.kl"]
    assert quantity.axes == ("run_length", "start", "draw")
    for start in (0, 1):
        for draw in (0, 1):
            changed = programs.permute(DEPTH, start, 3, (CONFIG.seed, 3, start, draw)).order
            expected = naive(network, prompts, changed)["kl"][counted].mean()
            np.testing.assert_allclose(quantity.statistics["mean"][2, start, draw], expected, atol=2e-5)


def test_clean_loss():
    network, prompts, result = probed("pre")
    counted = prompts.valid & prompts.scored & (np.arange(prompts.valid.shape[1]) >= 1)
    log_p = log_softmax(
        np.asarray(logits_of(*network[:2], prompts.inputs, network.program), np.float64), axis=-1
    )
    losses = -np.take_along_axis(log_p, prompts.targets[..., None], axis=-1)[..., 0]
    quantity = result.quantities["clean.loss"]
    assert quantity.axes == () and quantity.unit == "nats"
    np.testing.assert_allclose(quantity.statistics["mean"], losses[counted].mean(), rtol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_what_does_not_exist_is_nan_and_noise_is_small(name):
    result = probed(name)[2]
    exists = {  # starts of runs of 1, 2 and 3 of 4 layers
        "skip": (4, 3, 2),
        "swap": (3, 1, 0),
        "reverse": (0, 3, 2),
        "repeat": (4, 3, 2),
        "permute": (0, 3, 2),
        "parallel": (0, 3, 2),
    }
    assert set(exists) == set(OPERATIONS)
    for operation, starts in exists.items():
        for effect in order_module.EFFECTS:
            quantity = result.quantities[f"{operation}.{effect}"]
            for array in (quantity.statistics["mean"], quantity.statistics["mean_low"]):
                there = np.isfinite(array).reshape(3, DEPTH, -1).all(-1)
                assert there.tolist() == [[s < count for s in range(DEPTH)] for count in starts]
            assert array.shape == tuple(len(result.axes[axis].values) for axis in quantity.axes)
            assert quantity.noise_floor is not None and 0 <= quantity.noise_floor < 1e-5


def test_axes_compare_depths():
    axes = probed("pre")[2].axes
    np.testing.assert_array_equal(axes["start"].normalised, [0, 0.25, 0.5, 0.75])
    np.testing.assert_array_equal(axes["run_length"].normalised, [0.25, 0.5, 0.75])


def test_run_lengths_default_to_what_the_depth_allows_and_longer_ones_are_refused():
    assert order_module.default_lengths(24) == (1, 2, 4, 8)
    assert order_module.default_lengths(7) == (1, 2, 4)
    check(OrderConfig(), 1)
    check(OrderConfig(run_lengths=(8,)), 8)
    with pytest.raises(UserError) as refused:
        check(OrderConfig(run_lengths=(16,)), 8)
    expected = "probe.order.run_lengths=(16,): longer than the 8 layers of the model; legal: 1 to 8"
    assert str(refused.value) == expected


@pytest.mark.slow  # compiles for one device and for eight
def test_batches_split_over_devices_give_the_same():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
    network = subject(2, **ARCHITECTURES["sandwich"])
    spread = network._replace(
        params=jax.device_put(network.params, jax.sharding.NamedSharding(mesh, jax.P())),
        batch_sharding=jax.sharding.NamedSharding(mesh, jax.P("data")),
        devices=len(jax.devices()),
    )
    results = [order(n, text(9), Settings(batch_size=8), OrderConfig()) for n in (network, spread)]
    for name, quantity in results[0].quantities.items():
        np.testing.assert_allclose(
            results[1].quantities[name].by_example["mean"], quantity.by_example["mean"], atol=1e-5
        )
