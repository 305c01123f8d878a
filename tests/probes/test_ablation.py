"""Skipping layers: what must be exactly zero or one, and agreement with a naive loop of full passes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import ARCHITECTURES, EVERY, ragged, subject, text

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.ablation import ablation, check, second_half_share, split_positions
from depthgrow_jax.probes.config import AblationConfig
from depthgrow_jax.probes.inputs import Prompts
from depthgrow_jax.probes.result import quantity
from depthgrow_jax.probes.settings import Settings

DEPTH = 3
SETTINGS = Settings(batch_size=3)
CONFIG = AblationConfig(splits=2, split_first=3, split_stride=4, split_last=2)
PROMPTS = ragged()  # lengths 20, 14, 17
POSITION = np.arange(PROMPTS.inputs.shape[1])
everywhere = pytest.mark.parametrize("architecture", EVERY)


@functools.cache
def network_of(architecture):
    return subject(DEPTH, **ARCHITECTURES[architecture])


@functools.cache
def result_of(architecture):
    """Every mode and part on the same prompts."""
    return ablation(network_of(architecture), PROMPTS, SETTINGS, CONFIG)


def values(result, name, statistic="mean"):
    return result.quantities[name].statistics[statistic]


@functools.partial(jax.jit, static_argnames="cfg")
def full_pass(cfg, params, program, tokens, gate, mask):
    """(a + m of every layer, logits) of a full forward pass, layer after layer from the embedding.

    `gate` [K, 2] closes sub-layers at the tokens of `mask` [B, T]; elsewhere the layer is whole.
    """
    x, added = model.embed(cfg, params, tokens), []
    closed = program._replace(gate=program.gate * gate)
    for k in range(DEPTH):
        whole = model.layer_step(cfg, params, k, x, program=program)
        part = model.layer_step(cfg, params, k, x, program=closed)
        added.append(jnp.where(mask[..., None], part.attn + part.mlp, whole.attn + whole.mlp))
        x = x + added[-1]
    return jnp.stack(added), model.unembed(cfg, params, x)


def log_softmax(z):
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def naive(network, part, removed):
    """Effects at every token of removing at every layer, `[S, K, splits, P, T]` and `[S, splits, P, T]`.

    removed: bool [splits, P, T].
    """
    gates = {"layer": (0.0, 0.0), "attention": (0.0, 1.0), "mlp": (1.0, 0.0)}

    def run(gate, mask):
        out = full_pass(network.cfg, network.params, network.program, PROMPTS.inputs, gate, mask)
        return tuple(np.asarray(x, np.float64) for x in out)

    clean, logits = run(np.ones((DEPTH, 2), np.float32), np.zeros(PROMPTS.inputs.shape, bool))
    log_p = log_softmax(logits)
    effect = np.zeros((DEPTH, DEPTH, len(removed), *PROMPTS.inputs.shape))
    names = ("kl", "kl_reverse", "prob_l2", "loss_increase", "top1_agreement")
    out = {name: np.zeros((DEPTH, len(removed), *PROMPTS.inputs.shape)) for name in names}
    for s in range(DEPTH):
        gate = np.ones((DEPTH, 2), np.float32)
        gate[s] = gates[part]
        for i, mask in enumerate(removed):
            other, logits_s = run(gate, mask)
            norm = np.maximum(np.linalg.norm(clean, axis=-1), 1e-6)
            effect[s, :, i] = np.linalg.norm(clean - other, axis=-1) / norm
            log_q = log_softmax(logits_s)
            p, q = np.exp(log_p), np.exp(log_q)
            out["kl"][s, i] = (p * (log_p - log_q)).sum(-1)
            out["kl_reverse"][s, i] = (q * (log_q - log_p)).sum(-1)
            out["prob_l2"][s, i] = np.linalg.norm(p - q, axis=-1)
            at_target = np.take_along_axis(log_p - log_q, PROMPTS.targets[..., None], -1)
            out["loss_increase"][s, i] = at_target[..., 0]
            out["top1_agreement"][s, i] = p.argmax(-1) == q.argmax(-1)
    return effect, out


def pooled(per_token, counted, statistic):
    """Statistics of `[..., splits, P, T]` values: over all counted tokens, or of each prompt and averaged."""
    by_prompt = []
    for i in range(counted.shape[1]):
        chosen = per_token[..., :, i, :][..., counted[:, i]]
        by_prompt.append(
            {"mean": chosen.mean(-1), "median": np.median(chosen, -1), "max": chosen.max(-1)}
            | {"p95": np.quantile(chosen, 0.95, axis=-1)}
        )
    stack = np.stack([entry["max" if "max" in statistic else statistic] for entry in by_prompt])
    if statistic == "mean":
        return np.average(stack, axis=0, weights=counted.sum(axis=(0, 2)))
    return stack.max(axis=0) if statistic == "max" else stack.mean(axis=0)


def assert_equal_to_naive(result, label, network, part, removed, counted, **tolerance):
    effect, out = naive(network, part, removed)
    for statistic in ("mean", "median", "p95", "max", "mean_of_max"):
        got = values(result, f"{label}.effect", statistic)
        np.testing.assert_allclose(got, pooled(effect, counted, statistic), **tolerance)
    for name, per_token in out.items():
        got = values(result, f"{label}.{name}")
        np.testing.assert_allclose(got, pooled(per_token, counted, "mean"), **tolerance, err_msg=name)


@everywhere
def test_current_effects_equal_a_naive_loop(architecture):
    counted = (PROMPTS.valid & (POSITION >= 1))[None]
    for part in ("layer", "attention", "mlp"):
        assert_equal_to_naive(
            result_of(architecture),
            f"current.{part}",
            network_of(architecture),
            part,
            PROMPTS.valid[None],
            counted,
            rtol=1e-3,
            atol=1e-5,
        )


def test_sharing_the_prefix_changes_nothing_above_1e_6():
    """The same numbers from full passes in float32, on a network of ordinary scale."""
    network = subject(DEPTH, **{**ARCHITECTURES["pre"], "init_std": 0.1})
    result = ablation(network, PROMPTS, SETTINGS, AblationConfig(parts=("layer",), modes=("current",)))
    counted = (PROMPTS.valid & (POSITION >= 1))[None]
    assert_equal_to_naive(
        result, "current.layer", network, "layer", PROMPTS.valid[None], counted, rtol=1e-6, atol=1e-6
    )


def test_future_effects_equal_a_naive_loop():
    network, settings = network_of("pre"), Settings(batch_size=3, protect=1)
    result = ablation(network, PROMPTS, settings, dataclasses.replace(CONFIG, modes=("future",)))
    splits = split_positions(CONFIG, PROMPTS.lengths).T[:, :, None]
    used = splits >= 0
    removed = used & (splits > POSITION) & (POSITION >= 1)
    counted = used & (splits <= POSITION) & PROMPTS.valid
    for part in ("layer", "attention", "mlp"):
        assert_equal_to_naive(result, f"future.{part}", network, part, removed, counted, rtol=1e-3, atol=1e-5)


@everywhere
def test_exact_zeros_and_ones(architecture):
    result = result_of(architecture)
    below = np.tril(np.ones((DEPTH, DEPTH), bool), -1)
    for name, measured in result.quantities.items():
        for statistic, array in measured.statistics.items():
            assert np.isfinite(array).all(), (name, statistic)
        if name.endswith("effect"):
            for statistic in ("mean", "median", "p95", "max"):
                assert (measured.statistics[statistic][below] == 0).all(), (name, statistic)
    for statistic in ("mean", "median", "p95", "max", "mean_low", "mean_high"):
        assert (np.diag(values(result, "current.layer.effect", statistic)) == 1).all()
        assert (np.diag(values(result, "future.layer.effect", statistic)) == 0).all()
        for part in ("layer", "attention", "mlp"):
            assert (values(result, f"future.{part}.effect", statistic)[-1] == 0).all()
            for name in ("kl", "kl_reverse", "prob_l2", "loss_increase"):
                # The last layer's own kernels run in no suffix, so not even rounding is left.
                assert abs(values(result, f"future.{part}.{name}", statistic)[-1]) <= 1e-6
    assert not any(name.startswith("local_future") and "effect" not in name for name in result.quantities)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "post"])
def test_a_silent_layer_has_no_effect(architecture):
    """All weights of layer 1 zero. (A post-norm layer of zero weights still normalises the stream.)"""
    network = network_of(architecture)
    layers = jax.tree.map(lambda p: p.at[1].set(0.0), network.params["layers"])
    silent = network._replace(params={**network.params, "layers": layers})
    result = ablation(silent, PROMPTS, SETTINGS, CONFIG)
    for name, measured in result.quantities.items():
        if name.split(".")[1] in ("layer", "attention", "attention_direct", "mlp", "mean"):
            expected = 1.0 if name.endswith("top1_agreement") else 0.0
            np.testing.assert_allclose(measured.statistics["max"][1], expected, atol=2e-6, err_msg=name)


@everywhere
def test_skipping_everywhere_is_removing_the_layer(architecture):
    """Against the network whose parameters lack the layer, run with the other layers' own factors."""
    network, counted = network_of(architecture), PROMPTS.valid & (POSITION >= 1)
    cfg, tokens = network.cfg, jnp.asarray(PROMPTS.inputs)
    logits = jax.jit(lambda params, program: model.apply(cfg, params, tokens, program=program).logits)
    clean = log_softmax(np.asarray(logits(network.params, network.program), np.float64))
    for s in range(DEPTH):
        rest = np.delete(np.arange(DEPTH), s)
        layers = jax.tree.map(lambda p, rest=rest: p[rest], network.params["layers"])
        program = model.reorder(network.program, rest)._replace(order=None)
        gone = log_softmax(np.asarray(logits({**network.params, "layers": layers}, program), np.float64))
        kl = (np.exp(clean) * (clean - gone)).sum(-1)[counted].mean()
        np.testing.assert_allclose(values(result_of(architecture), "current.layer.kl")[s], kl, rtol=1e-4)


