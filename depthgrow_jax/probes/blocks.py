"""Permutable blocks: where a network falls into runs of layers that can be exchanged for one another.

P prompts, K steps, m = min(longest, K // 2) layers of a run at most.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import LayerProgram, depth_of
from depthgrow_jax.probes import programs
from depthgrow_jax.probes.config import BlocksConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, no_watch, num_batches
from depthgrow_jax.probes.order import ORDER_CONVENTIONS, default_lengths, run_axes
from depthgrow_jax.probes.partition import (
    TREND_DEGREE,
    alignment,
    best_partition,
    pairs,
    place,
    residuals,
    share_at_multiples,
    shuffled,
)
from depthgrow_jax.probes.result import Axis, Quantity, Result, Score, constant, quantity, token_quantity
from depthgrow_jax.probes.settings import (
    Settings,
    conventions,
    counted,
    counted_outputs,
    pooling_weights,
)
from depthgrow_jax.stats import interval, resample_counts, resampled_means

# Of a divergence in nats, before its logarithm: about what float32 resolves.
DAMAGE_FLOOR = 1e-6
PAIR_AXES = ("left", "right", "border")
TRANSPLANT_EFFECTS = {"kl": "nats", "loss_increase": "nats"}


@jax.jit
def _similarity(streams: Array, counted: Array, ends: Array) -> Array:
    """`[pairs, B]` mean cosine over the counted tokens; streams `[K + 1, B, T, D]`, ends `[pairs, 3]`."""

    def cosine(end):
        before, middle, after = (streams[at].astype(jnp.float32) for at in end)
        left, right = middle - before, after - middle
        norms = jnp.linalg.norm(left, axis=-1) * jnp.linalg.norm(right, axis=-1)
        values = jnp.sum(left * right, axis=-1) / jnp.maximum(norms, 1e-12)
        return jnp.sum(jnp.where(counted, values, 0.0), axis=-1) / jnp.maximum(jnp.sum(counted, axis=-1), 1)

    return jax.lax.map(cosine, ends)


def _joined(subject: Subject, other: Subject) -> tuple[dict, LayerProgram]:
    """Parameters that hold the layers of both, and the program of 2K steps: ours, then the other's."""
    if other.cfg != subject.cfg or other.steps != subject.steps:
        raise UserError(
            f"the other network: of another architecture or depth ({other.steps} layers run); "
            f"legal: the same architecture with {subject.steps} layers"
        )
    layers = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves), subject.params["layers"], other.params["layers"]
    )

    def numbered(program, first):
        stored = jnp.arange(program.steps) if program.order is None else program.order
        return program._replace(order=first + stored)

    ours, theirs = numbered(subject.program, 0), numbered(other.program, depth_of(subject.params))
    program = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), ours, theirs)
    return {**subject.params, "layers": layers}, program


def _gains(damage: np.ndarray, similarity: np.ndarray, found: list, steps: int) -> np.ndarray:
    # Rounding may put a divergence just below 0.
    log_damage = np.log(np.maximum(damage, 0.0) + DAMAGE_FLOOR)
    return residuals(similarity, found, steps) - residuals(log_damage, found, steps)


def _limits(values: np.ndarray | None) -> tuple[float, float]:
    """95% interval of `[R]`; NaN without values."""
    if values is None or not len(values):
        return float("nan"), float("nan")
    low, high = interval(values)
    return float(low), float(high)


def _spread(mean: np.ndarray, resampled: np.ndarray | None, axes: tuple[str, ...], unit: str) -> Quantity:
    """A statistic of all prompts with its interval over resamples; NaN without any."""
    low, high = interval(resampled) if resampled is not None else (np.full_like(mean, np.nan),) * 2
    return Quantity(axes, unit, {"mean": mean, "mean_low": low, "mean_high": high})


