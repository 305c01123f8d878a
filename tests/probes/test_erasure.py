"""Erasure against a naive loop over prompts without padding; and the cropping that attribution shares."""

import jax
import numpy as np
import pytest
import toy_models
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.attribution import answers, crop
from depthgrow_jax.probes.config import AttributionConfig
from depthgrow_jax.probes.erasure import erasure
from depthgrow_jax.probes.settings import Settings

SIZES = (11, 8, 8)
SETTINGS = Settings(batch_size=2, lanes=5, uncounted=1)


def prompts_without_last_target():
    """Prompts of three sizes; two positions predict the answer, the last one has no successor."""
    prompts = toy_models.ragged(SIZES)
    last = np.arange(max(SIZES))[None] == np.asarray(SIZES)[:, None] - 1
    return prompts._replace(scored=prompts.scored & ~last)


def naive(subject, prompts, examples, means):
    """(prob_l2, drop): lists over prompts of `[K + 1, t, answer]` and `[K + 1, t]`, each prompt run alone.

    means: over the `prompt` or the `dataset`, first positions left out.
    """
    cfg, params, program = subject.cfg, subject.params, subject.program
    table, points = np.asarray(params["embed"]["table"]), range(subject.steps + 1)

    @jax.jit
    def run(x, start, stop):
        return model.apply(cfg, params, hidden=x, program=program, start=start, stop=stop)

    def states_of(ids):
        return [np.asarray(run(table[ids][None], np.int32(0), np.int32(k)).hidden)[0] for k in points]

    states = [states_of(ids[:size]) for ids, size in zip(prompts.inputs, SIZES, strict=True)]
    prob_l2, drops = [], []
    for i in range(examples):
        where = np.arange(prompts.answer[i], SIZES[i] - 1)
        target = prompts.targets[i, where]

        def predict(x, start, where=where):
            logits = np.asarray(run(x[None], np.int32(start), np.int32(subject.steps)).logits, np.float64)[
                0, where
            ]
            p = np.exp(logits - logits.max(-1, keepdims=True))
            return p / p.sum(-1, keepdims=True)

        distances = np.zeros((subject.steps + 1, SIZES[i], len(where)))
        drop = np.zeros((subject.steps + 1, SIZES[i]))
        for k in points:
            chosen = [states[i][k][: SIZES[i] - 1]] if means == "prompt" else [s[k] for s in states]
            mean = np.concatenate([s[1:] for s in chosen]).mean(axis=0)
            clean = predict(states[i][k], k)
            for t in range(SIZES[i]):
                damaged = states[i][k].copy()
                damaged[t] = mean
                p = predict(damaged, k)
                distances[k, t] = np.linalg.norm(p - clean, axis=-1)
                each = np.arange(len(where))
                drop[k, t] = np.log(clean[each, target] / p[each, target]).sum()
        prob_l2.append(distances)
        drops.append(drop)
    return prob_l2, drops


def sharded(subject):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    spec = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put(subject.params, NamedSharding(mesh, PartitionSpec()))
    return subject._replace(params=params, batch_sharding=spec, devices=2)