def test_local_effects_read_the_clean_stream_less_one_contribution():
    network, result = network_of("sandwich"), result_of("sandwich")
    cfg, params, program = network.cfg, network.params, network.program
    taps = {"h": lambda tap: tap.h, "c": lambda tap: tap.attn + tap.mlp}
    out = model.apply(cfg, params, jnp.asarray(PROMPTS.inputs), program=program, taps=taps)
    h, c = np.asarray(out.taps["h"]), np.asarray(out.taps["c"])

    @jax.jit
    def adds(layer, read):
        tap = model.layer_step(cfg, params, layer, read, program=program)
        return tap.attn + tap.mlp

    splits = split_positions(CONFIG, PROMPTS.lengths).T[:, :, None]
    used = splits >= 0
    cases = {
        "local_current": (PROMPTS.valid[None], (PROMPTS.valid & (POSITION >= 1))[None]),
        "local_future": (used & (splits > POSITION), used & (splits <= POSITION) & PROMPTS.valid),
    }
    for mode, (removed, counted) in cases.items():
        effect = np.zeros((DEPTH, DEPTH, *removed.shape))
        for s, layer in itertools.combinations(range(DEPTH), 2):
            for i, mask in enumerate(removed):
                other = np.asarray(adds(layer, jnp.asarray(h[layer] - mask[..., None] * c[s])))
                gap = np.linalg.norm(c[layer] - other, axis=-1)
                effect[s, layer, i] = gap / np.linalg.norm(c[layer], axis=-1)
        got = values(result, f"{mode}.layer.effect")
        np.testing.assert_allclose(got, pooled(effect, counted, "mean"), rtol=1e-4, atol=1e-6)


