"""Permutable blocks: the partition against enumeration, planted borders, and the parts of a gain."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from scipy.special import log_softmax
from toy_models import ARCHITECTURES, ragged, subject, text

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.probes import blocks as blocks_module
from depthgrow_jax.probes.blocks import blocks, border_agreement, structure
from depthgrow_jax.probes.config import BlocksConfig
from depthgrow_jax.probes.inputs import Subject
from depthgrow_jax.probes.partition import (
    alignment,
    best_partition,
    pairs,
    place,
    residuals,
    share_at_multiples,
    shuffled,
)
from depthgrow_jax.probes.settings import Settings

SETTINGS = Settings(batch_size=2)
CONFIG = BlocksConfig(longest=4, resamples=50, shuffles=100, seed=1)


def test_pairs_are_all_adjacent_runs():
    found = pairs(5, 4)
    expected = {(i, j, k) for i, j, k in itertools.combinations(range(6), 3) if j - i <= 2 and k - j <= 2}
    assert set(found) == expected and len(found) == len(expected) == 2 * 2 * (5 - 2)
    assert len(pairs(24, 4)) == 16 * 20
    assert pairs(1, 4) == []


def enumerate_best(gain, steps, longest):
    """Worth and borders of the best partition, by trying all of them."""
    best = (0.0, ())
    for count in range(3, steps + 2):
        for ends in itertools.combinations(range(steps + 1), count):
            if max(np.diff(ends)) > longest:
                continue
            triples = zip(ends, ends[1:], ends[2:], strict=False)
            worth = sum(gain[j - i - 1, k - j - 1, j - 1] for i, j, k in triples)
            best = max(best, (worth, ends))
    return best


@pytest.mark.parametrize(("steps", "longest"), [(6, 4), (6, 2), (7, 3), (2, 4)])
def test_the_partition_is_the_best_of_all(steps, longest):
    rng, found = np.random.default_rng(0), pairs(steps, longest)
    gain = place(rng.normal(-0.3, 1, (40, len(found))), found, steps)
    got = best_partition(gain)
    for row in range(len(gain)):
        worth, ends = enumerate_best(gain[row], steps, gain.shape[1])
        np.testing.assert_allclose(got.worth[row], worth, atol=1e-12)
        assert got.num_blocks[row] == max(len(ends) - 1, 0)
        assert (np.flatnonzero(got.border[row]) + 1).tolist() == [e for e in ends if 0 < e < steps]
    assert (got.num_blocks == 0).any() or steps > 2


def test_without_gains_there_are_no_blocks():
    found = pairs(6, 3)
    for value in (0.0, -1.0):
        got = best_partition(place(np.full((1, len(found)), value), found, 6))
        assert got.worth[0] == 0 and got.num_blocks[0] == 0 and not got.border.any()


def test_residuals_are_those_of_a_regression():
    steps, found = 9, pairs(9, 4)
    values = np.random.default_rng(3).normal(size=(2, len(found)))
    kept = [n for n, (i, j, k) in enumerate(found) if steps - (k - i) + 1 >= 3]
    classes = sorted({(j - i, k - j) for i, j, k in (found[n] for n in kept)})
    design = np.zeros((len(kept), len(classes) + 4))
    for row, n in enumerate(kept):
        i, j, k = found[n]
        design[row, classes.index((j - i, k - j))] = 1
        design[row, -4:] = [((i + k) / 2) ** power for power in (1, 2, 3, 4)]
    got = residuals(values, found, steps)
    for row in range(2):
        fit = design @ np.linalg.lstsq(design, values[row, kept], rcond=None)[0]
        np.testing.assert_allclose(got[row, kept], values[row, kept] - fit, atol=1e-9)
    assert (np.delete(got, kept, axis=1) == 0).all() and len(kept) < len(found)
    sums = np.nansum(place(got, found, steps), axis=-1)
    np.testing.assert_allclose(sums, 0, atol=1e-10)


def test_shuffling_moves_gains_inside_their_class_only():
    found = pairs(8, 3)
    gain = place(np.arange(len(found), dtype=float), found, 8)
    moved = shuffled(gain, 20, 0)
    np.testing.assert_array_equal(np.sort(moved, axis=-1), np.broadcast_to(np.sort(gain), moved.shape))
    np.testing.assert_array_equal(np.isnan(moved), np.broadcast_to(np.isnan(gain), moved.shape))
    assert len(np.unique(moved[:, 0, 0], axis=0)) == 20
    assert (moved[:, 0, 0] - gain[0, 0] != moved[:, 1, 1] - gain[1, 1]).any(), "classes move apart"


def test_alignment_by_hand():
    found = pairs(6, 2)
    gain = place(
        np.asarray([float(10 * (j - i) + j if j - i == k - j else 1e6) for i, j, k in found]), found, 6
    )
    # Runs of 1: borders 1..5; of 2: borders 2, 3, 4.
    expected = [[10 + 3, np.nan], [20 + (2 + 4) / 2, 20 + 3]]
    np.testing.assert_allclose(alignment(gain[None])[0], expected)


def test_share_of_borders_at_multiples():
    border = np.zeros((3, 7), bool)
    border[0, [1, 2, 5]] = True  # borders 2, 3, 6
    border[2, 3] = True  # border 4
    np.testing.assert_allclose(share_at_multiples(border, 2), [2 / 3, 1])
    np.testing.assert_allclose(share_at_multiples(border, 4), [0, 1])


def planted(rng, steps, size, ratio, trend):
    """Gains of log damages that fall by `ratio` where all three borders are multiples of `size`."""
    found = pairs(steps, 4)
    aligned = np.asarray([i % size == j % size == k % size == 0 for i, j, k in found])
    depth = np.asarray([i / steps for i, j, k in found])
    noise = rng.normal(size=len(found))
    log_damage = 0.2 * noise + np.log(ratio) * aligned + trend * depth
    return place(-residuals(log_damage, found, steps), found, steps)


@pytest.mark.parametrize(("size", "trend"), [(4, 0.0), (4, -4.0), (3, 3.0), (2, -4.0)])
def test_planted_borders_are_found_and_gone_when_shuffled(size, trend):
    gain = planted(np.random.default_rng(5), 24, size, 0.1, trend)
    quantities, scores, notes = structure(gain, None, CONFIG, size)
    borders = np.flatnonzero(quantities["border"].statistics["mean"]) + 1
    assert borders.tolist() == list(range(size, 24, size))
    assert quantities["num_blocks"].statistics["mean"] == 24 // size
    assert notes["p_value"] <= 0.02
    assert scores["block_structure"].normalised == 1 - notes["p_value"]
    assert scores["block_structure"].value > scores["block_structure"].null_high
    assert scores["on_growth_borders"].value == 1 > notes["on_growth_borders_expected"]
    aligned = quantities["alignment"].statistics["mean"][size - 1]
    assert np.nanargmax(aligned) == 0 and aligned[0] > 0.3

    elsewhere = [structure(g, None, CONFIG, 0)[2]["p_value"] for g in shuffled(gain, 30, 9)]
    assert 0.3 < np.mean(elsewhere) < 0.7
    assert np.mean(np.asarray(elsewhere) <= 0.05) <= 0.17, "as often as chance has it"


@pytest.mark.parametrize("trend", [0.0, 4.0])
def test_noise_and_trends_are_not_structure(trend):
    rng = np.random.default_rng(2)
    found = [structure(planted(rng, 12, 4, 1.0, trend), None, CONFIG, 0)[2]["p_value"] for _ in range(40)]
    assert 0.3 < np.mean(found) < 0.7
    assert np.mean(np.asarray(found) <= 0.05) <= 0.15


def commuting_blocks(pairs_of_layers: int) -> Subject:
    """Blocks of two layers: the first writes a linear map of the token to a scratch space, the second adds a
    function of that to the output and clears the scratch space. Blocks commute; their layers do not.
    """
    width, units = 32, 24
    token, scratch, output, size = slice(0, 8), slice(8, 16), slice(16, 24), 1000.0
    cfg = ModelConfig(vocab_size=37, width=width, heads=4, mlp_dim=units, mlp="gelu", tie_embeddings=False)
    depth = 2 * pairs_of_layers
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), model.init(cfg, jax.random.key(0), depth))
    rng, layers = np.random.default_rng(0), params["layers"]
    for norm in ("attn_norm", "mlp_norm"):
        layers[norm]["scale"][:] = 1
    params["head"]["norm"]["scale"][:] = 1
    # One huge constant entry fixes the norm: x / rms(x) is x times a constant.
    params["embed"]["table"][:, token] = rng.normal(size=(37, 8))
    params["embed"]["table"][:, -1] = size
    undo = size / np.sqrt(width)
    params["head"]["kernel"][output] = rng.normal(size=(8, 37)) * undo
    up, down = layers["mlp"]["up"]["kernel"], layers["mlp"]["down"]["kernel"]
    for block in range(pairs_of_layers):
        write, clear = 2 * block, 2 * block + 1
        # gelu(x) - gelu(-x) = x.
        for layer, source, matrix, sign in (
            (write, token, rng.normal(size=(8, 8)) / 2, 1),
            (clear, scratch, np.eye(8), -1),
        ):
            up[layer, source, :8], up[layer, source, 8:16] = matrix * undo, -matrix * undo
            down[layer, :8, scratch], down[layer, 8:16, scratch] = sign * np.eye(8), -sign * np.eye(8)
        up[clear, scratch, 16:] = rng.normal(size=(8, 8)) * undo
        down[clear, 16:, output] = rng.normal(size=(8, 8)) / 4
    return Subject(cfg, params, model.layer_program(cfg, depth))


def test_blocks_that_commute_are_found():
    result = blocks(commuting_blocks(6), text(3), SETTINGS, CONFIG, growth_block=2)
    mean = {name: quantity.statistics["mean"] for name, quantity in result.quantities.items()}
    swaps_of_two = mean["damage"][1, 1]  # borders 1..11
    assert np.isnan(swaps_of_two[[0, 10]]).all()
    assert (swaps_of_two[1:10:2] < 1e-5).all() and (swaps_of_two[2:10:2] > 1e-2).all()
    np.testing.assert_array_equal(mean["border"], [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(mean["border_share"], mean["border"])
    assert mean["num_blocks"] == 6
    assert result.scores["on_growth_borders"].value == 1
    assert mean["alignment"][1, 0] > 0 > mean["alignment"][1, 1]
    assert np.nanargmax(mean["alignment"]) == np.ravel_multi_index((1, 0), (4, 4))
    assert result.notes["p_value"] <= 0.05


@functools.partial(jax.jit, static_argnames="cfg")
def streams_and_logits(cfg, params, inputs, program):
    out = model.apply(cfg, params, inputs, program=program, taps={"h": lambda tap: tap.h})
    return np.float32(1) * out.taps["h"], out.hidden, out.logits


@functools.cache
def probed(name):
    ours, other = (subject(4, seed, **ARCHITECTURES[name]) for seed in (0, 1))
    prompts = ragged()
    return ours, other, prompts, blocks(ours, prompts, SETTINGS, CONFIG, other=other)


@pytest.mark.parametrize("name", ["pre_lns", "post"])
def test_damage_similarity_and_transplants_by_full_forward_passes(name):
    ours, other, prompts, result = probed(name)
    inside = prompts.valid & (np.arange(prompts.valid.shape[1]) >= 1)
    counted = inside & prompts.scored
    h, last, clean = (
        np.asarray(x, np.float64) for x in streams_and_logits(*ours[:2], prompts.inputs, ours.program)
    )
    h = np.concatenate([h, last[None]])
    log_p = log_softmax(clean, axis=-1)

    def effects(params, program):
        logits = np.asarray(streams_and_logits(ours.cfg, params, prompts.inputs, program)[2], np.float64)
        gap = log_p - log_softmax(logits, axis=-1)
        loss = np.take_along_axis(gap, prompts.targets[..., None], axis=-1)[..., 0]
        return (np.exp(log_p) * gap).sum(-1)[counted].mean(), loss[counted].mean()

    damage, similarity = (result.quantities[q].statistics["mean"] for q in ("damage", "similarity"))
    for i, j, k, order in [(0, 2, 3, (2, 0, 1, 3)), (1, 2, 4, (0, 2, 3, 1)), (2, 3, 4, (0, 1, 3, 2))]:
        at = (j - i - 1, k - j - 1, j - 1)
        kl, _ = effects(ours.params, model.reorder(ours.program, np.asarray(order)))
        np.testing.assert_allclose(damage[at], kl, rtol=1e-4, atol=1e-6)
        left, right = h[j] - h[i], h[k] - h[j]
        norms = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
        np.testing.assert_allclose(similarity[at], ((left * right).sum(-1) / norms)[inside].mean(), atol=1e-5)
    assert result.quantities["damage"].noise_floor < 1e-5

    for row, start, length in [(0, 0, 1), (1, 2, 2), (2, 0, 4)]:
        mixed = jax.tree.map(np.array, ours.params)
        for leaf, theirs in zip(
            jax.tree.leaves(mixed["layers"]), jax.tree.leaves(other.params["layers"]), strict=True
        ):
            leaf[start : start + length] = theirs[start : start + length]
        for effect, expected in zip(("kl", "loss_increase"), effects(mixed, ours.program), strict=True):
            quantity = result.quantities[f"transplant.{effect}"]
            np.testing.assert_allclose(
                quantity.statistics["mean"][row, start], expected, rtol=1e-4, atol=1e-5
            )
    assert np.isnan(quantity.statistics["mean"][2, 1])


def test_gain_is_made_of_the_means_over_examples():
    _, _, _, result = probed("pre_lns")
    found = pairs(4, 4)
    damage, similarity = (
        np.asarray(
            [result.quantities[q].statistics["mean"][j - i - 1, k - j - 1, j - 1] for i, j, k in found]
        )
        for q in ("damage", "similarity")
    )
    expected = residuals(similarity, found, 4) - residuals(
        np.log(damage + blocks_module.DAMAGE_FLOOR), found, 4
    )
    np.testing.assert_allclose(
        result.quantities["gain"].statistics["mean"], place(expected, found, 4), atol=1e-9
    )


def test_axes_match_and_one_prompt_has_no_intervals():
    results = [probed("pre_lns")[3], blocks(subject(3), text(1), SETTINGS, CONFIG, growth_block=2)]
    for result in results:
        for quantity in result.quantities.values():
            shape = tuple(len(result.axes[axis].values) for axis in quantity.axes)
            assert quantity.statistics["mean"].shape == shape
    assert np.isnan(results[1].quantities["border_share"].statistics["mean"]).all()
    assert np.isnan(results[1].scores["block_structure"].low)
    assert np.isnan(results[1].quantities["num_blocks"].statistics["mean_low"])


def test_one_layer_has_no_blocks():
    result = blocks(subject(1), text(2), SETTINGS, CONFIG, growth_block=1)
    assert result.quantities["damage"].statistics["mean"].size == 0
    assert result.quantities["num_blocks"].statistics["mean"] == 0
    assert result.notes["p_value"] == 1


def test_agreement_of_borders():
    result = probed("pre_lns")[3]

    def having(*borders):
        mean = np.isin(np.arange(1, 4), borders).astype(float)
        quantity = result.quantities["border"]._replace(statistics={"mean": mean})
        return result._replace(quantities={"border": quantity})

    assert border_agreement(having(1, 2), having(2, 3)) == pytest.approx(1 / 3)
    assert border_agreement(having(1), having(1)) == 1
    assert border_agreement(having(), having()) == 1
    assert border_agreement(having(), having(2)) == 0
    with pytest.raises(ValueError, match="4 and 5 layers"):
        border_agreement(having(), having()._replace(steps=5))


def test_another_architecture_is_refused():
    ours, prompts = probed("pre_lns")[0], text(2)
    deeper = ours._replace(program=model.layer_program(ours.cfg, 5))
    with pytest.raises(UserError, match=r"5 layers run.*legal: the same architecture with 4 layers"):
        blocks(ours, prompts, SETTINGS, CONFIG, other=deeper)
    wider = ours._replace(cfg=dataclasses.replace(ours.cfg, mlp_dim=20))
    with pytest.raises(UserError, match="another architecture"):
        blocks(ours, prompts, SETTINGS, CONFIG, other=wider)
