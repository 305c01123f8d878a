"""The residual gate of newly inserted layers (`midas_plus`): data of the forward pass, not a parameter."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from depthgrow_jax.growth.config import GrowthConfig


def gate_at(cfg: GrowthConfig, step: Int[Array, ""], born: Int[Array, " L"]) -> Float[Array, " L"] | None:
    """Factor on what each layer adds to the stream at `step`; None when the config has no gate.

    `born[i]` is the number of steps done when layer i was inserted, negative for original layers:

        alpha(t) = gate_start + (1 - gate_start) * ramp(min(1, (t - born) / gate_steps))

    with ramp(u) = u (`linear`) or (1 - cos(pi u)) / 2 (`cosine`); original layers stay at 1.
    """
    if cfg.gate == "none":
        return None
    progress = jnp.clip((step - born).astype(jnp.float32) / cfg.gate_steps, 0.0, 1.0)
    ramp = progress if cfg.gate == "linear" else (1 - jnp.cos(jnp.pi * progress)) / 2
    return jnp.where(born < 0, 1.0, cfg.gate_start + (1 - cfg.gate_start) * ramp)