def test_mean_and_resample_ablation_by_hand():
    """One layer, so that the output after it is h_0 plus whatever stands in for its contribution."""
    network, prompts = subject(1, **ARCHITECTURES["pre"]), ragged((9, 6, 8))
    result = ablation(
        network,
        prompts,
        Settings(batch_size=3),
        AblationConfig(parts=("mean", "resample"), modes=("current",)),
    )
    taps = {"h": lambda tap: tap.h, "c": lambda tap: tap.attn + tap.mlp}
    out = model.apply(network.cfg, network.params, jnp.asarray(prompts.inputs), taps=taps)
    h, c = np.asarray(out.taps["h"][0]), np.asarray(out.taps["c"][0])
    lengths = prompts.lengths
    mean = np.concatenate([c[i, 1 : lengths[i]] for i in range(3)]).mean(axis=0)
    clean = log_softmax(np.asarray(out.logits, np.float64))
    expected = {"mean": [], "resample": []}
    for i in range(3):
        partner = (i + 1) % 3
        for t in range(1, lengths[i]):
            source = 1 + (t - 1) % (lengths[partner] - 1)
            for name, instead in (("mean", mean), ("resample", c[partner, source])):
                stream = jnp.asarray(h[i, t] + instead)[None, None]
                q = log_softmax(np.asarray(model.unembed(network.cfg, network.params, stream), np.float64))[
                    0, 0
                ]
                expected[name].append((np.exp(clean[i, t]) * (clean[i, t] - q)).sum())
    for name, numbers in expected.items():
        np.testing.assert_allclose(values(result, f"current.{name}.kl")[0], np.mean(numbers), rtol=1e-4)


SMALL = dataclasses.replace(CONFIG, parts=("layer", "resample"), modes=("current", "future"))


