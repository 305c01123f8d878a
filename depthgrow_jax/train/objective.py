"""Training objectives. Each turns a batch into inputs, targets and weights; one loss serves them all.

B batch, T sequence, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from depthgrow_jax.train.config import TrainConfig


class Examples(NamedTuple):
    """`inputs [B, T]`, `targets [B, T]` ids, and `weights [B, T]`, 1 where the loss counts."""

    inputs: Array
    targets: Array
    weights: Array


class SpecialTokens(NamedTuple):
    """What masked language modelling needs of the tokenizer.

    Attributes:
      vocab_size: random replacements are drawn below it.
      separator: never hidden.
      mask: shown in the place of hidden tokens.
    """

    vocab_size: int
    separator: int
    mask: int


def causal_examples(tokens: Int[Array, "B T1"]) -> Examples:
    """Every token predicts the next: `[B, T+1]` ids give T targets."""
    targets = tokens[:, 1:]
    return Examples(tokens[:, :-1], targets, jnp.ones(targets.shape, jnp.float32))


def masked_examples(
    tokens: Int[Array, "B T1"], key: PRNGKeyArray, rate: float, special: SpecialTokens
) -> Examples:
    """BERT's corruption (arXiv 1810.04805): of the chosen positions 80% mask, 10% random, 10% unchanged.

    Uses the first T of the T+1 ids. The draw depends on the key and the shape only, not on devices.
    """
    targets = tokens[:, :-1]
    choose_key, kind_key, random_key = (jax.random.fold_in(key, i) for i in range(3))
    chosen = (jax.random.uniform(choose_key, targets.shape) < rate) & (targets != special.separator)
    kind = jax.random.uniform(kind_key, targets.shape)
    noise = jax.random.randint(random_key, targets.shape, 0, special.vocab_size, targets.dtype)
    shown = jnp.where(kind < 0.8, special.mask, jnp.where(kind < 0.9, noise, targets))
    return Examples(jnp.where(chosen, shown, targets), targets, chosen.astype(jnp.float32))


def make_examples(
    cfg: TrainConfig, tokens: Int[Array, "B T1"], key: PRNGKeyArray, special: SpecialTokens
) -> Examples:
    """Examples of the config's objective."""
    if cfg.objective == "masked":
        return masked_examples(tokens, key, cfg.mask_rate, special)
    return causal_examples(tokens)


def loss_by_sequence(
    logits: Float[Array, "B T V"], examples: Examples, z_loss: float = 0.0
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """(objective, cross-entropy) of each sequence, nats, *summed* over its weighted positions, float32.

    The objective adds z_loss * log(Z)^2 (PaLM, arXiv 2204.02311, section 5). Sums, so that microbatches
    with different numbers of targets add up to the loss of the whole batch.
    """
    log_z = jax.nn.logsumexp(logits, axis=-1)
    at_target = jnp.take_along_axis(logits, examples.targets[..., None], axis=-1)[..., 0]
    cross_entropy = jnp.sum((log_z - at_target) * examples.weights, axis=-1)
    if not z_loss:
        return cross_entropy, cross_entropy
    return cross_entropy + z_loss * jnp.sum(jnp.square(log_z) * examples.weights, axis=-1), cross_entropy