@pytest.mark.parametrize(
    ("name", "baseline"),
    [("pre", "dataset"), ("pre_lns", "prompt"), ("post", "dataset"), ("sandwich", "prompt")],
)
def test_every_erasure_is_that_of_a_naive_loop(name, baseline):
    subject = toy_models.subject(depth=2, **toy_models.ARCHITECTURES[name])
    prompts = prompts_without_last_target()
    config = AttributionConfig(examples=2, length=12, erasure_baseline=baseline)
    expected_l2, expected_drop = naive(subject, prompts, 2, baseline)
    result = erasure(sharded(subject) if name == "pre" else subject, prompts, SETTINGS, config)

    assert (result.examples, result.tokens) == (2, 9 + 6)
    assert result.notes["answer_positions"] == [[8, 9], [5, 6]]
    l2, drop = result.quantities["prob_l2"], result.quantities["log_prob_drop"]
    by_layer = result.quantities["by_layer.prob_l2"]
    assert l2.axes == drop.axes == ("stream", "token") and by_layer.axes == ("stream",)
    for i in range(2):
        size = SIZES[i] - 1  # cut after the answer
        distances, drops = expected_l2[i][:, :size], expected_drop[i][:, :size]
        np.testing.assert_allclose(l2.by_example["max"][i][:, :size], distances.max(axis=-1), atol=3e-6)
        np.testing.assert_allclose(l2.by_example["mean"][i][:, :size], distances.mean(axis=-1), atol=3e-6)
        np.testing.assert_allclose(drop.by_example["mean"][i][:, :size], drops, atol=5e-5)
        # The first position is erased, but not counted.
        counted = distances.max(axis=-1)[:, 1:]
        np.testing.assert_allclose(by_layer.by_example["max"][i], counted.max(axis=-1), atol=3e-6)
        np.testing.assert_allclose(by_layer.by_example["mean"][i], counted.mean(axis=-1), atol=3e-6)
        # Causality, without rounding: neither later tokens, nor padding, nor h_K elsewhere reach the answer.
        for values in (l2.by_example["max"][i], drop.by_example["mean"][i]):
            assert not values[:, size:].any()
            assert not np.delete(values[-1], [size - 2, size - 1]).any()
            assert values[:, size - 2 : size].all() and values[:-1, : size - 2].all()
    # `max` is the references' maximum over examples and answer positions.
    largest = max(e[1, 3].max() for e in expected_l2)
    np.testing.assert_allclose(l2.statistics["max"][1, 3], largest, atol=3e-6)
    for quantity in (l2, drop, by_layer):
        assert quantity.noise_floor is not None and 0 <= quantity.noise_floor < 1e-5
    assert "protected tokens" in result.conventions and "answer" in result.conventions


def test_bfloat16_streams_have_a_noise_floor_far_below_the_effects():
    subject = toy_models.subject(depth=2, dtype="bfloat16")
    result = erasure(subject, toy_models.text(2, 8), SETTINGS, AttributionConfig(answer_length=2))
    quantity = result.quantities["by_layer.prob_l2"]
    assert quantity.noise_floor is not None
    assert quantity.noise_floor < 0.1 * quantity.statistics["max"].min()


def test_text_gets_its_answer_from_the_end_of_what_is_kept():
    cropped = crop(toy_models.text(5, 20), AttributionConfig(examples=3, length=12, answer_length=4))
    assert cropped.inputs.shape == (3, 12) and cropped.answer.tolist() == [8, 8, 8]
    found = answers(cropped)
    assert found.positions.tolist() == [[8, 9, 10, 11]] * 3 and found.mask.all()
    np.testing.assert_array_equal(found.targets[:, :-1], cropped.inputs[:, 9:])


def test_answers_need_targets_and_are_kept_where_they_are():
    prompts = prompts_without_last_target()
    cropped = crop(prompts, AttributionConfig(examples=3, length=64))
    assert cropped.inputs.shape == (3, 10) and cropped.answer.tolist() == [8, 5, 5]
    some = prompts._replace(answer=np.array([11, 6, 5], np.int32))
    found = answers(crop(some, AttributionConfig(examples=3, length=64, answer_length=3)))
    assert found.mask.tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    assert found.positions[found.mask].tolist() == [7, 8, 9, 6, 5, 6]
    np.testing.assert_array_equal(found.targets[0], prompts.targets[0, 7:10])


def test_prompts_are_cut_after_their_answer():
    """However long they are before it; `length` cuts only a prompt that has no answer."""
    prompts = prompts_without_last_target()
    cropped = crop(prompts, AttributionConfig(length=6, answer_length=1))
    assert cropped.valid.sum(axis=1).tolist() == [9, 6, 6] and cropped.answer.tolist() == [8, 5, 5]
    without = prompts._replace(answer=np.array([11, 5, 5], np.int32))
    cropped = crop(without, AttributionConfig(length=6, answer_length=2))
    assert cropped.valid.sum(axis=1).tolist() == [6, 7, 7] and cropped.answer.tolist() == [4, 5, 5]
    assert answers(cropped).mask.all()


def test_prompts_that_cannot_be_used_are_named():
    prompts = prompts_without_last_target()
    with pytest.raises(UserError, match="prompt 1: 1 positions"):
        crop(toy_models.text(), AttributionConfig(length=1))
    with pytest.raises(UserError, match=r"prompt 2: 7 positions.*uncounted=8"):
        crop(prompts, AttributionConfig(uncounted=8))
    with pytest.raises(UserError, match="prompt 2: no position predicts"):
        crop(prompts._replace(answer=np.array([8, 7, 5], np.int32)), AttributionConfig())