@pytest.mark.slow  # three compilations of every sweep
def test_batches_lanes_and_chunks_do_not_change_the_numbers():
    network, prompts = network_of("pre"), text(5)
    results = [
        ablation(network, prompts, settings, SMALL)
        for settings in (Settings(batch_size=5), Settings(batch_size=5, lanes=2, chunk_bytes=4000))
    ]
    results.append(ablation(network, prompts, SETTINGS, SMALL))
    for name in results[0].quantities:
        for statistic in ("mean", "mean_low", "p95", "max"):
            one, two, three = (values(r, name, statistic) for r in results)
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=5e-6, err_msg=name)
            np.testing.assert_allclose(one, three, rtol=1e-5, atol=5e-6, err_msg=name)


def test_padding_is_as_if_it_were_not_there():
    network, length = network_of("pre"), 14
    alone = Prompts(*(field[1:2, :length] for field in PROMPTS[:4]), PROMPTS.answer[1:2])
    single = ablation(network, alone, SETTINGS, dataclasses.replace(SMALL, parts=("layer",)))
    for name, measured in single.quantities.items():
        for statistic, array in measured.by_example.items():
            among = result_of("pre").quantities[name].by_example[statistic][1]
            np.testing.assert_allclose(among, array[0], atol=5e-6, err_msg=name)


def test_protected_first_token_is_left_alone():
    """Of two tokens the second alone loses its layer: the own effect is 0 there and 1 here."""
    network = network_of("pre")
    config = AblationConfig(parts=("layer",), modes=("current",))
    settings = Settings(batch_size=2, protect=1, uncounted=0)
    protected = ablation(network, text(2, length=2), settings, config)
    assert (np.diag(values(protected, "current.layer.effect")) == 0.5).all()
    assert (np.diag(values(protected, "current.layer.effect", "max")) == 1).all()


def test_prompts_of_which_nothing_counts_are_refused():
    """They would enter means over prompts as zeros."""
    config = AblationConfig(parts=("layer",), modes=("current",))
    with pytest.raises(UserError, match=r"prompt 2 of 1 tokens has none that counts .* probe\.uncounted=1"):
        ablation(network_of("pre"), ragged((9, 1, 8)), SETTINGS, config)
    with pytest.raises(UserError, match=r"prompt 1 of 4 tokens .* intervention .* probe\.protect=4"):
        ablation(network_of("pre"), text(2, length=4), Settings(protect=4), config)


@pytest.mark.slow  # every operation is compiled by itself
def test_without_jit_the_answers_are_the_same():
    network, prompts = subject(2, **ARCHITECTURES["pre"]), text(2, length=9)
    config = dataclasses.replace(SMALL, modes=("current", "local_current"))
    compiled = ablation(network, prompts, SETTINGS, config)
    with jax.disable_jit():
        plain = ablation(network, prompts, SETTINGS, config)
    for name, measured in compiled.quantities.items():
        np.testing.assert_allclose(values(plain, name), measured.statistics["mean"], atol=5e-6, err_msg=name)


@pytest.mark.slow  # another compilation of every sweep
def test_bfloat16_is_finite_and_reports_its_noise():
    network = subject(DEPTH, **ARCHITECTURES["pre"], dtype="bfloat16")
    result = ablation(network, PROMPTS, SETTINGS, SMALL)
    for name, measured in result.quantities.items():
        assert np.isfinite(measured.statistics["mean"]).all() and measured.noise_floor is not None, name
    assert result.conventions["dtype"].startswith("bfloat16")


def test_splits_follow_the_convention():
    """Every 8th position from 8 to T - 5, at most 4 of them, the same for prompts of equal length."""
    config = AblationConfig()
    splits = split_positions(config, np.array([12, 13, 21, 60, 60]))
    assert splits[0].tolist() == [-1] * 4
    assert splits[1].tolist() == [8, -1, -1, -1]
    assert sorted(splits[2]) == [-1, -1, 8, 16]
    assert len(set(splits[3])) == 4 and set(splits[3]) <= {8, 16, 24, 32, 40, 48}
    assert (splits[3] == splits[4]).all()


def test_the_share_of_the_second_half_by_hand():
    by_example = {"mean": np.ones((2, 3)), "max": np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])}
    share = second_half_share(quantity(("skipped",), "", by_example), "current")
    assert share.value == pytest.approx(
        (1.0 + 2.0) / 6.0
    )  # half of the middle layer and the last: d = 2, 2, 2
    assert 0 <= share.low <= share.value <= share.high <= 1


def test_prompts_that_cannot_be_used_are_named():
    with pytest.raises(UserError, match=r"prompt 2 has 12 tokens.*at least 13"):
        check(AblationConfig(), ragged((20, 12)))
    check(AblationConfig(modes=("current",)), ragged((20, 12)))
    with pytest.raises(UserError, match="resample"):
        check(AblationConfig(), text(1))
