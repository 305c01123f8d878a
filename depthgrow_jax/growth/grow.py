"""A growth event: one integer vector applied to everything that has a layer axis."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PRNGKeyArray

from depthgrow_jax.growth.source import SourceMap
from depthgrow_jax.model import ModelConfig, Params, depth_of, init_layers


class Growable(Protocol):
    """What `grow` needs of a train state: a `flax.struct` with these fields.

    Attributes:
      step: int32[], steps done.
      params, ema: parameters and their moving average (or None).
      opt_state: state of an optax transformation of `params`.
      lineage: int32[S, L], row s is the index, in stage s, of the ancestor of each present layer.
      born: int32[L], the step of the event that inserted each layer, -1 for original layers.
    """

    step: Any
    params: Params
    ema: Params | None
    opt_state: Any
    lineage: jax.Array
    born: jax.Array

    def replace(self, **changes) -> "Growable":
        """A copy with some fields changed."""
        ...


def initial_lineage(depth: int) -> tuple[jax.Array, jax.Array]:
    """`lineage [1, L]` and `born [L]` of a model that has not grown."""
    return jnp.arange(depth, dtype=jnp.int32)[None], jnp.full(depth, -1, jnp.int32)


def silent_leaves(model: ModelConfig) -> tuple[tuple[str, ...], ...]:
    """Paths within a layer whose zeroing makes the layer add nothing to the stream.

    The last linear map of each sub-layer, as in LLaMA-Pro (arXiv 2401.02415): its gradient does not vanish,
    so the layer learns. With a norm after the sub-layer (`sandwich`) that map is the norm's scale. A learned
    residual scale comes after all of them and is the one zero then: two in a row would stop each other's
    gradient.
    """
    if model.residual_scaling == "learned":
        return (("residual_scale",),)
    if model.norm_placement == "sandwich":
        return (("attn_post_norm",), ("mlp_post_norm",))
    return (("attn", "o"), ("mlp", "down"))


def _path(keys) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys)


def take_layers(tree: Any, source, depth: int) -> Any:
    """Indexes the layer axis of every leaf below a key `layers` whose axis 0 is `depth`; copies the others.

    The one rule that serves parameters, moments, counts and averages alike. Every leaf of the result is
    a new array: a donated step after growth never meets a buffer twice.
    """
    index = jnp.asarray(source, jnp.int32)

    def take(keys, leaf):
        stacked = "layers" in _path(keys) and leaf.ndim > 0 and leaf.shape[0] == depth
        return jnp.take(leaf, index, axis=0) if stacked else jnp.copy(leaf)

    return jax.tree_util.tree_map_with_path(take, tree)


def _where_new(new, fresh, old):
    """`fresh` at the new layers, `old` elsewhere, leaf by leaf."""
    mask = np.asarray(new)
    return jax.tree.map(lambda f, o: jnp.where(mask.reshape(-1, *(1,) * (o.ndim - 1)), f, o), fresh, old)


def grow_params(
    params: Params,
    event: SourceMap,
    *,
    model: ModelConfig,
    init: str = "copy",
    key: PRNGKeyArray | None = None,
) -> Params:
    """Parameters of depth `event.depth`; leaves `[L, ...]` of the layers become `[event.depth, ...]`.

    Args:
      init: `copy`, `identity` (inserted layers silenced, the function is unchanged but for factors that
        follow the new positions), or `random` (inserted layers drawn anew from `key`,
        which nothing else needs).

    Raises:
      ValueError: `random` without a key.
    """
    grown = take_layers(params, event.source, depth_of(params))
    layers = grown["layers"]
    if init == "random":
        if key is None:
            raise ValueError("init='random' draws from a key, and none is given")
        layers = _where_new(event.new, init_layers(model, key, event.depth), layers)
    if init == "identity":
        silent = silent_leaves(model)

        def silence(keys, leaf):
            hit = any(_path(keys)[: len(path)] == path for path in silent)
            return _where_new(event.new, jnp.zeros_like(leaf), leaf) if hit else leaf

        layers = jax.tree_util.tree_map_with_path(silence, layers)
    return {**grown, "layers": layers}


def grow_optimizer(
    opt_state: Any,
    event: SourceMap,
    depth: int,
    params: Params,
    *,
    tx: optax.GradientTransformation,
    mode: str,
) -> Any:
    """Optimizer state for the grown `params`.

    Args:
      depth: the old depth.
      mode: `copy` (inserted layers inherit the state of their source), `zero` (their state is that of a fresh
        optimizer: zero moments and, where it keeps one for each layer, a zero count), `reset`
        (`tx.init(params)`).

    Raises:
      ValueError: a leaf that does not have the shape and dtype of a fresh `tx.init(params)`; names its path.
    """
    if mode == "reset":
        return tx.init(params)
    grown = take_layers(opt_state, event.source, depth)
    if mode == "zero":
        # Not literally zeros: Muon keeps the coefficients of its iteration in the state.
        def clear(keys, fresh, leaf):
            stacked = "layers" in _path(keys) and leaf.ndim > 0 and leaf.shape[0] == event.depth
            return _where_new(event.new, fresh, leaf) if stacked else leaf

        grown = jax.tree_util.tree_map_with_path(clear, tx.init(params), grown)
    check_like(grown, jax.eval_shape(tx.init, params), "optimizer state")
    return grown


def check_like(tree: Any, target: Any, what: str) -> None:
    """Raises `ValueError` unless `tree` has the structure, shapes and dtypes of `target`."""
    if jax.tree.structure(tree) != jax.tree.structure(target):
        raise ValueError(f"{what}: its structure differs from a fresh one")
    pairs = zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(target), strict=True)
    for (keys, leaf), wanted in pairs:
        if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{what}: {jax.tree_util.keystr(keys)} is {leaf.dtype}{list(leaf.shape)}, "
                f"a fresh one is {wanted.dtype}{list(wanted.shape)}"
            )


def grow(
    state: Growable,
    event: SourceMap,
    *,
    model: ModelConfig,
    tx: optax.GradientTransformation,
    key: PRNGKeyArray,
    init: str = "copy",
    optimizer: str = "copy",
) -> Growable:
    """The state after a growth event, at the same step.

    Embedding, head, and everything without a layer axis carry over; the layers, their optimizer state and
    moving average follow `event.source`. The result shares no buffer with `state`. `init` and `optimizer` as
    in `grow_params` and `grow_optimizer`.

    Raises:
      ValueError: an optimizer state, given or grown, of which `tx.init` would make another; `event.source`
        out of range.
    """
    depth = depth_of(state.params)
    if not all(0 <= layer < depth for layer in event.source):
        raise ValueError(f"source map {event.source} names a layer that a depth-{depth} stack lacks")
    if optimizer != "reset":
        check_like(state.opt_state, jax.eval_shape(tx.init, state.params), "optimizer state")
    source = jnp.asarray(event.source, jnp.int32)
    params = grow_params(state.params, event, model=model, init=init, key=key)
    ema = state.ema and grow_params(state.ema, event, model=model, init=init, key=key)
    ancestors = jnp.concatenate([state.lineage[:, source], jnp.arange(event.depth, dtype=jnp.int32)[None]])
    return state.replace(
        step=jnp.copy(state.step),
        params=params,
        ema=ema,
        opt_state=grow_optimizer(state.opt_state, event, depth, params, tx=tx, mode=optimizer),
        lineage=ancestors,
        born=jnp.where(np.asarray(event.new), state.step, state.born[source]).astype(jnp.int32),
    )
