"""Comparing what networks predict, streamed: no array of [interventions, B, T, V] exists.

Positions are cut into chunks. A chunk's reference logits are made once, then those of every other stream, one
after another: S streams cost S + 1 heads and the memory of two blocks of logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from depthgrow_jax.model import ModelConfig, Params, unembed

# What `effects` returns of every token. KL in nats.
EFFECTS = {
    "kl": "nats",
    "kl_reverse": "nats",
    "prob_l2": "",
    "loss_increase": "nats",
    "top1_agreement": "share of tokens",
}
KL_CONVENTION = "kl = KL(clean || intervened), kl_reverse = KL(intervened || clean), nats"


def stream_logits(
    cfg: ModelConfig,
    params: Params,
    reference: Float[Array, "B T D"],
    others: Float[Array, "S B T D"],
    targets: Int[Array, "B T"],
    prepare: Callable[[Array], Any],
    measure: Callable[[Any, Array, Array], Any],
    chunk_bytes: int,
) -> Any:
    """Measures the logits of every stream of `others` against those of `reference`.

    Args:
      reference, others: residual streams before the final norm.
      targets: ids, cut into the same chunks.
      prepare: of the reference logits of a chunk, `[B, t, V]`; computed once a chunk.
      measure: `(prepared, logits [B, t, V], targets [B, t])` -> a pytree of `[B, t]`.
      chunk_bytes: of one block of float32 logits.

    Returns:
      What `measure` returns, leaves `[S, B, T]`.
    """
    batch, length, _ = reference.shape
    size = max(1, min(length, chunk_bytes // (4 * batch * cfg.vocab_size)))
    chunks = -(-length // size)
    padding = chunks * size - length

    def cut(x, axis):
        """`[..., T, ...]` to `[chunks, ..., t, ...]`."""
        widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
        shape = (*x.shape[:axis], chunks, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(shape), axis, 0)

    def one_chunk(block):
        reference_BtD, others_SBtD, targets_Bt = block
        prepared = prepare(unembed(cfg, params, reference_BtD))
        return jax.lax.map(
            lambda h_BtD: measure(prepared, unembed(cfg, params, h_BtD), targets_Bt), others_SBtD
        )

    measured = jax.lax.map(one_chunk, (cut(reference, 1), cut(others, 2), cut(targets, 1)))

    def join(x):
        return jnp.moveaxis(x, 0, 2).reshape(len(others), batch, chunks * size)[:, :, :length]

    return jax.tree.map(join, measured)


def target_log_prob(log_probs: Float[Array, "B t V"], targets: Int[Array, "B t"]) -> Float[Array, "B t"]:
    """Log-probability of each target, nats."""
    return _at(log_probs, targets)


def _at(values: Float[Array, "B t V"], ids: Int[Array, "B t"]) -> Float[Array, "B t"]:
    return jnp.take_along_axis(values, ids[..., None], axis=-1)[..., 0]


def distribution(
    logits: Float[Array, "B t V"],
) -> tuple[Float[Array, "B t V"], Float[Array, "B t V"], Float[Array, "B t"]]:
    """(log p, p, largest logit), with one exponential."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    exponential = jnp.exp(logits - largest)
    total = jnp.sum(exponential, axis=-1, keepdims=True)
    return logits - largest - jnp.log(total), exponential / total, largest[..., 0]


def effects(
    cfg: ModelConfig,
    params: Params,
    clean: Float[Array, "B T D"],
    intervened: Float[Array, "S B T D"],
    targets: Int[Array, "B T"],
    chunk_bytes: int,
) -> dict[str, Float[Array, "S B T"]]:
    """Effect of interventions on the output at every token; keys are those of `EFFECTS`.

    p is the clean next-token distribution, q the intervened one: `kl` KL(p || q), `kl_reverse` KL(q || p),
    `prob_l2` the Euclidean norm of q - p (Csordas et al.), `loss_increase` log p(target) - log q(target),
    `top1_agreement` 1 where the token that is first in p has the largest q (on a tie it has).
    """

    def prepare(logits):
        log_p, p, _ = distribution(logits)
        return log_p, p, jnp.argmax(logits, axis=-1)

    def measure(prepared, logits, targets):
        log_p, p, top = prepared
        log_q, q, largest = distribution(logits)
        gap = log_p - log_q
        return {
            "kl": jnp.sum(p * gap, axis=-1),
            "kl_reverse": -jnp.sum(q * gap, axis=-1),
            "prob_l2": jnp.sqrt(jnp.sum(jnp.square(q - p), axis=-1)),
            "loss_increase": _at(gap, targets),
            # Not by the argmax of q, which costs XLA on CPU twice as much as all the rest.
            "top1_agreement": (_at(logits, top) >= largest).astype(jnp.float32),
        }

    return stream_logits(cfg, params, clean, intervened, targets, prepare, measure, chunk_bytes)