def structure(
    gain: np.ndarray, resampled: np.ndarray | None, config: BlocksConfig, growth_block: int
) -> tuple[dict[str, Quantity], dict[str, Score], dict[str, float]]:
    """Quantities, scores and notes that follow from gains alone; see `blocks`.

    Args:
      gain: `[m, m, K - 1]`.
      resampled: `[R, m, m, K - 1]`, of R resamples of the prompts; None without any.
    """
    places = max(gain.shape[-1], 1)
    best = best_partition(gain[None])
    null = best_partition(shuffled(gain, config.shuffles, config.seed))
    again = None if resampled is None else best_partition(resampled)

    def p_value(worth):
        if np.isnan(worth):
            return worth
        # Sums of the same gains in another order are equal up to rounding.
        return (1 + int(np.sum(null.worth >= worth - 1e-9))) / (1 + config.shuffles)

    def over_resamples(of_partitions):
        return None if again is None else of_partitions(again)

    worth = float(best.worth[0])
    low, high = _limits(over_resamples(lambda found: found.worth))
    scores = {
        "block_structure": Score(
            worth / places,
            low / places,
            high / places,
            1 - p_value(worth),
            1 - p_value(low),
            1 - p_value(high),
            "sum of gains of the best partition into blocks / (K - 1); normalised: 1 - p, places relabelled",
            *_limits(null.worth / places),
        )
    }
    notes = {"p_value": p_value(worth), "worth": worth}
    if growth_block:
        share, chance = (share_at_multiples(found.border, growth_block) for found in (best, null))
        value = float(share[0]) if len(share) else float("nan")
        limits = _limits(over_resamples(lambda found: share_at_multiples(found.border, growth_block)))
        definition = (
            f"share of the borders found that are multiples of {growth_block}; null: places relabelled"
        )
        scores["on_growth_borders"] = Score(value, *limits, value, *limits, definition, *_limits(chance))
        notes["on_growth_borders_expected"] = float(chance.mean()) if len(chance) else float("nan")

    aligned = alignment(gain[None])[0], None if resampled is None else alignment(resampled)
    border_share = np.full(gain.shape[-1], np.nan) if again is None else again.border.mean(axis=0)
    quantities = {
        "gain": _spread(gain, resampled, PAIR_AXES, "nats + cosine"),
        "border": constant(("border",), "", best.border[0].astype(float)),
        "border_share": constant(("border",), "share of resamples", border_share),
        "num_blocks": _spread(
            best.num_blocks[0].astype(float), over_resamples(lambda found: found.num_blocks), (), "blocks"
        ),
        "alignment": _spread(*aligned, ("block_size", "offset"), "nats + cosine"),
    }
    return quantities, scores, notes


def border_agreement(a: Result, b: Result) -> float:
    """Borders that both runs have, as a share of those that either has (Jaccard); 1 if neither has any.

    Raises:
      ValueError: networks of different depth.
    """
    if a.steps != b.steps:
        raise ValueError(f"borders in {a.steps} and {b.steps} layers cannot be compared")
    first, second = (r.quantities["border"].statistics["mean"] > 0 for r in (a, b))
    return float((first & second).sum() / either) if (either := (first | second).sum()) else 1.0


