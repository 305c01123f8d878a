"""Stages: at which depth each step of a run is trained."""

import itertools
import math
from typing import NamedTuple

from depthgrow_jax.errors import UserError, require
from depthgrow_jax.growth.config import GrowthConfig
from depthgrow_jax.growth.source import SourceMap, block_events, explicit_events, stack_events


class Stage(NamedTuple):
    """Steps `first..stop-1` (counted from 0) at one depth; `event` opened it (None for the first)."""

    depth: int
    first: int
    stop: int
    event: SourceMap | None

    @property
    def steps(self) -> int:
        """Number of steps in the stage."""
        return self.stop - self.first


def growth_events(cfg: GrowthConfig, depth: int) -> tuple[int, list[SourceMap]]:
    """Start depth, and the source maps that lead from it to `depth`.

    Raises `UserError` if `depth` cannot be reached; the message lists the legal depths.
    """
    require(depth >= 1, "depth", depth, "must be at least 1")
    if cfg.operator == "none":
        return depth, []
    if cfg.operator == "explicit":
        if not cfg.sources:
            raise UserError("growth.sources=(): operator explicit needs one source map for each event")
        start = cfg.start_depth or 1 + max(cfg.sources[0], default=0)
        return start, explicit_events(cfg.sources, start, depth)
    start = cfg.start_depth or cfg.block_size
    if cfg.operator == "stack":
        return start, stack_events(start, depth, cfg.stack_factor)
    return start, block_events(cfg.operator, start, depth, cfg.block_size)


def stage_lengths(cfg: GrowthConfig, stages: int, total_steps: int) -> list[int]:
    """Steps of each stage.

    PROP-alpha (MIDAS; Kapl et al. 2025, section 3.1): stage i of k gets floor(T * i**alpha / sum_j j**alpha)
    of the T scheduled steps, the last stage the rest of the run. The floor, not the largest remainder
    that the text names, reproduces the published FLOPs to the third decimal.
    """
    if cfg.schedule == "explicit":
        marks = (0, *cfg.boundaries, total_steps)
        return [after - before for before, after in itertools.pairwise(marks)]
    scheduled = cfg.steps or total_steps
    alpha = cfg.alpha if cfg.schedule == "prop" else 0.0
    weights = [float(i) ** alpha for i in range(1, stages + 1)]
    lengths = [math.floor(scheduled * w / sum(weights)) for w in weights[:-1]]
    return [*lengths, total_steps - sum(lengths)]


def plan_stages(cfg: GrowthConfig, depth: int, total_steps: int) -> tuple[Stage, ...]:
    """The stages of a run of `total_steps` steps that ends at `depth`.

    Raises `UserError` for an unreachable depth, a schedule that leaves a stage without steps, or
    explicit boundaries that do not fit the events.
    """
    require(total_steps >= 1, "train.steps", total_steps, "must be at least 1")
    start, events = growth_events(cfg, depth)
    if events:
        require(
            cfg.steps <= total_steps, "growth.steps", cfg.steps, f"must not exceed train.steps={total_steps}"
        )
        if cfg.schedule == "prop":
            # Beyond that the first stages have no steps, and i**alpha leaves the floats.
            require(0 <= cfg.alpha <= 100, "growth.alpha", cfg.alpha, "must lie in [0, 100]")
        if cfg.schedule == "explicit":
            require(
                len(cfg.boundaries) == len(events),
                "growth.boundaries",
                cfg.boundaries,
                f"must name {len(events)} steps, one for each growth event",
            )
        lengths = stage_lengths(cfg, len(events) + 1, total_steps)
    else:
        lengths = [total_steps]
    depths = [start, *(event.depth for event in events)]
    # Growth before the first step has to be asked for: it trains no first stage.
    least = [int(cfg.schedule != "explicit" or i > 0) for i in range(len(lengths))]
    short = next((i for i, length in enumerate(lengths) if length < least[i]), None)
    if short is not None:
        field = "growth.boundaries" if cfg.schedule == "explicit" else "growth.steps"
        value = cfg.boundaries if cfg.schedule == "explicit" else cfg.steps
        raise UserError(
            f"{field}={value!r}: stage {short + 1} of {len(lengths)} (depth {depths[short]}) gets "
            f"{lengths[short]} steps of train.steps={total_steps}; every stage needs at least {least[short]}"
        )
    firsts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        Stage(depth, first, first + length, event)
        for depth, first, length, event in zip(depths, firsts, lengths, [None, *events], strict=True)
    )


def stage_at(stages: tuple[Stage, ...], step: int) -> int:
    """Index of the stage that trains step `step` (after the last step: the last stage)."""
    return max(i for i, stage in enumerate(stages) if stage.first <= min(step, stages[-1].stop - 1))
