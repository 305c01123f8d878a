"""A network and its program as a plain network, without factors, that computes the same function.

Formats of other projects hold weights and nothing else: no order of layers, no gates, no scales that follow
the position. All of these are linear where they act, so weights can take them in. K steps, L stored layers.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from depthgrow_jax.errors import require
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, depth_of


def folded_config(cfg: ModelConfig) -> ModelConfig:
    """The architecture after `fold`: LayerNorm-Scaling and residual scaling are gone."""
    placement = "pre" if cfg.norm_placement == "pre_lns" else cfg.norm_placement
    return dataclasses.replace(cfg, norm_placement=placement, residual_scaling="none")


def fold(cfg: ModelConfig, params: Params, program: LayerProgram) -> tuple[ModelConfig, Params]:
    """Config and parameters of K layers that compute under their plain program what `program` computes.

    The order becomes copies of layers. The factor of the pre-norm's output goes into that norm, the factors
    of a contribution (gate, residual scaling, learned scale) into the sub-layer's last linear map, or into
    the norm after it (`sandwich`).

    Memory: leaves that change, or all layers where their order does, are new numpy arrays; the others are
    those of `params`. A factor of exactly 1 keeps every bit.

    Raises:
      UserError: a factor other than 1 under norm placement `post`, whose contribution is not linear in any
        weight; names the factor and the step.
      ValueError: a program without an order whose steps are not the stored layers.
    """
    depth = depth_of(params)
    stored = np.arange(depth)
    order = stored if program.order is None else np.asarray(program.order)
    if len(order) != program.steps:
        raise ValueError(f"{program.steps} steps without an order cannot run {depth} stored layers")
    same = np.array_equal(order, stored)
    layers = jax.tree.map(lambda leaf: leaf if same else np.asarray(leaf)[order], params["layers"])

    learned = np.asarray(layers.pop("residual_scale", np.ones(len(order), np.float32)))
    if cfg.norm_placement == "post":
        _require_ones("gate", program.gate)
        _require_ones("residual_scale", program.residual_scale)
        _require_ones("params.layers.residual_scale", learned)
    if cfg.norm_placement == "pre_lns":
        norm_scale = np.asarray(program.norm_scale)
        _multiply(layers["attn_norm"], norm_scale)
        _multiply(layers["mlp_norm"], norm_scale)
    factors = np.asarray(program.gate) * np.asarray(program.residual_scale)[:, None] * learned[:, None]
    for column, (sub_layer, last) in enumerate((("attn", "o"), ("mlp", "down"))):
        sandwich = cfg.norm_placement == "sandwich"
        outermost = layers[f"{sub_layer}_post_norm"] if sandwich else layers[sub_layer][last]
        _multiply(outermost, factors[:, column])
    return folded_config(cfg), {**params, "layers": layers}


def _require_ones(field: str, values: Any) -> None:
    for step, value in enumerate(np.asarray(values)):
        legal = "must be 1 at every step, because norm_placement=post has no weights to fold it into"
        require(bool(np.all(value == 1)), f"{field}[{step}]", value.tolist(), legal)


def _multiply(module: dict[str, Any], factor: np.ndarray) -> None:
    """Multiplies every leaf `[K, ...]` of a module of `layers` by `factor [K]`."""
    if np.all(factor == 1):
        return
    for name, leaf in module.items():
        module[name] = np.asarray(leaf) * factor.reshape(-1, *(1,) * (leaf.ndim - 1))
