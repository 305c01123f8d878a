"""What every point of the residual stream would predict: the logit lens, and what the tuned lens shares.

A lens reads a stream through the model's own final norm and head. K steps give K + 1 points: point l is the
stream that enters layer l, point K leaves the last layer, and there the lens is the model. B prompts of a
batch, P prompts in all, T positions, D width, V vocabulary.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from depthgrow_jax.errors import require
from depthgrow_jax.model import LayerProgram, ModelConfig, Params
from depthgrow_jax.probes.config import LensConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, no_watch, num_batches
from depthgrow_jax.probes.outputs import distribution, stream_logits, target_log_prob
from depthgrow_jax.probes.result import (
    Axis,
    Quantity,
    Result,
    Score,
    over_tokens,
    quantity,
    score,
    stream_axis,
    token_quantity,
)
from depthgrow_jax.probes.settings import (
    Settings,
    check_counted,
    conventions,
    counted_outputs,
    pooling_weights,
)
from depthgrow_jax.probes.streams import clean_streams

# What a lens measures at every token.
MEASURES = {
    "kl": "nats",
    "kl_reverse": "nats",
    "js": "nats",
    "top1_agreement": "share of tokens",
    "topk_overlap": "share of the top k",
    "rank": "",
    "entropy": "nats",
    "loss": "nats",
    "accuracy": "share of tokens",
}
# Zero where the lens is the model, up to rounding.
DIVERGENCES = ("kl", "kl_reverse", "js")
KL_AREA = "area under kl(l) / max kl over l / K, means over tokens, trapezoid rule; 0 decides early, 1 late"


class Translators(NamedTuple):
    """Affine maps of the points 0..K-1, row vectors: `h + h @ kernel + bias`.

    Attributes:
      kernel: float32 `[K, D, D]`, input axis first. Without the leading axis: of one point.
      bias: float32 `[K, D]`.
    """

    kernel: jax.Array
    bias: jax.Array


class Lensed(NamedTuple):
    """A lens, measured.

    Attributes:
      axes, quantities, scores: as in `Result`.
      tokens: how many were counted.
    """

    axes: dict[str, Axis]
    quantities: dict[str, Quantity]
    scores: dict[str, Score]
    tokens: int


def translate(translator: Translators, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """One point's translator (`[D, D]`, `[D]`) in float32; the result has the dtype of `hidden`."""
    h = hidden.astype(jnp.float32)
    moved = h + jnp.matmul(h, translator.kernel) + translator.bias[None, None]
    return moved.astype(hidden.dtype)


def apply_translators(
    translators: Translators, streams: Float[Array, "K+1 B T D"]
) -> Float[Array, "K+1 B T D"]:
    """What a tuned lens gives to the final norm: point K is left alone (arXiv 2303.08112)."""
    moved = jax.lax.map(lambda args: translate(*args), (translators, streams[:-1]))
    return jnp.concatenate([moved, streams[-1:]])


def compare(
    cfg: ModelConfig,
    params: Params,
    final: Float[Array, "B T D"],
    lens_inputs: Float[Array, "S B T D"],
    targets: Int[Array, "B T"],
    top_k: int,
    chunk_bytes: int,
) -> dict[str, Float[Array, "S B T"]]:
    """Predictions read off `lens_inputs` against those of `final`; keys are those of `MEASURES`.

    p is the final next-token distribution, q the lens: `kl` KL(p || q) (the tuned lens' direction, arXiv
    2303.08112), `kl_reverse` KL(q || p) (Csordas et al., arXiv 2505.13898), `js` their Jensen-Shannon
    divergence against the mixture, at most ln 2. `topk_overlap` is the share of the k first tokens that both
    have. `rank` counts the tokens whose lens logit is at least that of the final top-1, itself included: 1 is
    first, and ties count against the lens. `entropy`, `loss` and `accuracy` are those of q.
    """

    def largest(logits):
        """`[B, t, k]` ids. In two dimensions, which XLA's fast top-k on CPU requires."""
        *shape, vocabulary = logits.shape
        return jax.lax.top_k(logits.reshape(math.prod(shape), vocabulary), top_k)[1].reshape(*shape, top_k)

    def prepare(logits):
        log_p, p, _ = distribution(logits)
        return log_p, p, largest(logits)

    def measure(prepared, logits, targets):
        log_p, p, top_p = prepared
        log_q, q, _ = distribution(logits)
        top_q = largest(logits)
        gap = log_p - log_q
        # ln(mixture / p) = ln((1 + q/p) / 2), and the same for q: finite where p or q underflows.
        common = jnp.log1p(jnp.exp(-jnp.abs(gap))) - math.log(2)
        mixture_over_p, mixture_over_q = (common + jnp.maximum(x, 0.0) for x in (-gap, gap))
        shared = top_q[..., :, None] == top_p[..., None, :]
        logit_of_final = target_log_prob(logits, top_p[..., 0])
        return {
            "kl": jnp.sum(p * gap, axis=-1),
            "kl_reverse": -jnp.sum(q * gap, axis=-1),
            "js": -0.5 * jnp.sum(p * mixture_over_p + q * mixture_over_q, axis=-1),
            "top1_agreement": (top_q[..., 0] == top_p[..., 0]).astype(jnp.float32),
            "topk_overlap": jnp.sum(shared, axis=(-1, -2)) / top_k,
            "rank": jnp.sum(logits >= logit_of_final[..., None], axis=-1).astype(jnp.float32),
            "entropy": -jnp.sum(q * log_q, axis=-1),
            "loss": -target_log_prob(log_q, targets),
            "accuracy": (top_q[..., 0] == targets).astype(jnp.float32),
        }

    return stream_logits(cfg, params, final, lens_inputs, targets, prepare, measure, chunk_bytes)


