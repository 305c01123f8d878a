"""Growing depth: source maps, stages, growing a train state, lineage, and what a stage costs."""

from depthgrow_jax.growth.config import GrowthConfig, validate
from depthgrow_jax.growth.gate import gate_at
from depthgrow_jax.growth.grow import check_like, grow, grow_params, initial_lineage, take_layers
from depthgrow_jax.growth.plan import flops_done, format_plan, make_plan
from depthgrow_jax.growth.schedule import Stage, plan_stages, stage_at
from depthgrow_jax.growth.source import SourceMap

__all__ = [
    "GrowthConfig",
    "SourceMap",
    "Stage",
    "check_like",
    "flops_done",
    "format_plan",
    "gate_at",
    "grow",
    "grow_params",
    "initial_lineage",
    "make_plan",
    "plan_stages",
    "stage_at",
    "take_layers",
    "validate",
]
