"""The tuned lens: its gradient, its optimizer and its known optimum, by float64 arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_models
from scipy.special import log_softmax, rel_entr

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes import lens, tuned_lens
from depthgrow_jax.probes.config import LensConfig, TunedLensConfig
from depthgrow_jax.probes.lens import Translators, apply_translators
from depthgrow_jax.probes.settings import Settings
from depthgrow_jax.probes.streams import clean_streams

SETTINGS = Settings(batch_size=4)
CONFIG = LensConfig(top_k=4)
ROWS, LENGTH, STEPS, WIDTH = 8, 10, 3, 16
ARCHITECTURES = ("pre", "post", "sandwich")
PROMPTS, HELD_OUT = toy_models.text(3, LENGTH, seed=11), toy_models.text(4, LENGTH, seed=12)


def training_text(count, seed=20):
    """`count` batches `[ROWS, LENGTH + 1]` of random ids."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield rng.integers(0, toy_models.VOCABULARY, (ROWS, LENGTH + 1))


@functools.cache
def subject_of(name):
    return toy_models.subject(**toy_models.ARCHITECTURES[name])


@functools.cache
def streams_of(name):
    """`[K+1, ROWS, LENGTH, D]`, streams of one training batch."""
    subject = subject_of(name)
    tokens = jnp.asarray(next(training_text(1))[:, :-1], jnp.int32)
    return jax.jit(lambda: clean_streams(subject.cfg, subject.params, subject.program, tokens))()


def random_translators(scale=0.1, seed=3):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return Translators(draw(STEPS, WIDTH, WIDTH), draw(STEPS, WIDTH))


