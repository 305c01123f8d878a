"""The network: one stack of layers, initialised by `vmap` and run by `scan`.

    params = {"embed": ..., "layers": leaves [L, ...], "head": ...}

`apply` is the one forward pass of the project: training, probing and scoring call it. Shapes: B batch,
T sequence, N = B*T, D width, V vocabulary, L stored layers, K steps of the program.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from depthgrow_jax.model.config import ModelConfig
from depthgrow_jax.model.layers import Attend, Embed, Head, Layer, StepFactors
from depthgrow_jax.model.program import LayerProgram, layer_program
from depthgrow_jax.model.rotary import rotation

Params = dict[str, Any]


class LayerTap(NamedTuple):
    """What one step offers to a tap, `[B, T, D]` each; `h + attn + mlp == out`.

    Attributes:
      h: the residual stream that enters the layer.
      attn, mlp: what attention and MLP add to it, gates and scales included.
      out: the residual stream that leaves.
    """

    h: Array
    attn: Array
    mlp: Array
    out: Array


Taps = Mapping[str, Callable[[LayerTap], Any]]


class Output(NamedTuple):
    """`logits [B, T, V]` float32, `hidden [B, T, D]` before the final norm, `taps`: leaves `[K, ...]`."""

    logits: Array
    hidden: Array
    taps: dict[str, Any]


def _init(module: nn.Module, key: PRNGKeyArray, *inputs) -> Any:
    return module.init(key, *inputs)["params"]


def _call(module: nn.Module, params: Params, *inputs) -> Any:
    return module.apply({"params": params}, *inputs)


def init_layer(cfg: ModelConfig, key: PRNGKeyArray) -> Params:
    """Parameters of one layer, without the leading axis."""
    shape = (1, 2)
    rotary = rotation(cfg, jnp.arange(shape[1])[None])
    stream = jnp.zeros((shape[0] * shape[1], cfg.width), jnp.dtype(cfg.dtype))
    factors = StepFactors(jnp.ones(2), jnp.ones(()), jnp.ones(()))
    return _init(Layer(cfg), key, stream, shape, rotary, factors)


def init_layers(cfg: ModelConfig, key: PRNGKeyArray, depth: int) -> Params:
    """Stacked parameters, leaves `[depth, ...]`; layer i is the same at every `depth` > i."""
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(depth))
    return jax.vmap(lambda k: init_layer(cfg, k))(keys)


def init(cfg: ModelConfig, key: PRNGKeyArray, depth: int) -> Params:
    """Float32 parameters of a network of `depth` layers.

    Embedding, head and each layer draw from their own keys, so networks of different depth share them.
    """
    embed_key, layers_key, head_key = (jax.random.fold_in(key, i) for i in range(3))
    embed = _init(Embed(cfg), embed_key, jnp.zeros((1, 1), jnp.int32))
    stream = jnp.zeros((1, cfg.width), jnp.dtype(cfg.dtype))
    return {
        "embed": embed,
        "layers": init_layers(cfg, layers_key, depth),
        "head": _init(Head(cfg), head_key, stream, embed["table"]),
    }


def abstract_params(cfg: ModelConfig, depth: int) -> Params:
    """Shapes and dtypes of `init`, nothing allocated."""
    return jax.eval_shape(lambda: init(cfg, jax.random.key(0), depth))


def num_params(params: Params) -> int:
    """Number of parameters, tied weights counted once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def depth_of(params: Params) -> int:
    """L, read from the leading axis of the stacked layers."""
    return jax.tree.leaves(params["layers"])[0].shape[0]


