"""Running a network token by token: prefill fills a cache of keys and values, decoding adds to it.

Every step of a layer program has its own slot in the cache, so a layer that runs twice keeps two. Prompts of
unequal length are padded on the right; each row counts its own positions, and what lies beyond them is
masked. Shapes: B rows, T prompt positions, S slots of the cache, K steps, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from depthgrow_jax.model.config import ModelConfig
from depthgrow_jax.model.layers import StepFactors, causal_attention
from depthgrow_jax.model.program import LayerProgram, layer_program
from depthgrow_jax.model.rotary import rotation
from depthgrow_jax.model.transformer import Params, depth_of, embed, layer_step, run_layer, unembed


class Unrolled(NamedTuple):
    """A network as decoding reads it: the parameters of each step in arrays of their own.

    A single token takes little arithmetic and every weight: a loop that cuts a layer out of the stack would
    copy the whole model for each token. Which layer a step runs is decided here, outside the compiled
    program, so one compilation serves every program of K steps.

    Attributes:
      ends: parameters of the embedding and of the head.
      layers: those of each step, K; a layer that runs twice is one array, named twice.
      factors: of each step.
    """

    ends: Params
    layers: tuple[Params, ...]
    factors: tuple[StepFactors, ...]


class Cache(NamedTuple):
    """Keys (turned by their position) and values of each step, and how much is in each row, `[B]`.

    Slots from `length` on hold padding, to be overwritten.
    """

    key: tuple[Float[Array, "B S kv_heads H"], ...]
    value: tuple[Float[Array, "B S kv_heads H"], ...]
    length: Int[Array, " B"]


def unroll(cfg: ModelConfig, params: Params, program: LayerProgram | None = None) -> Unrolled:
    """The network that `program` makes of `params` (None: as it is), for `decode`.

    Takes the memory of the layers a second time.
    """
    program = layer_program(cfg, depth_of(params)) if program is None else program
    order = range(program.steps) if program.order is None else program.order.tolist()
    stored = {i: jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in set(order)}
    factors = StepFactors(program.gate, program.norm_scale, program.residual_scale)
    return Unrolled(
        {name: params[name] for name in ("embed", "head")},
        tuple(stored[i] for i in order),
        tuple(jax.tree.map(lambda f, k=k: f[k], factors) for k in range(program.steps)),
    )


def prefill(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    *,
    slots: int,
    program: LayerProgram | None = None,
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads prompts, padded on the right; returns the logits after each row's last token, and the cache.

    Args:
      length: tokens of each row, 1 to T.
      slots: S, at least T: tokens that the cache can hold.

    Raises `ValueError` for a bidirectional network or too few slots.
    """
    if not cfg.causal:
        raise ValueError("a bidirectional network cannot be run token by token")
    if slots < tokens.shape[1]:
        raise ValueError(f"{slots} slots cannot hold {tokens.shape[1]} tokens")
    program = layer_program(cfg, depth_of(params)) if program is None else program
    rotary = rotation(cfg, jnp.arange(tokens.shape[1])[None])
    room = ((0, 0), (0, slots - tokens.shape[1]), (0, 0), (0, 0))

    def body(x, k):
        read = []

        def attend(query, key, value):
            read.extend((jnp.pad(key, room), jnp.pad(value, room)))
            return causal_attention(query, key, value)

        tap = layer_step(cfg, params, k, x, program=program, rotary=rotary, attend=attend)
        return tap.out, tuple(read)

    x, (key, value) = jax.lax.scan(body, embed(cfg, params, tokens), jnp.arange(program.steps))
    last = jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)
    return unembed(cfg, params, last)[:, 0], Cache(tuple(key), tuple(value), length)


def decode(
    cfg: ModelConfig, network: Unrolled, cache: Cache, tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], Cache]:
    """Reads one more token in every row; returns the logits after it, and the cache that holds it.

    A row whose cache is full overwrites its last slot.
    """
    rows, slots = jnp.arange(tokens.shape[0]), cache.key[0].shape[1]
    place = jnp.minimum(cache.length, slots - 1)
    rotary = rotation(cfg, cache.length[:, None])
    visible = (jnp.arange(slots)[None] <= place[:, None])[:, None, None]
    x = embed(cfg, network.ends, tokens[:, None])
    kept_keys: list[jax.Array] = []
    kept_values: list[jax.Array] = []

    for layer, factors, past_key, past_value in zip(
        network.layers, network.factors, cache.key, cache.value, strict=True
    ):

        def attend(query, key, value, past_key=past_key, past_value=past_value):
            kept_keys.append(past_key.at[rows, place].set(key[:, 0]))
            kept_values.append(past_value.at[rows, place].set(value[:, 0]))
            return jax.nn.dot_product_attention(query, kept_keys[-1], kept_values[-1], mask=visible)

        x = run_layer(cfg, layer, x, x, rotary, factors, attend).out

    cache = Cache(tuple(kept_keys), tuple(kept_values), cache.length + 1)
    return unembed(cfg, network.ends, x)[:, 0], cache