def head(subject, hidden):
    """Float64 logits of streams `[..., D]`: final norm and head written out."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), subject.params)
    norm = params["head"]["norm"]
    if subject.cfg.norm == "layer":
        hidden = hidden - hidden.mean(axis=-1, keepdims=True)
    hidden = hidden / np.sqrt(np.square(hidden).mean(axis=-1, keepdims=True) + subject.cfg.norm_eps)
    hidden = hidden * norm["scale"] + norm.get("bias", 0.0)
    return hidden @ (params["embed"]["table"].T if subject.cfg.tie_embeddings else params["head"]["kernel"])


def losses(subject, kernel, bias, streams):
    """Float64 KL(final || lens) of each point, mean over all tokens, `[K]`."""
    streams = np.asarray(streams, np.float64)
    p = np.exp(log_softmax(head(subject, streams[-1]), axis=-1))
    found = []
    for point in range(len(streams) - 1):
        moved = streams[point] + streams[point] @ kernel[point] + bias[point]
        q = np.exp(log_softmax(head(subject, moved), axis=-1))
        found.append(rel_entr(p, q).sum(axis=-1).mean())
    return np.array(found)


def test_translators_move_every_point_but_the_last():
    streams, (kernel, bias) = streams_of("pre"), random_translators()
    moved = np.asarray(apply_translators(Translators(kernel, bias), streams))
    for point in range(STEPS):
        h = np.asarray(streams[point], np.float64)
        expected = h + np.einsum("btd,de->bte", h, np.asarray(kernel[point])) + np.asarray(bias[point])
        np.testing.assert_allclose(moved[point], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(moved[-1], streams[-1])


def test_untrained_is_the_logit_lens():
    subject = subject_of("post")
    identity = tuned_lens.identity_translators(STEPS, WIDTH)
    np.testing.assert_array_equal(apply_translators(identity, streams_of("post")), streams_of("post"))
    untrained = lens.measure_lens(subject, PROMPTS, SETTINGS, CONFIG, identity, what="")
    for name, quantity in lens.logit_lens(subject, PROMPTS, SETTINGS, CONFIG).quantities.items():
        for statistic, values in quantity.by_example.items():
            got = untrained.quantities[name].by_example[statistic]
            np.testing.assert_allclose(got, values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_losses_and_their_gradients(name):
    subject, streams, translators = subject_of(name), streams_of(name), random_translators()
    kernel, bias = (np.asarray(leaf, np.float64) for leaf in translators)
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(kernel.shape), rng.standard_normal(bias.shape)
    step = 1e-5
    forward, backward = (
        losses(subject, kernel + sign * step * direction[0], bias + sign * step * direction[1], streams)
        for sign in (1, -1)
    )
    # One block for all tokens; blocks of 3 of the 10 positions, the last filled up.
    for chunk_bytes in (8 << 20, 3 * ROWS * toy_models.VOCABULARY * 4):
        found, gradients = jax.jit(tuned_lens.losses_and_gradients, static_argnums=(0, 4))(
            subject.cfg, subject.params, translators, streams, chunk_bytes
        )
        np.testing.assert_allclose(found, losses(subject, kernel, bias, streams), rtol=1e-5)
        slopes = (np.asarray(gradients.kernel) * direction[0]).sum(axis=(1, 2))
        slopes += (np.asarray(gradients.bias) * direction[1]).sum(axis=1)
        np.testing.assert_allclose(slopes, (forward - backward) / (2 * step), rtol=1e-3, atol=1e-5)


def test_training_is_adam_with_a_clip_for_each_point():
    steps, rate = 3, 0.05
    subject = subject_of("pre")
    # Louder logits: gradients on both sides of the clip.
    louder = {"norm": {"scale": 2 * subject.params["head"]["norm"]["scale"]}}
    subject = subject._replace(params=subject.params | {"head": louder})
    trained, tokens, loss = tuned_lens.train_translators(
        subject, SETTINGS, TunedLensConfig(steps=steps, learning_rate=rate), training_text(steps)
    )
    assert tokens == steps * ROWS * LENGTH
    gradient = jax.jit(tuned_lens.losses_and_gradients, static_argnums=(0, 4))
    leaves = [np.zeros((STEPS, WIDTH, WIDTH)), np.zeros((STEPS, WIDTH))]
    first, second = ([np.zeros_like(leaf) for leaf in leaves] for _ in range(2))
    norms = []
    for step, text in enumerate(training_text(steps)):
        streams = clean_streams(
            subject.cfg, subject.params, subject.program, jnp.asarray(text[:, :-1], jnp.int32)
        )
        translators = Translators(*(jnp.asarray(leaf, jnp.float32) for leaf in leaves))
        last, gradients = gradient(subject.cfg, subject.params, translators, streams, SETTINGS.chunk_bytes)
        gradients = [np.asarray(leaf, np.float64) for leaf in gradients]
        norms.append(np.sqrt((gradients[0] ** 2).sum(axis=(1, 2)) + (gradients[1] ** 2).sum(axis=1)))
        clip = 1 / np.maximum(norms[-1], 1)
        for i, leaf in enumerate(leaves):
            g = gradients[i] * clip.reshape(-1, *[1] * (leaf.ndim - 1))
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g**2
            m, v = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.999 ** (step + 1))
            leaves[i] = leaf - rate * (1 - step / steps) * m / (np.sqrt(v) + 1e-8)
    # The clip decides, and not for all points alike.
    assert (np.array(norms) > 1).any() and (np.array(norms) < 1).any()
    np.testing.assert_allclose(trained.kernel, leaves[0], atol=2e-5)
    np.testing.assert_allclose(trained.bias, leaves[1], atol=2e-5)
    np.testing.assert_allclose(loss, np.mean(last), rtol=1e-4)


@pytest.mark.parametrize("name", ["pre", "post"])
def test_training_helps_on_other_text(name):
    subject = subject_of(name)
    before = jax.tree.map(np.array, subject.params)
    training = TunedLensConfig(steps=60, learning_rate=0.02)
    result = tuned_lens.tuned_lens(
        subject, PROMPTS, SETTINGS, CONFIG, training, training_text(1000), HELD_OUT
    )
    trained, untrained = (
        result.quantities[f"held_out.{name}"].statistics["mean"] for name in ("kl", "kl_untrained")
    )
    assert (trained[:-1] < 0.8 * untrained[:-1]).all()
    assert trained[-1] == untrained[-1] == 0 == result.quantities["kl"].statistics["max"][-1]
    logit_lens = lens.logit_lens(subject, HELD_OUT, SETTINGS, CONFIG).quantities["kl"].statistics["mean"]
    np.testing.assert_allclose(untrained, logit_lens, rtol=1e-5)
    note = result.notes["training"]
    np.testing.assert_allclose(note["kl_before"], untrained[:-1].mean())
    np.testing.assert_allclose(note["kl_after"], trained[:-1].mean())
    assert note["tokens"] == 60 * ROWS * LENGTH and note["held_out_sequences"] == 4
    assert f"60 updates of {ROWS * LENGTH} tokens" in result.conventions["tuned lens"]
    # What the arrays give through the head is what was measured on the prompts.
    tokens = jnp.asarray(PROMPTS.inputs)
    streams = clean_streams(subject.cfg, subject.params, subject.program, tokens)[:, :, 1:]
    kl = losses(subject, result.arrays["translator.kernel"], result.arrays["translator.bias"], streams)
    np.testing.assert_allclose(result.quantities["kl"].statistics["mean"][:-1], kl, rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, subject.params, before)


def test_a_constant_shift_is_found():
    # Layers whose attention is switched off and whose MLP adds its bias: h_K is h_l plus a constant.
    subject = toy_models.subject(mlp="gelu", mlp_bias=True)
    down = dict(subject.params["layers"]["mlp"]["down"])
    shifts = np.random.default_rng(0).standard_normal((STEPS, WIDTH)).astype(np.float32)
    layers = dict(subject.params["layers"])
    layers["mlp"] = layers["mlp"] | {"down": {"kernel": 0 * down["kernel"], "bias": jnp.asarray(shifts)}}
    gate = jnp.array([[0.0, 1.0]] * STEPS)
    subject = subject._replace(
        params=subject.params | {"layers": layers}, program=model.layer_program(subject.cfg, STEPS, gate=gate)
    )
    known = tuned_lens.identity_translators(STEPS, WIDTH)._replace(
        bias=jnp.asarray(np.cumsum(shifts[::-1], axis=0)[::-1])
    )
    optimal = lens.measure_lens(subject, HELD_OUT, SETTINGS, CONFIG, known, what="").quantities["kl"]
    assert optimal.statistics["max"].max() < 1e-5
    result = tuned_lens.tuned_lens(
        subject,
        PROMPTS,
        SETTINGS,
        CONFIG,
        TunedLensConfig(steps=300, learning_rate=0.05),
        training_text(300),
        HELD_OUT,
    )
    trained, untrained = (
        result.quantities[f"held_out.{name}"].statistics["mean"] for name in ("kl", "kl_untrained")
    )
    assert (untrained[:-1] > 0.3).all() and (trained[:-1] < 0.02 * untrained[:-1]).all()


def test_devices_share_the_batch_and_one_step_is_compiled():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    subject, training = subject_of("pre"), TunedLensConfig(steps=3)
    alone, _, _ = tuned_lens.train_translators(subject, SETTINGS, training, training_text(3))
    everywhere, rows = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
    sharded = subject._replace(
        params=jax.device_put(subject.params, everywhere), batch_sharding=rows, devices=8
    )
    compiled = tuned_lens._update._cache_size()
    together, _, _ = tuned_lens.train_translators(sharded, SETTINGS, training, training_text(3))
    assert tuned_lens._update._cache_size() == compiled + 1
    # Adam divides by the size of the gradient, so rounding of small gradients is not small.
    np.testing.assert_allclose(together.kernel, alone.kernel, atol=1e-4)
    assert np.abs(alone.kernel).max() > 1e-3


def test_refusals():
    subject, training = subject_of("pre"), TunedLensConfig(steps=3)
    with pytest.raises(UserError, match=r"probe\.tuned_lens\.steps=3: .* only 2 batches"):
        tuned_lens.train_translators(subject, SETTINGS, training, training_text(2))
    foreign = (text + 1 for text in training_text(3))
    with pytest.raises(UserError, match="outside the vocabulary of 37"):
        tuned_lens.train_translators(subject, SETTINGS, training, foreign)
