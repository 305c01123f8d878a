"""The learning rate as a function of the step alone: growth and resume cannot disturb it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from depthgrow_jax.train.config import OptimizerConfig


def learning_rate(
    cfg: OptimizerConfig,
    step: Int[Array, ""],
    total_steps: int,
    *,
    events: tuple[int, ...] = (),
    rewarmup_steps: int = 0,
) -> Float[Array, ""]:
    """Learning rate of the update that follows `step` finished steps.

    Warm-up gives peak * (step + 1) / warmup_steps. Then `wsd` stays at the peak until the last
    `decay_steps`, where it falls by 1 - sqrt(u), u the fraction of the decay that is over (Hägele et al.
    2024, arXiv 2405.18392); `cosine` and `linear` fall from the end of the warm-up to the end of the run.

    Args:
      events: steps done at each growth event; after the latest, the rate is multiplied by
        min(1, (step - event + 1) / rewarmup_steps) when `rewarmup_steps` is not 0.
    """
    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum(1.0, (step + 1) / max(cfg.warmup_steps, 1))
    length = cfg.decay_steps if cfg.schedule == "wsd" else total_steps - cfg.warmup_steps
    over = jnp.clip((step - (total_steps - length)) / max(length, 1), 0.0, 1.0)
    shape = {
        "wsd": 1 - jnp.sqrt(over),
        "cosine": 0.5 * (1 + jnp.cos(jnp.pi * over)),
        "linear": 1 - over,
        "constant": jnp.ones(()),
    }[cfg.schedule]
    fraction = cfg.final_fraction + (1 - cfg.final_fraction) * shape
    if cfg.schedule == "constant":
        fraction = shape
    if rewarmup_steps:
        since = [jnp.where(step >= event, (step - event + 1) / rewarmup_steps, jnp.inf) for event in events]
        fraction = fraction * jnp.minimum(1.0, jnp.min(jnp.stack([*since, jnp.asarray(jnp.inf)])))
    return cfg.learning_rate * warmup * fraction
