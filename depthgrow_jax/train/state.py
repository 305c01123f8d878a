"""The state of a run: everything a resume needs."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from depthgrow_jax import growth
from depthgrow_jax.model import ModelConfig, Params, init


class TrainState(flax.struct.PyTreeNode):
    """One pytree; depth is the leading axis of its layers.

    Attributes:
      step: int32[], optimizer steps done; the position in the data and the learning rate follow from it.
      params: float32 parameters.
      opt_state: state of the optimizer.
      ema: moving average of the parameters, or None.
      lineage: int32[S, L], row s the index, in stage s, of the ancestor of each present layer.
      born: int32[L], step of the event that inserted each layer, -1 for original layers.
    """

    step: jax.Array
    params: Params
    opt_state: Any
    ema: Params | None
    lineage: jax.Array
    born: jax.Array


def from_params(params: Params, tx: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """A state at step 0 around given parameters."""
    lineage, born = growth.initial_lineage(jax.tree.leaves(params["layers"])[0].shape[0])
    # The average is a copy: a donated step must not meet one buffer under two names.
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), average, lineage, born)


def create(
    model: ModelConfig, tx: optax.GradientTransformation, depth: int, seed, *, ema: bool
) -> TrainState:
    """A fresh state of `depth` layers."""
    return from_params(init(model, jax.random.key(seed), depth), tx, ema=ema)


def abstract_state(
    model: ModelConfig, tx: optax.GradientTransformation, depth: int, *, ema: bool, stages: int = 1
) -> TrainState:
    """Shapes and dtypes of the state at `depth` after `stages - 1` growth events, nothing allocated."""
    state = jax.eval_shape(lambda: create(model, tx, depth, 0, ema=ema))
    return state.replace(lineage=jax.ShapeDtypeStruct((stages, depth), jnp.int32))


def to_items(state: TrainState) -> dict[str, Any]:
    """The state as the items of a checkpoint; parameters apart, so that they can be read alone."""
    rest = {name: getattr(state, name) for name in ("step", "opt_state", "lineage", "born")}
    return {"params": state.params, "training": rest} | ({} if state.ema is None else {"ema": state.ema})


def from_items(items: dict[str, Any]) -> TrainState:
    """Inverse of `to_items`."""
    return TrainState(params=items["params"], ema=items.get("ema"), **items["training"])
