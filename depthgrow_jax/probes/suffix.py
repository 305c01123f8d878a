"""One clean run kept, and suffixes of it rerun: the engine of every sweep that removes something.

An intervention at layer s leaves the stream before s as it was. So the clean run keeps h_0..h_K, and an
intervention costs the layers after s alone: sweeping over all layers costs K(K-1)/2 layer evaluations
where full passes cost K^2. The suffix is a loop with a traced start, so one compilation serves every s and K.

Lanes are interventions that run at once. They come as G groups of p: statistics are pooled over p (the split
positions of one prompt), and kept apart over groups. The batch axis leads everywhere, so it may be sharded.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from depthgrow_jax.model import LayerProgram, ModelConfig, Params, embed, layer_step, rotation, run_layers
from depthgrow_jax.probes.outputs import effects
from depthgrow_jax.probes.result import over_tokens
from depthgrow_jax.probes.streams import norms

# Relative effects divide by at least this (Csordas et al., arXiv 2505.13898).
SMALLEST_NORM = 1e-6


class Clean(NamedTuple):
    """A clean run: `streams [K+1, B, T, D]` h_0..h_K; `attn`, `mlp` `[K, B, T, D]`, what layers add."""

    streams: Array
    attn: Array
    mlp: Array


@functools.partial(jax.jit, static_argnames="cfg")
def clean_run(cfg: ModelConfig, params: Params, program: LayerProgram, tokens: Int[Array, "B T"]) -> Clean:
    """Runs the network and keeps every stream and contribution."""
    taps = {"h": lambda tap: tap.h, "attn": lambda tap: tap.attn, "mlp": lambda tap: tap.mlp}
    last, kept = run_layers(cfg, params, embed(cfg, params, tokens), program=program, taps=taps)
    return Clean(jnp.concatenate([kept["h"], last[None]]), kept["attn"], kept["mlp"])


class Where(NamedTuple):
    """Tokens of one batch: where removed `[B, p, T]`, where streams and outputs count `[B, p, T]`."""

    removed: Array
    counted: Array
    counted_outputs: Array


def relative_effect(
    clean: Float[Array, "*batch D"], other: Float[Array, "*batch D"]
) -> Float[Array, "*batch"]:
    """||clean - other|| / max(||clean||, 1e-6) at every token, float32."""
    clean = clean.astype(jnp.float32)
    return norms(clean - other.astype(jnp.float32)) / jnp.maximum(norms(clean), SMALLEST_NORM)


def run_suffix(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    contributions: Float[Array, "K B T D"],
    starts: Int[Array, " g"],
    damaged: Float[Array, "B g p T D"],
    counted: Bool[Array, "B p T"],
) -> tuple[Float[Array, "K 4 B g"], Float[Array, "B g p T D"]]:
    """Runs the layers after `starts` on damaged streams, and measures every later contribution.

    Args:
      contributions: of the clean run, a_l + m_l.
      starts: the layer s whose output each group's stream replaces.
      damaged: the streams that leave layer s.
      counted: tokens that the statistics count; pooled over p and T.

    Returns:
      Relative effects on each layer's contribution, token statistics in the order of `TOKEN_STATISTICS`, 0
      for layers up to s; and the streams after the last layer.
    """
    batch, groups, pooled, length, width = damaged.shape
    steps = program.steps
    lanes = (batch, groups, pooled, length)
    # A lane alone starts at its own layer; of several, those that start later wait.
    waits = groups > 1
    rotary = rotation(cfg, jnp.arange(length)[None])

    def body(k, carry):
        x, measured = carry
        tap = layer_step(cfg, params, k, x.reshape(-1, length, width), program=program, rotary=rotary)
        out = tap.out.reshape(damaged.shape)
        added = (tap.attn + tap.mlp).reshape(damaged.shape)
        effect = relative_effect(contributions[k][:, None, None], added)
        flat = (batch, groups, pooled * length)
        statistics = over_tokens(
            effect.reshape(flat), jnp.broadcast_to(counted[:, None], lanes).reshape(flat)
        )
        if waits:
            out = jnp.where((k > starts)[None, :, None, None, None], out, x)
            statistics = jnp.where((k > starts)[None, None], statistics, 0.0)
        return out, measured.at[k].set(statistics)

    empty = jnp.zeros((steps, 4, batch, groups), jnp.float32)
    final, measured = jax.lax.fori_loop(jnp.min(starts) + 1, steps, body, (damaged, empty))
    return measured, final


@functools.partial(jax.jit, static_argnames=("cfg", "lanes", "chunk_bytes"))
def sweep(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    clean: Clean,
    replacement: Float[Array, "K B T D"],
    where: Where,
    targets: Int[Array, "B T"],
    starts: Int[Array, " S"],
    active: Bool[Array, " S"],
    *,
    lanes: int,
    chunk_bytes: int,
) -> tuple[Float[Array, "4 B S K"], dict[str, Float[Array, "4 B S"]]]:
    """Removes at every layer of `starts` in turn: effects on later contributions, and on the output.

    Args:
      active: False runs the same kernels with nothing removed.
      lanes: layers that are removed at once, each in its own copy of the batch.
    """
    steps, added = program.steps, clean.attn + clean.mlp
    total = len(starts)
    groups = -(-total // lanes)
    filled = groups * lanes - total
    # Lanes that only fill the last group start at the end and so cost nothing.
    starts_Gg = jnp.pad(starts, (0, filled), constant_values=steps - 1).reshape(groups, lanes)
    active_Gg = jnp.pad(active, (0, filled)).reshape(groups, lanes)

    def one_group(xs):
        s_g, active_g = xs
        removed = (where.removed[:, None] & active_g[None, :, None, None])[..., None]
        enter, leave = (jnp.moveaxis(clean.streams[i], 0, 1)[:, :, None] for i in (s_g, s_g + 1))
        instead = jnp.moveaxis(replacement[s_g], 0, 1)[:, :, None]
        damaged = jnp.where(removed, enter + instead, leave)
        measured, final = run_suffix(cfg, params, program, added, s_g, damaged, where.counted)
        own = jnp.moveaxis(added[s_g], 0, 1)[:, :, None]
        effect = relative_effect(own, jnp.where(removed, instead, own))
        flat = (*effect.shape[:2], -1)
        own_statistics = over_tokens(
            effect.reshape(flat), jnp.broadcast_to(where.counted[:, None], effect.shape).reshape(flat)
        )
        # [K, 4, B, g]: the removed layer's own effect comes into row s.
        is_own = (jnp.arange(steps)[:, None] == s_g[None])[:, None, None]
        return jnp.where(is_own, own_statistics[None], measured), final

    measured, final = jax.lax.map(one_group, (starts_Gg, active_Gg))
    # [G, K, 4, B, g] -> [4, B, S, K]
    effect = jnp.transpose(measured, (2, 3, 0, 4, 1)).reshape(4, -1, groups * lanes, steps)[:, :, :total]
    # [G, B, g, p, T, D] -> [S p, B, T, D]
    batch, pooled, length = where.counted.shape
    final = jnp.transpose(final, (0, 2, 3, 1, 4, 5)).reshape(-1, batch, length, cfg.width)
    final = final[: total * pooled]
    outputs = effects(cfg, params, clean.streams[-1], final, targets, chunk_bytes)
    return effect, _output_statistics(outputs, where.counted_outputs, total)


def _output_statistics(
    outputs: dict[str, Float[Array, "Sp B T"]], counted: Bool[Array, "B p T"], total: int
) -> dict[str, Float[Array, "4 B S"]]:
    batch, pooled, length = counted.shape

    def reduce(values):
        by_split = values.reshape(total, pooled, batch, length)
        flat = jnp.transpose(by_split, (2, 0, 1, 3)).reshape(batch, total, pooled * length)
        return over_tokens(flat, counted.reshape(batch, 1, pooled * length))

    return {name: reduce(values) for name, values in outputs.items()}


@functools.partial(jax.jit, static_argnames=("cfg", "chunk_bytes", "on_output"))
def local_sweep(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    clean: Clean,
    where: Where,
    targets: Int[Array, "B T"],
    *,
    chunk_bytes: int,
    on_output: bool,
) -> tuple[Float[Array, "4 B S1 K"], dict[str, Float[Array, "4 B S1"]]]:
    """Effects of removing s on each later layer alone, when all between them run as before; see `sweep`.

    Args:
      on_output: whether effects on the output are measured.

    Returns:
      As `sweep`, with one entry more on the axis of removals: the last removes nothing, by the same kernels.
    """
    steps, added = program.steps, clean.attn + clean.mlp
    batch, pooled, length = where.removed.shape
    shape = (batch, pooled, length, cfg.width)
    rotary = rotation(cfg, jnp.arange(length)[None])

    def without(stream, s):
        removed = where.removed[..., None] & (s < steps)
        less = (stream - added[jnp.minimum(s, steps - 1)])[:, None]
        return jnp.where(removed, less, jnp.broadcast_to(stream[:, None], shape))

    def one_pair(pair):
        s, layer = pair[0], pair[1]
        read = without(clean.streams[layer], s).reshape(-1, length, cfg.width)
        tap = layer_step(cfg, params, layer, read, program=program, rotary=rotary)
        effect = relative_effect(added[layer][:, None], (tap.attn + tap.mlp).reshape(shape))
        return over_tokens(effect.reshape(batch, -1), where.counted.reshape(batch, -1))

    # Every s before every layer, and s = K, which is nothing.
    removals, layers = np.arange(steps + 1)[:, None], np.arange(steps)[None]
    pairs = np.argwhere((removals < layers) | (removals == steps))
    measured = jnp.zeros((steps + 1, steps, 4, batch), jnp.float32)
    measured = measured.at[pairs[:, 0], pairs[:, 1]].set(jax.lax.map(one_pair, pairs))
    effect = jnp.transpose(measured, (2, 3, 0, 1))
    if not on_output:
        return effect, {}
    final = jax.lax.map(lambda s: without(clean.streams[-1], s), jnp.arange(steps + 1))
    final = jnp.moveaxis(final, 2, 1).reshape((steps + 1) * pooled, batch, length, cfg.width)
    outputs = effects(cfg, params, clean.streams[-1], final, targets, chunk_bytes)
    return effect, _output_statistics(outputs, where.counted_outputs, steps + 1)