def stable_depth(agreement: Float[Array, "K+1 B T"]) -> Int[Array, "B T"]:
    """The first point from which the top-1 is the final one at every later point; 0..K."""
    agreeing_to_the_end = jnp.sum(jnp.cumprod(agreement[::-1], axis=0), axis=0).astype(jnp.int32)
    return jnp.minimum(len(agreement) - agreeing_to_the_end, len(agreement) - 1)


@functools.partial(jax.jit, static_argnames=("cfg", "top_k", "chunk_bytes"))
def _statistics(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    translators: Translators | None,
    prompts: Prompts,
    counts: Bool[Array, "B T"],
    *,
    top_k: int,
    chunk_bytes: int,
) -> dict[str, jax.Array]:
    """Token statistics `measures [4, M, K+1, B]`, `stable [4, B]`, and `share [K+1, B]` of stable depths."""
    streams = clean_streams(cfg, params, program, jnp.asarray(prompts.inputs))
    lens_inputs = streams if translators is None else apply_translators(translators, streams)
    measured = compare(
        cfg, params, streams[-1], lens_inputs, jnp.asarray(prompts.targets), top_k, chunk_bytes
    )
    stable_BT = stable_depth(measured["top1_agreement"])
    at_SBT = stable_BT[None] == jnp.arange(len(streams))[:, None, None]
    return {
        "measures": over_tokens(jnp.stack([measured[name] for name in MEASURES]), counts[None, None]),
        "stable": over_tokens(stable_BT, counts),
        "share": over_tokens(at_SBT, counts[None])[0],
    }


def kl_area(kl: np.ndarray) -> np.ndarray:
    """`KL_AREA` of curves `[R, K+1]`, `[R]`; 0 for a curve that is zero everywhere."""
    largest = kl.max(axis=1, keepdims=True)
    relative = np.divide(kl, largest, out=np.zeros_like(kl), where=largest > 0)
    return np.trapezoid(relative, axis=1) / (kl.shape[1] - 1)


def check(config: LensConfig, vocabulary: int) -> None:
    """Raises `UserError` for a top k that is larger than the vocabulary."""
    legal = f"must be at most the vocabulary of {vocabulary}"
    require(config.top_k <= vocabulary, "probe.lens.top_k", config.top_k, legal)


def measure_lens(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: LensConfig,
    translators: Translators | None = None,
    *,
    what: str,
    watch: Watch = no_watch,
) -> Lensed:
    """Measures the logit lens, or with `translators` the tuned lens, on the counted tokens of `prompts`.

    Quantities: those of `MEASURES` over the points of the stream; `stable_depth` of a token, in points; and
    `stable_depth.share`, the share of tokens whose stable depth is that point.

    Args:
      what: the label of the progress bar.

    Raises `UserError` if the top k is larger than the vocabulary, or for a prompt of which no token counts.
    """
    check(config, subject.cfg.vocab_size)
    check_counted(settings, prompts)
    counts = np.asarray(counted_outputs(settings, prompts)).sum(axis=1)
    parts = []
    total = num_batches(subject, prompts, settings.batch_size)
    for batch in watch(what, total, batches(subject, prompts, settings.batch_size)):
        part = _statistics(
            subject.cfg,
            subject.params,
            subject.program,
            translators,
            batch.prompts,
            counted_outputs(settings, batch.prompts),
            top_k=config.top_k,
            chunk_bytes=settings.chunk_bytes,
        )
        parts.append({name: np.asarray(value)[..., : batch.real] for name, value in part.items()})
    found = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}

    weights = pooling_weights(settings, counts)
    quantities = {}
    for name, values in zip(MEASURES, np.moveaxis(found["measures"], 1, 0), strict=True):
        noise = float(np.abs(values[:, -1]).max()) if name in DIVERGENCES else None
        by_example = np.moveaxis(values, -1, 1)
        quantities[name] = token_quantity(("stream",), MEASURES[name], by_example, weights, noise)
    quantities["stable_depth"] = token_quantity((), "points", found["stable"], weights)
    share = {"mean": found["share"].T}
    quantities["stable_depth.share"] = quantity(("stream",), "share of tokens", share, weights)
    kl = quantities["kl"].by_example["mean"]
    area = score(kl_area, [kl], KL_AREA, weights=[weights])
    axes = {"stream": stream_axis(subject.steps)}
    return Lensed(axes, quantities, {"lens_kl_area": area}, int(counts.sum()))


def lens_conventions(subject: Subject, settings: Settings, config: LensConfig) -> dict[str, str]:
    """The words that the results of both lenses carry."""
    return conventions(settings, subject.cfg) | {
        "KL direction": "kl = KL(final || lens), kl_reverse = KL(lens || final), nats",
        "lens": "final norm and head of the model",
        "stream points": "point l enters layer l, point K leaves the last",
        "top-k": f"k = {config.top_k}",
        "rank": "tokens whose lens logit is at least that of the final top-1, itself included",
    }


def logit_lens(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: LensConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """What h_0..h_K predict through the final norm and head (nostalgebraist 2020; arXiv 2505.13898).

    Quantities: see `measure_lens` and `compare`. Score: `lens_kl_area`, an effective depth without threshold.

    Raises `UserError` as `measure_lens` does.
    """
    lensed = measure_lens(subject, prompts, settings, config, what="logit lens", watch=watch)
    return Result(
        probe="logit_lens",
        steps=subject.steps,
        axes=lensed.axes,
        quantities=lensed.quantities,
        conventions=lens_conventions(subject, settings, config),
        examples=len(prompts.inputs),
        tokens=lensed.tokens,
        scores=lensed.scores,
    )
