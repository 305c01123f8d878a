"""How well one stream predicts another through an affine map: every point of one network to every of another.

After the layer maps of Csordas et al. (arXiv 2505.13898), but solved instead of trained: ridge regression
from accumulated Gram matrices. No map is under-trained, and all pairs come from one pass over the prompts.

B batch, P prompts, T positions, D1, D2 widths, K1, K2 steps of source and target, S source points at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from depthgrow_jax.errors import UserError, require
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, embed, run_layers
from depthgrow_jax.probes.config import SimilarityConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, no_watch, num_batches
from depthgrow_jax.probes.result import RESAMPLES, Quantity, Result, stream_axis
from depthgrow_jax.probes.settings import Settings, conventions, counted
from depthgrow_jax.stats import interval, resample_counts

# Of the cross products. Source points that do not fit take turns, with a pass over the prompts each.
GRAM_BYTES = 1 << 30
_HIGHEST = jax.lax.Precision.HIGHEST
Networks = tuple[tuple[Params, LayerProgram], ...]


def check(prompts: Prompts) -> None:
    """Raises `UserError` for a single prompt."""
    total = len(prompts.inputs)
    legal = "must be at least 2 for linear maps: one half fits, one tests"
    require(total >= 2, "probe.prompts.examples", total, legal)


def linear_maps(
    source: Subject,
    target: Subject,
    prompts: Prompts,
    settings: Settings,
    config: SimilarityConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """Held-out fit of the affine map from every stream point of `source` to every one of `target`.

    Over the counted tokens of a random half of the prompts the map minimises mean |y - x W - b|^2 +
    ridge v |W|_F^2, v being the mean variance of the entries of x. The bias is not penalised.

    Quantities over the other half, `[K1+1, K2+1]`, all tokens weighted alike, intervals over prompts:
      r2: 1 - sum |error|^2 / sum |y - mean|^2, mean over the fitted tokens: predicting that mean gives 0.
      r2.embedding `[K2+1]`: its row 0, what the source's embedding alone predicts.
      relative_error: sum |error| / sum |y|.

    Args:
      source, target: may be the same network, and may differ in width and depth.

    Raises:
      UserError: vocabularies that differ, fewer than 2 prompts, or a half of them without counted tokens.
    """
    same = target.cfg.vocab_size == source.cfg.vocab_size
    size = f"must equal the source's {source.cfg.vocab_size}"
    require(same, "target.vocab_size", target.cfg.vocab_size, size)
    check(prompts)
    total = len(prompts.inputs)
    shuffled = np.random.default_rng(config.seed).permutation(total)
    fitted, held_out = (
        Prompts(*(np.asarray(field)[np.sort(half)] for field in prompts))
        for half in np.split(shuffled, [(total + 1) // 2])
    )
    tokens = [int(np.asarray(counted(settings, half)).sum()) for half in (fitted, held_out)]
    if min(tokens) == 0:
        raise UserError("prompts: a half of them has no counted token; linear maps need some in both")

    subjects = (source,) if source is target else (source, target)
    cfgs = tuple(subject.cfg for subject in subjects)
    networks = tuple((subject.params, subject.program) for subject in subjects)
    points = source.steps + 1
    row_bytes = 4 * (target.steps + 1) * source.cfg.width * target.cfg.width
    together = min(points, max(1, GRAM_BYTES // row_bytes))
    sums, norms = [], []
    for start in range(0, points, together):
        chosen = np.arange(start, start + together) % points
        maps = _fit(source, fitted, settings, config, cfgs, networks, chosen, watch)
        sse, errors, sst, sizes = _evaluate(source, held_out, settings, cfgs, networks, chosen, maps, watch)
        real = min(together, points - start)
        sums.append((sse[:, :real], sst))
        norms.append((errors[:, :real], sizes))

    names = ("source", "target")
    r2 = _ratio(names, np.concatenate([s for s, _ in sums], axis=1), sums[0][1], lambda x: 1.0 - x)
    error = _ratio(names, np.concatenate([n for n, _ in norms], axis=1), norms[0][1], lambda x: x)
    embedding = Quantity(("target",), "", {name: values[0] for name, values in r2.statistics.items()})
    words = {
        "reduction": "ratio of sums over the tokens of held-out prompts",
        "maps": f"affine, ridge {config.ridge:g} x mean variance, fitted on a half, seed {config.seed}",
        "baseline": "r2 0: the mean of the fitted tokens; r2.embedding: source point 0",
    }
    return Result(
        "linear_maps",
        source.steps,
        {"source": stream_axis(source.steps), "target": stream_axis(target.steps)},
        {"r2": r2, "r2.embedding": embedding, "relative_error": error},
        conventions(settings, source.cfg) | words,
        total,
        sum(tokens),
        notes={
            "fitted_prompts": len(fitted.inputs),
            "fitted_tokens": tokens[0],
            "held_out_tokens": tokens[1],
        },
    )


def _weighted(source: Subject, prompts: Prompts, settings: Settings):
    """Batches with the tokens that count, those of the rows that fill the shape left out."""
    for batch in batches(source, prompts, settings.batch_size):
        real = np.arange(len(batch.indices)) < batch.real
        yield batch, counted(settings, batch.prompts) & real[:, None]


def _fit(source, prompts, settings, config, cfgs, networks, chosen, watch):
    """Maps from the points `chosen`, solved in float64.

    Returns:
      Means of the fitted tokens `[K1+1, D1]` and `[K2+1, D2]`, and weights `[S, K2+1, D1, D2]`, float32.
    """
    # Products of centred streams keep their digits in float32; a mean near the true one is enough.
    batch, tokens_BT = next(_weighted(source, prompts, settings))
    widths = [cfg.width for cfg in (cfgs[0], cfgs[-1])]
    depths = [program.steps + 1 for _, program in (networks[0], networks[-1])]
    zeros = tuple(jnp.zeros((k, d), jnp.float32) for k, d in zip(depths, widths, strict=True))
    empty = (
        jnp.zeros((), jnp.float32),
        *zeros,
        jnp.zeros((len(chosen), widths[0], widths[0]), jnp.float32),
        jnp.zeros((len(chosen), depths[1], widths[0], widths[1]), jnp.float32),
    )
    number, *first, _, _ = _accumulate(cfgs, networks, zeros, chosen, batch.prompts.inputs, tokens_BT, empty)
    shifts = tuple(x / jnp.maximum(number, 1) for x in first)
    totals = empty
    count = num_batches(source, prompts, settings.batch_size)
    for batch, tokens_BT in watch("linear_maps", count, _weighted(source, prompts, settings)):
        totals = _accumulate(cfgs, networks, shifts, chosen, batch.prompts.inputs, tokens_BT, totals)

    number, sum_x, sum_y = (np.asarray(x, np.float64) for x in totals[:3])
    mean_x, mean_y = sum_x / number, sum_y / number
    weights = np.empty(totals[4].shape, np.float32)
    for s, point in enumerate(chosen):
        own = np.asarray(totals[3][s], np.float64) / number - np.outer(mean_x[point], mean_x[point])
        cross = np.asarray(totals[4][s], np.float64) / number - mean_x[point][:, None] * mean_y[:, None]
        variance = max(np.trace(own) / len(own), float(np.finfo(np.float32).tiny))
        own[np.diag_indices(len(own))] += config.ridge * variance
        solved = np.linalg.solve(own, np.moveaxis(cross, 0, 1).reshape(len(own), -1))
        weights[s] = np.moveaxis(solved.reshape(len(own), *mean_y.shape), 1, 0)
    means = tuple(
        (np.asarray(shift, np.float64) + mean).astype(np.float32)
        for shift, mean in zip(shifts, (mean_x, mean_y), strict=True)
    )
    return means, weights


def _evaluate(source, prompts, settings, cfgs, networks, chosen, maps, watch):
    """Sums of each held-out prompt: |error|^2, |error| `[P, S, K2+1]`, |y - mean|^2, |y| `[P, K2+1]`."""
    means, weights = maps
    weights, found = jnp.asarray(weights), []
    count = num_batches(source, prompts, settings.batch_size)
    for batch, tokens_BT in watch("linear_maps", count, _weighted(source, prompts, settings)):
        sums = _errors(cfgs, networks, means, weights, chosen, batch.prompts.inputs, tokens_BT)
        found.append([np.asarray(x)[: batch.real] for x in sums])
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def _streams(cfg: ModelConfig, params: Params, program: LayerProgram, tokens: Array) -> Array:
    """h_0..h_K, `[K+1, B, T, D]` float32."""
    hidden = embed(cfg, params, tokens)
    taps = {"out": lambda tap: tap.out.astype(jnp.float32)}
    _, tapped = run_layers(cfg, params, hidden, program=program, taps=taps)
    return jnp.concatenate([hidden[None].astype(jnp.float32), tapped["out"]])


def _pair(cfgs: tuple[ModelConfig, ...], networks: Networks, tokens: Array, means) -> list[Array]:
    """Streams of source and target less `means`; of one network that is both, run once."""
    streams = [_streams(cfg, *network, tokens) for cfg, network in zip(cfgs, networks, strict=True)]
    return [x - mean[:, None, None] for x, mean in zip((streams[0], streams[-1]), means, strict=True)]


@functools.partial(jax.jit, static_argnames=("cfgs",))
def _accumulate(
    cfgs: tuple[ModelConfig, ...],
    networks: Networks,
    shifts: tuple[Array, Array],
    chosen: Int[np.ndarray, " S"],
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    totals: tuple[Array, ...],
) -> tuple[Array, ...]:
    """Adds a batch: number, sums of x and of y, x^T x and x^T y of the chosen source points, all shifted."""
    x, y = (jnp.where(counted[None, :, :, None], z, 0.0) for z in _pair(cfgs, networks, tokens, shifts))
    some = x[chosen]
    added = (
        jnp.sum(counted).astype(jnp.float32),
        jnp.sum(x, axis=(1, 2)),
        jnp.sum(y, axis=(1, 2)),
        jnp.einsum("sbtd,sbte->sde", some, some, precision=_HIGHEST),
        jnp.einsum("sbtd,kbte->skde", some, y, precision=_HIGHEST),
    )
    return jax.tree.map(jnp.add, totals, added)


@functools.partial(jax.jit, static_argnames=("cfgs",))
def _errors(
    cfgs: tuple[ModelConfig, ...],
    networks: Networks,
    means: tuple[Array, Array],
    weights: Float[Array, "S k D1 D2"],
    chosen: Int[np.ndarray, " S"],
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> tuple[Array, ...]:
    """Sums over the counted tokens of each prompt, one source point after another."""
    x, y = _pair(cfgs, networks, tokens, means)

    def reduce(squared_kBT):
        kept = jnp.where(counted[None], squared_kBT, 0.0)
        return jnp.sum(kept, axis=-1), jnp.sum(jnp.sqrt(kept), axis=-1)

    def one_point(point):
        x_BTD, weights_kDE = point
        error = y - jnp.einsum("btd,kde->kbte", x_BTD, weights_kDE, precision=_HIGHEST)
        return reduce(jnp.sum(jnp.square(error), axis=-1))

    sse, errors = jax.lax.map(one_point, (x[chosen], weights))
    sst, _ = reduce(jnp.sum(jnp.square(y), axis=-1))
    _, sizes = reduce(jnp.sum(jnp.square(y + means[1][:, None, None]), axis=-1))
    return jnp.moveaxis(sse, 2, 0), jnp.moveaxis(errors, 2, 0), sst.T, sizes.T


def _ratio(names, above: np.ndarray, below: np.ndarray, fn) -> Quantity:
    """`fn` of sum(above `[P, K1+1, K2+1]`) / sum(below `[P, K2+1]`), 0 / 0 being 1."""

    def evaluate(counts):
        top, bottom = np.tensordot(counts, above.astype(np.float64), 1), counts @ below.astype(np.float64)
        safe = np.where(bottom > 0, bottom, 1.0)[:, None]
        return fn(np.where((bottom > 0)[:, None], top / safe, 1.0))

    examples = len(above)
    value = evaluate(np.ones((1, examples)))[0]
    low = high = np.full(value.shape, np.nan)
    if examples > 1:
        low, high = interval(evaluate(resample_counts(examples, resamples=RESAMPLES)))
    return Quantity(names, "", {"mean": value, "mean_low": low, "mean_high": high})