def embed(cfg: ModelConfig, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """h_0, the stream that enters the first layer. Ids outside the vocabulary give NaN."""
    return _call(Embed(cfg), params["embed"], tokens)


def unembed(cfg: ModelConfig, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Final norm and head: float32 logits of any residual stream (at h_L the model's own)."""
    batch, length, width = hidden.shape
    stream_ND = hidden.reshape(batch * length, width)
    logits_NV = _call(Head(cfg), params["head"], stream_ND, params["embed"]["table"])
    return logits_NV.reshape(batch, length, cfg.vocab_size)


def _layer_params(params: Params, index: int | Int[Array, ""]) -> Params:
    return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, index, keepdims=False), params["layers"])


def run_layer(
    cfg: ModelConfig,
    layer_params: Params,
    x: Array,
    read: Array,
    rotary: tuple[Array, Array],
    factors: StepFactors,
    attend: Attend | None = None,
) -> LayerTap:
    """One layer, whose parameters have no layer axis: computed from `read`, added to `x`, `[B, T, D]` each.

    Args:
      rotary, attend: as in `layer_step`.
      factors: what a program gives its step.
    """
    batch, length, width = x.shape
    read_ND = read.reshape(batch * length, width)
    a_ND, m_ND = _call(Layer(cfg), layer_params, read_ND, (batch, length), rotary, factors, attend)
    a, m = a_ND.reshape(x.shape), m_ND.reshape(x.shape)
    return LayerTap(x, a, m, x + a + m)


def layer_step(
    cfg: ModelConfig,
    params: Params,
    k: int | Int[Array, ""],
    hidden: Float[Array, "B T D"],
    *,
    program: LayerProgram | None = None,
    read: Float[Array, "B T D"] | None = None,
    rotary: tuple[Array, Array] | None = None,
    attend: Attend | None = None,
) -> LayerTap:
    """Step `k` of the program alone, for loops that intervene between steps; `k` may be traced.

    Args:
      hidden: the stream that the step adds to.
      read: the stream that the layer reads; None reads `hidden`.
      rotary: `rotation(cfg, positions)`; None computes that of positions 0..T-1. A loop over steps computes
        it once, outside: XLA does not move it there (measured on CPU: a tenth of the loop).
      attend: how queries meet keys and values; None is the attention of the config.
    """
    program = layer_program(cfg, depth_of(params)) if program is None else program
    rotary = rotation(cfg, jnp.arange(hidden.shape[1])[None]) if rotary is None else rotary
    factors = StepFactors(program.gate[k], program.norm_scale[k], program.residual_scale[k])
    layer_params = _layer_params(params, k if program.order is None else program.order[k])
    return run_layer(cfg, layer_params, hidden, hidden if read is None else read, rotary, factors, attend)


def run_layers(
    cfg: ModelConfig,
    params: Params,
    hidden: Float[Array, "B T D"],
    *,
    program: LayerProgram | None = None,
    taps: Taps | None = None,
    start: int | Int[Array, ""] = 0,
    stop: int | Int[Array, ""] | None = None,
    positions: Int[Array, "#B T"] | None = None,
) -> tuple[Float[Array, "B T D"], dict[str, Any]]:
    """Runs steps `start..stop-1` of the program on a residual stream.

    Args:
      hidden: the stream that enters step `start`.
      program: None runs the stored layers once, in order.
      taps: name -> function of a `LayerTap`; what it returns is stacked over the steps run. A function
        that reduces runs inside the scan, so `[K, B, T, D]` exists only if it is asked for.
      start, stop: Python integers give a differentiable scan over just these steps. Traced integers give
        a loop of dynamic length, compiled once for all values, not reverse-differentiable and without taps.
      positions: of the tokens; default 0..T-1.

    Returns:
      The stream after the last step, and the taps, leaves `[stop - start, ...]`.

    Raises:
      ValueError: taps together with traced bounds, whose number of steps is not known.
    """
    taps = taps or {}
    program = layer_program(cfg, depth_of(params)) if program is None else program
    stop = program.steps if stop is None else stop
    positions = jnp.arange(hidden.shape[1])[None] if positions is None else positions
    rotary = rotation(cfg, positions)

    def step(x, layer_params, factors):
        tap = run_layer(cfg, layer_params, x, x, rotary, factors)
        return tap.out, {name: fn(tap) for name, fn in taps.items()}

    if cfg.remat != "none":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if cfg.remat == "dots" else None
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)

    factors = StepFactors(program.gate, program.norm_scale, program.residual_scale)

    if not isinstance(start, jax.Array) and not isinstance(stop, jax.Array):
        cut = lambda tree: jax.tree.map(lambda leaf: leaf[start:stop], tree)  # noqa: E731
        if program.order is None:
            whole = (start, stop) == (0, program.steps)
            xs = (params["layers"] if whole else cut(params["layers"]), cut(factors))
            body = lambda x, step_xs: step(x, *step_xs)  # noqa: E731
        else:
            xs = (program.order[start:stop], cut(factors))
            body = lambda x, step_xs: step(x, _layer_params(params, step_xs[0]), step_xs[1])  # noqa: E731
        return jax.lax.scan(body, hidden, xs, unroll=cfg.scan_unroll)

    if taps:
        raise ValueError("taps need Python integers for start and stop")
    order = jnp.arange(program.steps) if program.order is None else program.order

    def loop_body(k, x):
        return step(x, _layer_params(params, order[k]), jax.tree.map(lambda f: f[k], factors))[0]

    return jax.lax.fori_loop(start, stop, loop_body, hidden), {}


def apply(
    cfg: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"] | None = None,
    *,
    hidden: Float[Array, "B T D"] | None = None,
    program: LayerProgram | None = None,
    taps: Taps | None = None,
    start: int | Int[Array, ""] = 0,
    stop: int | Int[Array, ""] | None = None,
    positions: Int[Array, "#B T"] | None = None,
) -> Output:
    """The forward pass: embed, run the layer program, final norm and head.

    Args:
      tokens: ids, or None when `hidden` gives the stream that enters step `start`.
      stop: an early exit: the logits are read off the stream after step `stop - 1`.
      (the others as in `run_layers`)

    Raises:
      ValueError: not exactly one of `tokens` and `hidden`.
    """
    if (tokens is None) == (hidden is None):
        raise ValueError("apply takes tokens or hidden, one of them")
    stream = hidden if tokens is None else embed(cfg, params, tokens)
    assert stream is not None
    stream, tapped = run_layers(
        cfg, params, stream, program=program, taps=taps, start=start, stop=stop, positions=positions
    )
    return Output(unembed(cfg, params, stream), stream, tapped)
