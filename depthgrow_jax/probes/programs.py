"""Orders of a trained network's layers, and running many of them on what the clean run left.

A `Change` says what runs instead of steps 0..K-1. It is made with numpy, knows nothing of parameters, and is
data: all changes of a network run through one compilation, and each starts where it first differs, from the
clean run's own stream. Layers that move keep their position factors and gates (`model.reorder`).

Dimension key: B batch, T positions, D width, K steps of the clean run, S changes, N steps they are padded to.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from depthgrow_jax.model import LayerProgram, ModelConfig, Params, layer_step, reorder, rotation
from depthgrow_jax.probes.outputs import effects, stream_logits, target_log_prob
from depthgrow_jax.probes.result import over_tokens
from depthgrow_jax.probes.streams import clean_streams


class Change(NamedTuple):
    """What runs instead of steps 0..K-1.

    Attributes:
      order: the steps of the clean program that run, in this order; any number of them, repeats allowed.
      first: the first place at which this differs from the plain order; what lies before is shared.
      hold: where true, the step reads the stream that the step before it read, and adds to the stream that
        left it. None: nowhere.
      weight: factor on all that a step adds, `[len(order)]`. Unlike a gate it does not reach into the layer:
        the MLP has read the whole contribution of the attention. None: 1.
    """

    order: tuple[int, ...]
    first: int
    hold: tuple[bool, ...] | None = None
    weight: tuple[float, ...] | None = None


def _check(steps: int, start: int, length: int) -> None:
    if length < 1 or start < 0 or start + length > steps:
        raise ValueError(f"no run of {length} layers starts at layer {start} of {steps}")


def _reordered(steps: int, start: int, length: int, run: Sequence[int]) -> Change:
    """`run` in place of steps `start..start + length - 1`."""
    order = (*range(start), *run, *range(start + length, steps))
    differs = (k for k, layer in enumerate(order) if layer != k)
    return Change(order, next(differs, min(len(order), steps)))


def plain(steps: int, first: int = 0) -> Change:
    """No change, run from step `first`: a measure of numerical noise (0), or nothing to run (K)."""
    return Change(tuple(range(steps)), first)


def skip(steps: int, start: int, length: int) -> Change:
    """Layers [start, start + length) do not run."""
    _check(steps, start, length)
    return _reordered(steps, start, length, ())


def swap_any(steps: int, i: int, j: int, k: int) -> Change:
    """The adjacent runs [i, j) and [j, k) exchanged, each in its own order."""
    _check(steps, i, j - i)
    _check(steps, j, k - j)
    return _reordered(steps, i, k - i, (*range(j, k), *range(i, j)))


def swap(steps: int, start: int, length: int) -> Change:
    """The adjacent runs of `length` layers from `start` on exchanged (arXiv 2512.08819)."""
    return swap_any(steps, start, start + length, start + 2 * length)


def reverse(steps: int, start: int, length: int) -> Change:
    """Layers [start, start + length) run last to first."""
    _check(steps, start, length)
    return _reordered(steps, start, length, range(start + length - 1, start - 1, -1))


def repeat(steps: int, start: int, length: int) -> Change:
    """Layers [start, start + length) run twice, the second time after the first."""
    _check(steps, start, length)
    return _reordered(steps, start, length, 2 * tuple(range(start, start + length)))


def permute(steps: int, start: int, length: int, seed: int | Sequence[int]) -> Change:
    """Layers [start, start + length) in a random order, uniform over all but the plain one.

    Raises:
      ValueError: for a run of one layer, which has no other order.
    """
    _check(steps, start, length)
    if length < 2:
        raise ValueError("a run of one layer has no other order")
    rng, run = np.random.default_rng(seed), np.arange(start, start + length)
    drawn = rng.permutation(run)
    while (drawn == run).all():
        drawn = rng.permutation(run)
    return _reordered(steps, start, length, drawn.tolist())


def parallel(steps: int, start: int, length: int) -> Change:
    """Layers [start, start + length) all read the same stream; the mean of their outputs, residual included.

    This is `loop_parallel` of Sun et al. (arXiv 2407.09298) with one iteration.
    """
    _check(steps, start, length)
    inside = [start <= k < start + length for k in range(steps)]
    hold = tuple(held and k > start for k, held in enumerate(inside))
    weight = tuple(1 / length if held else 1.0 for held in inside)
    return Change(tuple(range(steps)), start, hold, weight)


def transplant(steps: int, start: int, length: int) -> Change:
    """Steps K + [start, start + length) in place of [start, start + length): those of a second network.

    For a program of 2K steps, the second network's after the first's.
    """
    _check(steps, start, length)
    return _reordered(steps, start, length, range(steps + start, steps + start + length))


class Changes(NamedTuple):
    """S changes, each padded to N steps; step k of change s runs if `start[s] <= k < stop[s]`.

    Attributes:
      order: int32 `[S, N]`.
      weight: float32 `[S, N]`.
      hold: bool `[S, N]`.
      start, stop: int32 `[S]`.
    """

    order: np.ndarray
    weight: np.ndarray
    hold: np.ndarray
    start: np.ndarray
    stop: np.ndarray


def stack(changes: Sequence[Change], steps: int) -> Changes:
    """Pads to `steps` = N. Raises `ValueError` if a change runs more."""
    longest = max(len(change.order) for change in changes)
    if longest > steps:
        raise ValueError(f"a change of {longest} steps does not fit into {steps}")
    count = len(changes)
    stacked = Changes(
        np.zeros((count, steps), np.int32),
        np.ones((count, steps), np.float32),
        np.zeros((count, steps), bool),
        np.asarray([change.first for change in changes], np.int32),
        np.asarray([len(change.order) for change in changes], np.int32),
    )
    for s, change in enumerate(changes):
        size = len(change.order)
        stacked.order[s, :size] = change.order
        if change.weight is not None:
            stacked.weight[s, :size] = change.weight
        if change.hold is not None:
            stacked.hold[s, :size] = change.hold
    return stacked


def run_change(
    cfg: ModelConfig, params: Params, program: LayerProgram, hidden: Array, change: Changes
) -> Array:
    """The stream `[B, T, D]` after the last step of one change (`change`: leaves without the axis S).

    Args:
      program: the clean one, whose steps `change.order` names.
      hidden: `[B, T, D]`, the stream that enters step `change.start`; no step before it may be one that a
        held step reads with.
    """
    changed, rotary = reorder(program, change.order), rotation(cfg, jnp.arange(hidden.shape[1])[None])

    def body(k, carry):
        x, held = carry
        read = jnp.where(change.hold[k], held, x)
        tap = layer_step(cfg, params, k, x, program=changed, read=read, rotary=rotary)
        weight = change.weight[k].astype(x.dtype)
        return x + weight * tap.attn + weight * tap.mlp, read

    return jax.lax.fori_loop(change.start, change.stop, body, (hidden, hidden))[0]


def run_programs(
    cfg: ModelConfig, params: Params, program: LayerProgram, streams: Array, changes: Changes
) -> Array:
    """Final streams `[S, B, T, D]` of all changes, one after another in one loop.

    Args:
      program: the clean one.
      streams: `[K + 1, B, T, D]`, the clean h_0..h_K; each change starts from that of its first step.
    """
    return jax.lax.map(
        lambda change: run_change(cfg, params, program, streams[change.start], change), changes
    )


@functools.partial(jax.jit, static_argnames=("cfg", "chunk_bytes"))
def clean_run(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    inputs: Array,
    targets: Array,
    counted: Array,
    chunk_bytes: int,
) -> tuple[Array, Array]:
    """The streams h_0..h_K, `[K + 1, B, T, D]`, and `over_tokens` of the loss in nats, `[4, B]`."""
    streams = clean_streams(cfg, params, program, inputs)
    loss = stream_logits(
        cfg,
        params,
        streams[-1],
        streams[-1:],
        targets,
        lambda _: (),
        lambda _, logits, ids: -target_log_prob(jax.nn.log_softmax(logits), ids),
        chunk_bytes,
    )
    return streams, over_tokens(loss[0], counted)


@functools.partial(jax.jit, static_argnames=("cfg", "chunk_bytes"))
def _effects(cfg, params, program, streams, targets, counted, changes, chunk_bytes):
    finals = run_programs(cfg, params, program, streams, changes)
    values = effects(cfg, params, streams[-1], finals, targets, chunk_bytes)

    def reduce(name, value):
        departure = 1 - value if name == "top1_agreement" else jnp.abs(value)
        return over_tokens(value, counted), jnp.max(jnp.where(counted[None], departure, 0.0), axis=-1)

    return {name: reduce(name, value) for name, value in values.items()}


def sweep(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    streams: Array,
    targets: Array,
    counted: Array,
    changes: Sequence[Change],
    chunk_bytes: int,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Effects of every change on the outputs of one batch.

    K changes run in one call, so their final streams take as much memory as the clean run's streams. All
    calls share one compilation, whatever the changes, of at most 2K steps each. The last call is filled up
    with changes that run nothing.

    Args:
      streams, counted: of `clean_run`; bool `[B, T]`, the outputs that count.

    Returns:
      For each of `outputs.EFFECTS`: `over_tokens` `[4, S, B]`, and the largest departure `[S, B]` over the
      counted tokens from what no change would give (0; for `top1_agreement` 1).
    """
    steps = len(streams) - 1
    filled = [*changes, *[plain(steps, steps)] * (-len(changes) % steps)]
    groups = [
        _effects(
            cfg,
            params,
            program,
            streams,
            targets,
            counted,
            stack(filled[at : at + steps], 2 * steps),
            chunk_bytes,
        )
        for at in range(0, len(filled), steps)
    ]
    found = {}
    for name in groups[0]:
        statistics = np.concatenate([np.asarray(group[name][0]) for group in groups], axis=1)
        largest = np.concatenate([np.asarray(group[name][1]) for group in groups])
        found[name] = statistics[:, : len(changes)], largest[: len(changes)]
    return found
