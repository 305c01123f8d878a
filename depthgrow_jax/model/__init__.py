"""What a network is: one layer, stacked; run by a `LayerProgram`; one forward pass for everything."""

from depthgrow_jax.model.config import PRESETS, ModelConfig, preset, validate
from depthgrow_jax.model.decoding import Cache, Unrolled, decode, prefill, unroll
from depthgrow_jax.model.generation import Continuation, Sampling, check_sampling, generate
from depthgrow_jax.model.program import LayerProgram, layer_program, parse_order, reorder
from depthgrow_jax.model.rotary import rotation
from depthgrow_jax.model.transformer import (
    LayerTap,
    Output,
    Params,
    abstract_params,
    apply,
    depth_of,
    embed,
    init,
    init_layers,
    layer_step,
    num_params,
    run_layers,
    unembed,
)

__all__ = [
    "PRESETS",
    "Cache",
    "Continuation",
    "LayerProgram",
    "LayerTap",
    "ModelConfig",
    "Output",
    "Params",
    "Sampling",
    "Unrolled",
    "abstract_params",
    "apply",
    "check_sampling",
    "decode",
    "depth_of",
    "embed",
    "generate",
    "init",
    "init_layers",
    "layer_program",
    "layer_step",
    "num_params",
    "parse_order",
    "prefill",
    "preset",
    "reorder",
    "rotation",
    "run_layers",
    "unembed",
    "unroll",
    "validate",
]
