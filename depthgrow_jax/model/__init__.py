"""What a network is: one layer, stacked; run by a `LayerProgram`; one forward pass for everything."""

from depthgrow_jax.model.config import PRESETS, ModelConfig, preset, validate
from depthgrow_jax.model.program import LayerProgram, layer_program, reorder
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
    "LayerProgram",
    "LayerTap",
    "ModelConfig",
    "Output",
    "Params",
    "abstract_params",
    "apply",
    "depth_of",
    "embed",
    "init",
    "init_layers",
    "layer_program",
    "layer_step",
    "num_params",
    "preset",
    "reorder",
    "rotation",
    "run_layers",
    "unembed",
    "validate",
]