def blocks(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: BlocksConfig,
    *,
    growth_block: int = 0,
    other: Subject | None = None,
    watch: Watch = no_watch,
) -> Result:
    """Finds the runs of layers that can be exchanged for their neighbours, and how sure that is.

    Our own measure. For adjacent runs [i, j), [j, k) of at most m layers, D is the `damage`, KL(clean ||
    runs exchanged) in nats, and S the `similarity`, the cosine of what the two runs add to the stream,
    h_j - h_i and h_k - h_j; both are means over counted tokens. Then

        gain(i, j, k) = residual of S - residual of log(D + 1e-6),

    residuals from the mean of all pairs of the same two lengths and from a trend over depth that all pairs
    share (`partition.residuals`): in any network the first and last layers bear least, and that is not a
    border. Lengths with fewer than 3 places have gain 0.

    A partition keeps a head [0, p) and a tail [q, K) and cuts what lies between into blocks of at most m
    layers; it is worth the sum of the gains of its adjacent blocks. Pairs of the same lengths have mean gain
    0, so neither few nor many borders are worth anything of themselves; only borders in the right places are.
    The best partition is found exactly; if none is worth more than 0 there are no blocks.

    The null relabels the places of all pairs of the same lengths at random: the same gains, elsewhere. Few
    layers allow few relabelings: perfect blocks of 2 have a p of about 0.1 in 8 layers and 0.01 in 12. The
    intervals are those of the best partition of each resample of the prompts, whose worth noise tends to
    raise. A network of exact copies of b layers takes a swap of b layers equally well at every offset: that
    has no borders, and no alignment.

    The work: m^2 (K - m) swaps, each from its first layer on, about half as many forward passes.

    Args:
      growth_block: layers added at a time; 0 if the network was not grown.
      other: a network of the same architecture and depth, of another seed, to transplant layers from.

    Returns:
      A `Result` with quantities
        `damage` (nats), `similarity`, `gain`: on `left`, `right` (lengths, 1..m) and `border` (1..K-1);
        `border` (1 where a block begins or ends), `border_share` (share of resamples of the prompts that
        have that border): on `border`;
        `num_blocks`: without axes, interval over resamples;
        `alignment`: mean gain of swaps of two runs of b layers whose borders lie at o modulo b, on
        `block_size` and `offset`; blocks of a grown network show as a maximum at (b, 0);
        `transplant.kl`, `transplant.loss_increase` (nats, with `other`): layers [start, start + run_length)
        of the other network in place of ours, on `run_length` and `start`.
      Scores: `block_structure`, the worth of the best partition divided by the K - 1 possible borders,
      normalised to 1 - p under the null; with `growth_block` also `on_growth_borders`, the share of borders
      at its multiples. Notes: `p_value`, `worth`, `swaps` (number of them), `on_growth_borders_expected`
      (mean under the null).

    Raises:
      UserError: `other` is of another architecture or depth.
    """
    steps, found = subject.steps, pairs(subject.steps, config.longest)
    ends = np.asarray(found, np.int32).reshape(-1, 3)
    changes = [programs.plain(steps), *(programs.swap_any(steps, *pair) for pair in found)]
    lengths = default_lengths(steps)
    runs = [(r, s) for r, n in enumerate(lengths) for s in range(steps - n + 1)]
    grafts = [programs.transplant(steps, s, lengths[r]) for r, s in runs]
    joined = None if other is None else _joined(subject, other)

    floor, parts = 0.0, {"damage": [], "similarity": [], "outputs": [], "tokens": []}
    grafted = {name: [] for name in TRANSPLANT_EFFECTS}
    for batch in watch(
        "blocks",
        num_batches(subject, prompts, settings.batch_size),
        batches(subject, prompts, settings.batch_size),
    ):
        cfg, real, inputs = subject.cfg, batch.real, batch.prompts
        tokens, outputs = counted(settings, inputs), counted_outputs(settings, inputs)
        compared = (inputs.targets, outputs)
        streams, _ = programs.clean_run(
            cfg, subject.params, subject.program, inputs.inputs, *compared, settings.chunk_bytes
        )
        statistics, largest = programs.sweep(
            cfg, subject.params, subject.program, streams, *compared, changes, settings.chunk_bytes
        )["kl"]
        floor = max(floor, float(largest[0, :real].max()))
        parts["damage"].append(statistics[0, 1:, :real].T)
        parts["similarity"].append(np.asarray(_similarity(streams, tokens, ends))[:, :real].T)
        parts["outputs"].append(np.asarray(outputs).sum(axis=1)[:real])
        parts["tokens"].append(np.asarray(tokens).sum(axis=1)[:real])
        if joined is not None:
            swept = programs.sweep(cfg, *joined, streams, *compared, grafts, settings.chunk_bytes)
            for name, values in grafted.items():
                values.append(swept[name][0][:, :, :real])

    whole = {name: np.concatenate(values) for name, values in parts.items()}
    examples = len(whole["damage"])
    weights = {name: pooling_weights(settings, whole[name]) for name in ("outputs", "tokens")}

    def gain_of(counts):
        damage = resampled_means(whole["damage"], weights["outputs"], counts)
        similarity = resampled_means(whole["similarity"], weights["tokens"], counts)
        return place(_gains(damage, similarity, found, steps), found, steps)

    gain, resampled = gain_of(np.ones((1, examples)))[0], None
    if examples > 1:
        resampled = gain_of(resample_counts(examples, resamples=config.resamples, seed=config.seed))
    quantities, scores, notes = structure(gain, resampled, config, growth_block)

    most = len(gain)
    for name, unit, counts, noise in (
        ("damage", "nats", "outputs", floor),
        ("similarity", "cosine", "tokens", None),
    ):
        by_example = {"mean": place(whole[name], found, steps)}
        quantities[name] = quantity(PAIR_AXES, unit, by_example, weights[counts], noise)
    result_axes = {
        "left": Axis(np.arange(1, most + 1)),
        "right": Axis(np.arange(1, most + 1)),
        "border": Axis(np.arange(1, steps), np.arange(1, steps) / steps),
        "block_size": Axis(np.arange(1, most + 1)),
        "offset": Axis(np.arange(most)),
    }
    if other is not None:
        result_axes |= run_axes(steps, lengths)
        for name, unit in TRANSPLANT_EFFECTS.items():
            values = np.concatenate(grafted[name], axis=2)
            placed = np.full((len(values), examples, len(lengths), steps), np.nan)
            for number, (row, start) in enumerate(runs):
                placed[:, :, row, start] = values[:, number]
            quantities[f"transplant.{name}"] = token_quantity(
                ("run_length", "start"), unit, placed, weights["outputs"]
            )
    return Result(
        probe="blocks",
        steps=steps,
        axes=result_axes,
        quantities=quantities,
        conventions=conventions(settings, subject.cfg)
        | ORDER_CONVENTIONS
        | {
            "longest run": f"{config.longest} layers, at most half of the network",
            "trend over depth": f"polynomial of degree {TREND_DEGREE}, removed",
            "resampling": f"{config.resamples} resamples of prompts, {config.shuffles} relabelings, "
            f"seed {config.seed}",
            "missing": "NaN where the pair of runs does not fit",
        },
        examples=examples,
        tokens=int(whole["outputs"].sum()),
        scores=scores,
        notes=notes | {"swaps": len(found)},
    )
