"""Similarity of the representations inside one network: cosines of the same token, and CKA over tokens.

B batch, P prompts, T positions, D width, K steps, S points compared (K + 1 of the stream, K contributions), m
tokens of a prompt that CKA uses.
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
from depthgrow_jax.probes.result import (
    RESAMPLES,
    Quantity,
    Result,
    layer_axis,
    over_tokens,
    stream_axis,
    token_quantity,
)
from depthgrow_jax.probes.settings import Settings, conventions, counted, pooling_weights
from depthgrow_jax.stats import interval, resample_counts, resampled_means

LEAST_TOKENS = 4
# A spread below this share of the size is float32 rounding.
CONSTANT = 1e-5
_HIGHEST = jax.lax.Precision.HIGHEST


def representations(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: SimilarityConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """Cosine maps and linear CKA between all points of the stream and between all layers' contributions.

    Quantities:
      cosine.stream `[K+1, K+1]`: cos(h_i, h_j) of one token; all token statistics. (arXiv 2407.09298 flattens
        all tokens of a prompt into one vector.)
      cosine.contribution `[K, K]`: cos(c_i, c_j), c = attn + mlp what a layer adds. Layers that play the same
        role in every block show as a period.
      cka `[K+1, K+1]`, cka.contribution `[K, K]`: linear CKA (Kornblith et al., arXiv 1905.00414) with the
        unbiased estimate of HSIC (Song et al., JMLR 2012). A prompt is a minibatch whose samples are its
        tokens; HSIC is averaged over prompts before the ratio (Nguyen et al., arXiv 2010.15327). 0 where a
        point does not differ between tokens.

    Raises:
      UserError: a prompt with fewer than 4 counted tokens, or fewer than 4 allowed by `cka_tokens`.
    """
    limit, field = config.cka_tokens, "probe.similarity.cka_tokens"
    require(limit >= LEAST_TOKENS, field, limit, f"must be at least {LEAST_TOKENS}")
    counted_PT = np.asarray(counted(settings, prompts))
    counts = counted_PT.sum(axis=1)
    places, used = _spread(counted_PT, config.cka_tokens)
    cosines, products = {"stream": [], "contribution": []}, {"stream": [], "contribution": []}
    total = num_batches(subject, prompts, settings.batch_size)
    for batch in watch("representations", total, batches(subject, prompts, settings.batch_size)):
        measured = _compare(
            subject.cfg,
            subject.params,
            subject.program,
            batch.prompts.inputs,
            counted(settings, batch.prompts),
            places[batch.indices],
            used[batch.indices],
        )
        for name, (cosine, product, scale) in jax.device_get(measured).items():
            cosines[name].append(cosine[:, : batch.real])
            squared = np.square(scale[: batch.real].astype(np.float64))
            products[name].append(product[: batch.real] * squared[:, :, None] * squared[:, None])

    steps = subject.steps
    axes = {
        "layer": layer_axis(steps),
        "layer_to": layer_axis(steps),
        "stream": stream_axis(steps),
        "stream_to": stream_axis(steps),
    }
    names = {"stream": ("stream", "stream_to"), "contribution": ("layer", "layer_to")}
    shares = pooling_weights(settings, counts)
    quantities = {
        f"cosine.{name}": token_quantity(names[name], "cosine", np.concatenate(values, axis=1), shares)
        for name, values in cosines.items()
    }
    quantities["cka"] = _cka(names["stream"], np.concatenate(products["stream"]))
    quantities["cka.contribution"] = _cka(names["contribution"], np.concatenate(products["contribution"]))
    words = {
        "cka": "linear, unbiased HSIC averaged over prompts with equal weights before the ratio; samples are "
        f"counted tokens of a prompt, at most {config.cka_tokens} of them, evenly spaced",
    }
    return Result(
        "representations",
        steps,
        axes,
        quantities,
        conventions(settings, subject.cfg) | words,
        len(counts),
        int(counts.sum()),
        notes={"cka_tokens": int(used.sum())},
    )


def check_tokens(settings: Settings, prompts: Prompts) -> None:
    """Raises `UserError` for a prompt with fewer counted tokens than CKA needs."""
    _spread(np.asarray(counted(settings, prompts)), LEAST_TOKENS)


def _spread(counted_PT: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of at most `most` counted tokens of each prompt, evenly spaced, and which of them exist.

    Returns:
      int32 and bool `[P, m]`; m = `most`, or T if that is less.
    """
    size = min(most, counted_PT.shape[1])
    places = np.zeros((len(counted_PT), size), np.int32)
    used = np.zeros(places.shape, bool)
    for prompt, row in enumerate(counted_PT):
        there = np.flatnonzero(row)
        if len(there) < LEAST_TOKENS:
            raise UserError(
                f"prompts: prompt {prompt + 1} has {len(there)} counted tokens; "
                f"CKA needs at least {LEAST_TOKENS}"
            )
        number = min(size, len(there))
        places[prompt, :number] = there[np.arange(number) * len(there) // number]
        used[prompt, :number] = True
    return places, used


@functools.partial(jax.jit, static_argnames=("cfg",))
def _compare(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    places: Int[Array, "B m"],
    used: Bool[Array, "B m"],
) -> dict[str, tuple[Array, Array, Array]]:
    """name -> (statistics of cosines `[4, B, S, S]`, HSIC `[B, S, S]` of scaled points, scales `[B, S]`)."""
    hidden = embed(cfg, params, tokens)
    taps = {
        "stream": lambda tap: tap.out.astype(jnp.float32),
        "contribution": lambda tap: tap.attn.astype(jnp.float32) + tap.mlp.astype(jnp.float32),
    }
    _, tapped = run_layers(cfg, params, hidden, program=program, taps=taps)
    tapped["stream"] = jnp.concatenate([hidden[None].astype(jnp.float32), tapped["stream"]])
    measured = {}
    for name, points_SBTD in tapped.items():
        points_BSTD = jnp.moveaxis(points_SBTD, 0, 1)
        chosen_BSmD = jnp.take_along_axis(points_BSTD, places[:, None, :, None], axis=2)
        measured[name] = (_cosines(points_BSTD, counted), *_products(chosen_BSmD, used))
    return measured


def _cosines(points_BSTD: Float[Array, "B S T D"], counted: Bool[Array, "B T"]) -> Float[Array, "4 B S S"]:
    size = jnp.linalg.norm(points_BSTD, axis=-1, keepdims=True)
    unit = points_BSTD / jnp.where(size > 0, size, 1.0)
    cosine_BSST = jnp.einsum("bitd,bjtd->bijt", unit, unit, precision=_HIGHEST)
    return over_tokens(cosine_BSST, counted[:, None, None])


def _products(points_BSmD: Float[Array, "B S m D"], used: Bool[Array, "B m"]) -> tuple[Array, Array]:
    """Unbiased HSIC between all points of each prompt, each divided by its scale.

    It is the inner product of the U-centred Gram matrices over n (n - 3) (Székely & Rizzo 2014), which equals
    the formula of Song et al. without its differences of large sums.

    Returns:
      HSIC `[B, S, S]` of the points divided by `scale`, and `scale` `[B, S]`, the root mean square of the
      centred points. HSIC of the points themselves is that times `scale_i^2 scale_j^2`.
    """
    here = used[:, None, :, None]
    n = jnp.sum(used, axis=1).astype(jnp.float32)[:, None, None, None]
    entries = n * points_BSmD.shape[-1]

    def total(x, axes):
        return jnp.sum(jnp.where(here, x, 0.0), axis=axes, keepdims=True)

    raw = jnp.sqrt(total(jnp.square(points_BSmD), (2, 3)) / entries)
    centred = jnp.where(here, points_BSmD - total(points_BSmD, 2) / n, 0.0)
    scale = jnp.sqrt(total(jnp.square(centred), (2, 3)) / entries)
    scale = jnp.where(scale > CONSTANT * raw, scale, 0.0)
    centred = jnp.where(scale > 0, centred / jnp.where(scale > 0, scale, 1.0), 0.0)

    pairs = used[:, None, :, None] & used[:, None, None] & ~jnp.eye(used.shape[1], dtype=bool)[None, None]
    gram = jnp.where(pairs, jnp.einsum("bimd,bind->bimn", centred, centred, precision=_HIGHEST), 0.0)
    rows = jnp.sum(gram, axis=3, keepdims=True) / (n - 2)
    whole = jnp.sum(gram, axis=(2, 3), keepdims=True) / ((n - 1) * (n - 2))
    gram = jnp.where(pairs, gram - rows - jnp.swapaxes(rows, 2, 3) + whole, 0.0)
    flat = gram.reshape(*gram.shape[:2], -1)
    inner = jnp.einsum("bix,bjx->bij", flat, flat, precision=_HIGHEST)
    return inner / (n * (n - 3))[:, :, :, 0], scale[:, :, 0, 0]


def _cka(names: tuple[str, str], products: np.ndarray) -> Quantity:
    """The ratio of HSIC `[P, S, S]` averaged over prompts, with its bootstrap interval."""

    def ratio(means):
        own = np.diagonal(means, axis1=1, axis2=2)
        below = np.sqrt(own[:, :, None] * own[:, None])
        return np.where(below > 0, means / np.where(below > 0, below, 1.0), 0.0)

    examples = len(products)
    value = ratio(resampled_means(products, None, np.ones((1, examples))))[0]
    low = high = np.full(value.shape, np.nan)
    if examples > 1:
        counts = resample_counts(examples, resamples=RESAMPLES)
        low, high = interval(ratio(resampled_means(products, None, counts)))
    return Quantity(names, "", {"mean": value, "mean_low": low, "mean_high": high})
