"""Integrated gradients against sums over paths that are made without them."""

import dataclasses

import jax
import numpy as np
import pytest
import toy_models

from depthgrow_jax import model
from depthgrow_jax.probes.config import AttributionConfig
from depthgrow_jax.probes.integrated_gradients import integrated_gradients, path_rule
from depthgrow_jax.probes.settings import Settings

SETTINGS = Settings(batch_size=2, lanes=8)
SIZES = (10, 7)
WHERE = ((7, 8, 9), (4, 5, 6))


def subject_away_from_zero(name):
    """A toy whose embeddings share a direction, as trained ones do.

    The mean of random embeddings is near 0, and a norm turns so fast there that no rule of few nodes follows.
    """
    subject = toy_models.subject(depth=2, **toy_models.ARCHITECTURES[name])
    shared = np.random.default_rng(1).normal(size=toy_models.BASE["width"]).astype(np.float32)
    table = subject.params["embed"]["table"] + shared[None]
    return subject._replace(params={**subject.params, "embed": {"table": table}})


def by_example(result):
    return {name: quantity.by_example["mean"] for name, quantity in result.quantities.items()}


def states_and_means(subject, prompts):
    """Per prompt, run alone, h_0..h_K; per point the mean over prompts without their first tokens."""
    cfg, params, program = subject.cfg, subject.params, subject.program
    run = jax.jit(lambda ids: model.apply(cfg, params, ids, program=program, taps={"h": lambda tap: tap.h}))
    states = []
    for ids, size in zip(prompts.inputs, SIZES, strict=True):
        output = run(ids[None, :size])
        states.append([*np.asarray(output.taps["h"])[:, 0], np.asarray(output.hidden)[0]])
    return states, [np.concatenate([s[k][1:] for s in states]).mean(axis=0) for k in range(len(states[0]))]


@pytest.mark.parametrize("name", ["pre", "pre_lns", "post", "sandwich"])
def test_attributions_add_up_to_the_change_of_the_target(name):
    subject, prompts = subject_away_from_zero(name), toy_models.ragged(SIZES)
    values = {
        rule: by_example(
            integrated_gradients(subject, prompts, SETTINGS, AttributionConfig(nodes=24, rule=rule))
        )
        for rule in ("legendre", "left")
    }
    fine, coarse = values["legendre"], values["left"]
    assert fine["attribution"].shape == (2, 3, 10) and fine["completeness"].shape == (2, 3)
    assert fine["completeness"].max() < 1e-4 and coarse["completeness"].max() > 100 * 1e-4
    np.testing.assert_allclose(
        fine["completeness"], abs(fine["attribution"].sum(-1) - fine["target_change"]), atol=1e-12
    )
    np.testing.assert_allclose(
        coarse["completeness_relative"], coarse["completeness"] / abs(coarse["target_change"]), rtol=1e-6
    )
    np.testing.assert_allclose(fine["by_layer.attribution"], abs(fine["attribution"]).sum(-1), rtol=1e-6)
    # Padding, and at point K whatever is no answer position, has no part in the answer.
    assert not fine["attribution"][1, :, 7:].any()
    assert not fine["attribution"][:, -1, :4].any()

    # At point K every answer position has a path of its own: its attribution is a difference of two values.
    states, means = states_and_means(subject, prompts)
    cfg, head = subject.cfg, jax.tree.map(lambda x: np.asarray(x, np.float64), subject.params["head"])
    kernel = head["kernel"] if "kernel" in head else np.asarray(subject.params["embed"]["table"]).T

    def log_prob(h, target):
        h = h.astype(np.float64)
        h = h - h.mean() if cfg.norm == "layer" else h
        h = h / np.sqrt((h**2).mean() + cfg.norm_eps) * head["norm"]["scale"] + head["norm"].get("bias", 0.0)
        logits = h @ kernel
        return logits[target] - np.log(np.exp(logits).sum())

    for i, where in enumerate(WHERE):
        change = [
            log_prob(states[i][-1][t], prompts.targets[i, t]) - log_prob(means[-1], prompts.targets[i, t])
            for t in where
        ]
        np.testing.assert_allclose(fine["attribution"][i, -1, where], change, atol=1e-4)


@pytest.mark.parametrize("point", [0, 1])
def test_inner_points_are_those_of_gradients_along_a_fine_path(point):
    subject, prompts = subject_away_from_zero("pre"), toy_models.ragged(SIZES)
    cfg, params, program = subject.cfg, subject.params, subject.program
    config = AttributionConfig(nodes=24, target="prob", baseline="prompt", uncounted=0)
    result = integrated_gradients(subject, prompts, SETTINGS, config)
    left = integrated_gradients(subject, prompts, SETTINGS, dataclasses.replace(config, rule="left"))
    states, _ = states_and_means(subject, prompts)
    i, where = 1, list(WHERE[1])
    h = states[i][point]
    mean = h.mean(axis=0, keepdims=True)

    def target(x):
        logits = model.apply(cfg, params, hidden=x[None], program=program, start=point).logits[0]
        return jax.nn.softmax(logits)[np.array(where), prompts.targets[i, where]].sum()

    gradient = jax.jit(jax.vmap(jax.grad(target)))

    def attributed(nodes):
        path = mean + nodes[:, None, None].astype(np.float32) * (h - mean)[None]
        averaged = np.asarray(gradient(path), np.float64).mean(axis=0)
        return (averaged * (h - mean)).sum(axis=-1)

    midpoints = attributed((np.arange(480) + 0.5) / 480)
    np.testing.assert_allclose(by_example(result)["attribution"][i, point, :7], midpoints, atol=2e-5)
    same_rule = attributed(np.repeat(np.arange(24) / 24, 20))
    np.testing.assert_allclose(by_example(left)["attribution"][i, point, :7], same_rule, atol=2e-6)
    assert abs(same_rule - midpoints).max() > 1e-4
    assert result.quantities["attribution"].unit == "probability"
    differing = {k for k, v in result.conventions.items() if left.conventions[k] != v}
    assert differing == {"path"}


def test_batches_and_chunks_change_nothing():
    subject, prompts = subject_away_from_zero("pre"), toy_models.ragged((10, 7, 7))
    config = AttributionConfig(nodes=24)
    whole = integrated_gradients(subject, prompts, Settings(batch_size=3, lanes=100), config)
    pieces = integrated_gradients(subject, prompts, SETTINGS, config)
    for name, values in by_example(whole).items():
        if name != "completeness_relative":
            np.testing.assert_allclose(by_example(pieces)[name], values, atol=2e-5)


def test_nodes_and_weights():
    places, weights = path_rule("legendre", 2)
    np.testing.assert_allclose(places, [0.5 - 12**-0.5, 0.5 + 12**-0.5])
    np.testing.assert_allclose(weights, [0.5, 0.5])
    places, weights = path_rule("left", 4)
    assert places.tolist() == [0, 0.25, 0.5, 0.75] and weights.tolist() == [0.25] * 4
