"""Every point of the residual stream of a clean run, and the size of its vectors."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from depthgrow_jax.model import LayerProgram, ModelConfig, Params, embed, run_layers


@functools.partial(jax.jit, static_argnames="cfg")
def clean_streams(
    cfg: ModelConfig, params: Params, program: LayerProgram, tokens: Int[Array, "B T"]
) -> Float[Array, "K1 B T D"]:
    """h_0..h_K: what enters each layer, and what leaves the last, before the final norm."""
    last, kept = run_layers(
        cfg, params, embed(cfg, params, tokens), program=program, taps={"h": lambda tap: tap.h}
    )
    return jnp.concatenate([kept["h"], last[None]])


def norms(x: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    """Euclidean norms over the last axis, float32."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
