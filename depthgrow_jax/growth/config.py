"""How a run grows: which layers are copied, when, and what becomes of their state."""

import dataclasses

from depthgrow_jax.errors import UserError, require, require_choice
from depthgrow_jax.growth.source import OPERATORS
from depthgrow_jax.model import ModelConfig

LAYER_INITS = ("copy", "identity", "random")
OPTIMIZER_STATES = ("copy", "zero", "reset")
SCHEDULES = ("prop", "equal", "explicit")
GATES = ("none", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class GrowthConfig:
    """Growth as independent choices; every combination is legal unless `validate` says why not.

    Attributes:
      operator: source map of an event: `none` (static), `midas`, `lidas`, `last`, `stack`,
        `interleave`, `explicit`.
      block_size: b, layers added by an event (`stack` multiplies the depth instead).
      start_depth: depth of the first stage; 0 means `block_size`, and for `explicit` 1 + the largest
        index of the first source map.
      stack_factor: how many times `stack` repeats the whole stack at an event.
      sources: `explicit`: one source map for each event, a tuple of tuples.
      init: parameters of the inserted layers: `copy` (the papers), `identity` (a copy whose last
        linear maps are zero: the event leaves the function unchanged, except that old layers whose
        position or depth has changed get the `pre_lns` or `depth` factors of the new one), `random` (fresh).
      optimizer: optimizer state of the inserted layers: `copy` (the papers), `zero` (as freshly initialised,
        moments and count zero; the rest kept), `reset` (everything as freshly initialised).
      schedule: lengths of the stages: `prop` (proportional to i**alpha, i counted from 1), `equal`
        (alpha 0), `explicit` (`boundaries`).
      alpha: exponent of `prop`.
      steps: T, the steps shared out by the schedule; 0 means all of the run. The last stage also gets
        what follows T.
      boundaries: `explicit`: the number of steps done when each event happens; the first may be 0, to grow
        what `init_from` gives before it is trained.
      gate: ramp of the inserted layers' contribution after their event (`midas_plus`): `none`,
        `linear` or `cosine`.
      gate_start: value of the gate at the event.
      gate_steps: steps until the gate is 1.
      rewarmup_steps: steps of linear learning-rate warm-up after every event; 0 for none (the papers).
    """

    operator: str = "none"
    block_size: int = 4
    start_depth: int = 0
    stack_factor: int = 2
    sources: tuple[tuple[int, ...], ...] = ()
    init: str = "copy"
    optimizer: str = "copy"
    schedule: str = "prop"
    alpha: float = 1.0
    steps: int = 0
    boundaries: tuple[int, ...] = ()
    gate: str = "none"
    gate_start: float = 0.0
    gate_steps: int = 0
    rewarmup_steps: int = 0


def validate(cfg: GrowthConfig, model: ModelConfig) -> None:
    """Refuses an impossible choice. Raises `UserError` naming the field.

    Whether the depth can be reached and every stage has steps is `plan_stages`' to say.
    """
    for field, choices in (
        ("operator", ("none", *OPERATORS)),
        ("init", LAYER_INITS),
        ("optimizer", OPTIMIZER_STATES),
        ("schedule", SCHEDULES),
        ("gate", GATES),
    ):
        require_choice(f"growth.{field}", getattr(cfg, field), choices)
    require(cfg.block_size >= 1, "growth.block_size", cfg.block_size, "must be at least 1")
    require(cfg.stack_factor >= 2, "growth.stack_factor", cfg.stack_factor, "must be at least 2")
    for field in ("start_depth", "steps", "gate_steps", "rewarmup_steps"):
        require(getattr(cfg, field) >= 0, f"growth.{field}", getattr(cfg, field), "must be 0 or more")
    require(
        cfg.gate == "none" or cfg.gate_steps >= 1,
        "growth.gate_steps",
        cfg.gate_steps,
        f"gate={cfg.gate} needs at least 1 step",
    )
    require(0 <= cfg.gate_start <= 1, "growth.gate_start", cfg.gate_start, "must lie in [0, 1]")
    require(
        cfg.schedule == "explicit" or not cfg.boundaries,
        "growth.boundaries",
        cfg.boundaries,
        f"only growth.schedule='explicit' reads them, not {cfg.schedule!r}",
    )
    require(
        cfg.operator in ("explicit", "none") or not cfg.sources,
        "growth.sources",
        cfg.sources,
        f"only growth.operator='explicit' reads them, not {cfg.operator!r}",
    )
    impossible = cfg.operator != "none" and cfg.init == "identity"
    impossible = impossible and model.norm_placement == "post" and model.residual_scaling != "learned"
    if impossible:
        raise UserError(
            "growth.init='identity': not possible with model.norm_placement='post', whose norm changes the "
            "stream even when the sub-layer adds nothing; legal: copy, random, identity with "
            "model.residual_scaling='learned', or growth.gate with gate_start=0"
        )
