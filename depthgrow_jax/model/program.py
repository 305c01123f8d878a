"""The order in which stored layers run, as data.

Step k of a forward pass runs stored layer `order[k]` and adds `gate[k]` times what its attention
and its MLP contribute. Skipping, swapping, looping or ablating layers, and the gate of newly grown
layers, are values of these arrays: one compilation serves all of them.
"""

import re
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from depthgrow_jax.errors import require
from depthgrow_jax.model.config import ModelConfig

_RANGE = re.compile(r"([0-9]{1,9})(?: *- *([0-9]{1,9}))?")


class LayerProgram(NamedTuple):
    """A run of K steps over L stored layers.

    Attributes:
      order: which stored layer each step runs; None runs layers 0..L-1 as they are stored (K = L),
        without the gather that an arbitrary order needs.
      gate: factor on what attention (column 0) and MLP (column 1) add to the residual stream.
      norm_scale: factor on the pre-norm output (LayerNorm-Scaling; 1 for other placements).
      residual_scale: factor on both contributions (residual scaling by depth; 1 otherwise).
    """

    order: Int[Array, " K"] | None
    gate: Float[Array, "K 2"]
    norm_scale: Float[Array, " K"]
    residual_scale: Float[Array, " K"]

    @property
    def steps(self) -> int:
        """K."""
        return self.norm_scale.shape[0]


def layer_program(cfg: ModelConfig, depth: int, *, order=None, gate=None) -> LayerProgram:
    """The plain program of a network of `depth` layers, factors taken from the position in it.

    Args:
      cfg: decides which factors differ from 1 (`pre_lns`: 1/sqrt(l), l counted from 1, arXiv
        2502.05795; residual scaling `depth`: 1/depth**residual_exponent, arXiv 2505.01618).
      depth: K. With `order` given, the depth of the network that is imitated: running a small model
        under `order=source` is the network that growth by `source` makes.
      order: `[K]` stored layers, or None for 0..K-1.
      gate: `[K]` or `[K, 2]` factors; None is 1.
    """
    ones = jnp.ones(depth, jnp.float32)
    gate = jnp.ones((depth, 2), jnp.float32) if gate is None else jnp.asarray(gate, jnp.float32)
    if gate.ndim == 1:
        gate = jnp.stack([gate, gate], axis=-1)
    position = jnp.arange(1, depth + 1, dtype=jnp.float32)
    return LayerProgram(
        order=None if order is None else jnp.asarray(order, jnp.int32),
        gate=gate,
        norm_scale=position**-0.5 if cfg.norm_placement == "pre_lns" else ones,
        residual_scale=ones * depth**-cfg.residual_exponent if cfg.residual_scaling == "depth" else ones,
    )


def reorder(program: LayerProgram, order) -> LayerProgram:
    """Runs the steps `order: int[K']` of `program`; each layer carries its factors along.

    This is what an order probe does to a trained network: a layer that moves keeps the scale it was
    trained with.
    """
    order = jnp.asarray(order, jnp.int32)
    return LayerProgram(
        order=order if program.order is None else program.order[order],
        gate=program.gate[order],
        norm_scale=program.norm_scale[order],
        residual_scale=program.residual_scale[order],
    )


def parse_order(text: str, steps: int, field: str = "--program") -> list[int]:
    """The steps that `text` names, such as `0-3,2-3,7-4`: single ones and ranges, which may run backwards.

    Raises `UserError` for anything else, and for a step that a program of `steps` steps lacks.
    """
    order: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        legal = f"must be layers and ranges (7-4 runs backwards) such as 0-3,2-3,5, of 0 to {steps - 1}"
        require(match is not None, field, text, legal)
        assert match is not None
        first, last = int(match[1]), int(match[2] or match[1])
        require(max(first, last) < steps, field, text, legal)
        order += range(first, last + 1) if first <= last else range(first, last - 1, -1)
    return order
