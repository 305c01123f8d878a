"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), the half-split form of Llama."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from depthgrow_jax.model.config import ModelConfig


def inverse_frequencies(cfg: ModelConfig) -> np.ndarray:
    """Angular frequencies `[H/2]` in radians per position, after the config's scaling.

    `linear` divides every frequency by `rope_factor`. `llama3` divides the ones whose wavelength
    exceeds `rope_original_length / rope_low_freq_factor`, keeps the ones below
    `rope_original_length / rope_high_freq_factor`, and interpolates between (Llama 3.1).
    """
    half = cfg.head_width // 2
    frequency = cfg.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    if cfg.rope_scaling == "linear":
        frequency = frequency / cfg.rope_factor
    if cfg.rope_scaling == "llama3":
        low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
        turns = cfg.rope_original_length * frequency / (2 * np.pi)
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = keep * frequency + (1 - keep) * frequency / cfg.rope_factor
    return frequency.astype(np.float32)


def rotation(
    cfg: ModelConfig, positions: Int[Array, "*batch T"]
) -> tuple[Float[Array, "*batch T 1 half"], Float[Array, "*batch T 1 half"]]:
    """Cosines and sines, float32, that turn the pairs of a head at each position."""
    frequency = inverse_frequencies(cfg).reshape((1,) * (positions.ndim + 1) + (-1,))
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "B T heads H"], cos: jax.Array, sin: jax.Array) -> Float[Array, "B T heads H"]:
    """Turns the pair (x[i], x[i + H/2]) by its angle, in float32; returns the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
