"""The tuned lens: an affine map before the final norm and head, trained for each point of the stream.

Belrose et al., arXiv 2303.08112. It removes what the logit lens confuses with a late decision: directions
that rotate or shift from layer to layer. The network is frozen; each point is a training problem of its own.
"""

import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, unembed
from depthgrow_jax.probes.config import LensConfig, TunedLensConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, no_watch
from depthgrow_jax.probes.lens import Translators, lens_conventions, measure_lens, translate
from depthgrow_jax.probes.result import Result
from depthgrow_jax.probes.settings import Settings
from depthgrow_jax.probes.streams import clean_streams

# Adam's direction; the learning rate is the step's. The gradient of each translator is clipped to norm 1.
_optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def identity_translators(steps: int, width: int) -> Translators:
    """Translators of K = `steps` points that change nothing: the logit lens."""
    return Translators(jnp.zeros((steps, width, width)), jnp.zeros((steps, width)))


def losses_and_gradients(
    cfg: ModelConfig,
    params: Params,
    translators: Translators,
    streams: Float[Array, "K+1 B T D"],
    chunk_bytes: int,
) -> tuple[Float[Array, " K"], Translators]:
    """KL(final || lens) of each point, nats, mean over all tokens, and its gradient.

    The gradient of translator l is that of loss l alone, not of their mean. One block of logits exists at a
    time: positions are cut into chunks, whose final distribution serves all points, one after another.
    """
    points, batch, length, width = streams.shape
    size = max(1, min(length, chunk_bytes // (4 * batch * cfg.vocab_size)))
    chunks = -(-length // size)
    padded = jnp.pad(streams, ((0, 0), (0, 0), (0, chunks * size - length), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(points, batch, chunks, size, width), 2, 0)
    real = (jnp.arange(chunks * size) < length).reshape(chunks, size)

    def add_chunk(total, block):
        streams_SBtD, real_t = block
        log_p = jax.nn.log_softmax(unembed(cfg, params, streams_SBtD[-1]))
        p = jnp.exp(log_p)

        def loss(translator, h_BtD):
            log_q = jax.nn.log_softmax(unembed(cfg, params, translate(translator, h_BtD)))
            kl_Bt = jnp.sum(p * (log_p - log_q), axis=-1)
            return jnp.sum(kl_Bt, where=real_t[None]) / (batch * length)

        one_point = jax.value_and_grad(loss)
        found = jax.lax.map(lambda args: one_point(*args), (translators, streams_SBtD[:-1]))
        return jax.tree.map(jnp.add, total, found), None

    zero = (jnp.zeros(points - 1), jax.tree.map(jnp.zeros_like, translators))
    return jax.lax.scan(add_chunk, zero, (blocks, real))[0]


@functools.partial(jax.jit, static_argnames=("cfg", "chunk_bytes"), donate_argnames=("translators", "state"))
def _update(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    translators: Translators,
    state: optax.OptState,
    tokens: Int[Array, "B T"],
    learning_rate: float,
    *,
    chunk_bytes: int,
) -> tuple[Translators, optax.OptState, Float[Array, ""]]:
    """One step of Adam on every translator; the loss is the mean over points before it."""
    streams = clean_streams(cfg, params, program, tokens)
    losses, gradients = losses_and_gradients(cfg, params, translators, streams, chunk_bytes)
    # Over points: each translator has its own norm to clip.
    directions, state = jax.vmap(lambda g, s: _optimizer.update(g, s))(gradients, state)
    translators = jax.tree.map(lambda x, d: x - learning_rate * d, translators, directions)
    return translators, state, jnp.mean(losses)


def _replicated(subject: Subject, tree):
    """`tree` where the step leaves it too, on every device of the mesh, so that it compiles once."""
    sharding = subject.batch_sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return tree
    return jax.device_put(tree, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))


def train_translators(
    subject: Subject,
    settings: Settings,
    training: TunedLensConfig,
    batches: Iterator[np.ndarray],
    *,
    watch: Watch = no_watch,
) -> tuple[Translators, int, float]:
    """Trains on the first `training.steps` of `batches`, ids `[B, T + 1]`, of which T are read.

    Adam, each gradient clipped to norm 1, the learning rate falling linearly to 0.

    Returns:
      The translators, how many tokens they saw, and the loss at the last step, nats.

    Raises `UserError` if there are fewer batches, or ids outside the vocabulary.
    """
    cfg, steps = subject.cfg, training.steps
    translators = _replicated(subject, identity_translators(subject.steps, cfg.width))
    state = _replicated(subject, jax.vmap(_optimizer.init)(translators))
    tokens, loss, done = 0, float("nan"), 0
    for step, rows in watch("tuned lens", steps, enumerate(itertools.islice(batches, steps))):
        inputs = np.ascontiguousarray(np.asarray(rows)[:, :-1], np.int32)
        if inputs.min() < 0 or inputs.max() >= cfg.vocab_size:
            raise UserError(f"tuned lens: training text has ids outside the vocabulary of {cfg.vocab_size}")
        tokens += inputs.size
        if subject.batch_sharding is not None and len(inputs) % subject.devices == 0:
            inputs = jax.device_put(inputs, subject.batch_sharding)
        translators, state, last = _update(
            cfg,
            subject.params,
            subject.program,
            translators,
            state,
            inputs,
            training.learning_rate * (1 - step / steps),
            chunk_bytes=settings.chunk_bytes,
        )
        loss, done = float(last), step + 1
    if done < steps:
        raise UserError(f"probe.tuned_lens.steps={steps}: the training text gives only {done} batches")
    return translators, tokens, loss


def tuned_lens(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: LensConfig,
    training: TunedLensConfig,
    batches: Iterator[np.ndarray],
    held_out: Prompts,
    *,
    watch: Watch = no_watch,
) -> Result:
    """Trains a tuned lens (arXiv 2303.08112) and measures it on `prompts` as the logit lens is.

    Quantities, beside those of `lens.measure_lens`: `held_out.kl` and `held_out.kl_untrained`, `kl` on the
    `held_out` text with the trained translators and without any. Its examples are not those of `prompts`.
    Arrays: `translator.kernel` `[K, D, D]`, `translator.bias` `[K, D]` (see `lens.Translators`).

    Args:
      batches: training text, ids `[B, T + 1]`, disjoint from `prompts` and `held_out`.

    Raises `UserError` as `train_translators` and `lens.measure_lens` do.
    """
    width = subject.cfg.width

    def on_held_out(translators, what):
        return measure_lens(subject, held_out, settings, config, translators, what=what, watch=watch)

    # Identity translators rather than none: the trained ones then need no other compilation.
    identity = _replicated(subject, identity_translators(subject.steps, width))
    before = on_held_out(identity, "tuned lens, before training").quantities["kl"]
    translators, tokens, loss = train_translators(subject, settings, training, batches, watch=watch)
    after = on_held_out(translators, "tuned lens, held-out text").quantities["kl"]
    lensed = measure_lens(subject, prompts, settings, config, translators, what="tuned lens", watch=watch)
    budget = (
        f"{training.steps} updates of {tokens // training.steps} tokens, Adam at {training.learning_rate:g}"
    )
    return Result(
        probe="tuned_lens",
        steps=subject.steps,
        axes=lensed.axes,
        quantities=lensed.quantities | {"held_out.kl": after, "held_out.kl_untrained": before},
        conventions=lens_conventions(subject, settings, config)
        | {"tuned lens": f"{budget}; loss kl over all tokens"},
        examples=len(prompts.inputs),
        tokens=lensed.tokens,
        scores=lensed.scores,
        notes={
            "training": {
                "steps": training.steps,
                "tokens": tokens,
                "learning_rate": training.learning_rate,
                "held_out_sequences": len(held_out.inputs),
                "kl_before": float(before.statistics["mean"][:-1].mean()),
                "kl_after": float(after.statistics["mean"][:-1].mean()),
                "loss": loss,
            }
        },
        arrays={
            "translator.kernel": np.asarray(translators.kernel),
            "translator.bias": np.asarray(translators.bias),
        },
    )
