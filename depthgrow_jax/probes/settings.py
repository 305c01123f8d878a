"""Conventions that all probes share: which tokens are intervened on, which count, and how they are pooled."""

import dataclasses
from typing import Any

import numpy as np

from depthgrow_jax.errors import UserError, require, require_choice
from depthgrow_jax.model import ModelConfig
from depthgrow_jax.probes.inputs import Prompts

POOLINGS = ("tokens", "examples")
HEADLINES = ("mean", "mean_of_max", "max")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `settings` of every probe decides.

    Attributes:
      protect: the first positions that no intervention touches. 0 intervenes everywhere; 1 is the
        references' `no_skip_front=1` (Csordas et al., arXiv 2505.13898).
      uncounted: the first positions that no statistic counts (an attention sink has norms of its own).
      pooling: means are over all `tokens`, or over `examples` of the mean inside each.
      headline: the statistic that tables show; scores say their own.
      batch_size: prompts a batch.
      lanes: interventions that run at once; each holds one batch of streams.
      chunk_bytes: size of one block of logits; comparing output distributions streams over such blocks.
    """

    protect: int = 0
    uncounted: int = 1
    pooling: str = "tokens"
    headline: str = "mean"
    batch_size: int = 8
    lanes: int = 1
    chunk_bytes: int = 8 << 20


def validate(settings: Settings) -> None:
    """Raises `UserError` naming the field."""
    for field, least in (
        ("protect", 0),
        ("uncounted", 0),
        ("batch_size", 1),
        ("lanes", 1),
        ("chunk_bytes", 1),
    ):
        value = getattr(settings, field)
        require(value >= least, f"probe.{field}", value, f"must be at least {least}")
    require_choice("probe.pooling", settings.pooling, POOLINGS)
    require_choice("probe.headline", settings.headline, HEADLINES)


def counted(settings: Settings, prompts: Prompts) -> Any:
    """bool `[P, T]`: the tokens that statistics of the streams count."""
    return prompts.valid & (np.arange(prompts.valid.shape[1]) >= settings.uncounted)[None]


def counted_outputs(settings: Settings, prompts: Prompts) -> Any:
    """bool `[P, T]`: the tokens that statistics of the outputs count, which need a target."""
    return counted(settings, prompts) & prompts.scored


def intervened(settings: Settings, prompts: Prompts) -> Any:
    """bool `[P, T]`: the tokens that interventions touch."""
    return prompts.valid & (np.arange(prompts.valid.shape[1]) >= settings.protect)[None]


def check_counted(settings: Settings, prompts: Prompts) -> None:
    """Raises `UserError` for a prompt of which nothing counts, or on which nothing is intervened.

    Its statistics would be those of no token, and enter means over prompts as if they were numbers.
    """
    cases = (
        ("uncounted", counted_outputs(settings, prompts), "that counts and has a target"),
        ("protect", intervened(settings, prompts), "that an intervention may touch"),
    )
    for field, tokens, what in cases:
        number = np.asarray(tokens).sum(axis=1)
        worst = int(number.argmin())
        if number[worst] == 0:
            raise UserError(
                f"prompts: prompt {worst + 1} of {prompts.lengths[worst]} tokens has none {what} with "
                f"probe.{field}={getattr(settings, field)}; lower it, or leave such prompts out"
            )


def pooling_weights(settings: Settings, counts: np.ndarray) -> np.ndarray | None:
    """`weights` for `result.quantity`: `[P]` token counts under `tokens`, None under `examples`."""
    return np.asarray(counts, np.float64) if settings.pooling == "tokens" else None


def conventions(settings: Settings, cfg: ModelConfig) -> dict[str, str]:
    """The words that every result carries; a probe adds its own (KL direction, splits, baselines)."""
    front = f"all but the first {settings.uncounted}" if settings.uncounted else "all"
    return {
        "counted tokens": f"{front}, never padding",
        "reduction": f"mean over {settings.pooling}; headline {settings.headline}",
        "dtype": f"{cfg.dtype} compute, float32 statistics",
        "weights": "raw, no norm folded",
    }
