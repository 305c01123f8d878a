"""Stages begin where the papers say and fill the run; an impossible schedule is refused with a reason."""

import dataclasses
import math

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import GrowthConfig, plan_stages, stage_at, validate
from depthgrow_jax.model import ModelConfig

PAPER = {"operator": "lidas", "block_size": 4, "schedule": "prop", "alpha": 1.0, "steps": 170_000}


def fails(cfg, depth, steps) -> str:
    with pytest.raises(UserError) as caught:
        plan_stages(cfg, depth, steps)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("depth", "growth_after"),
    [
        (24, [8095, 24285, 48570, 80950, 121426]),
        (32, [4722, 14166, 28332, 47220, 70831, 99164, 132219]),
    ],
    ids=["1.7B", "360M"],
)
def test_prop_1_grows_after_the_published_steps(depth, growth_after):
    stages = plan_stages(GrowthConfig(**PAPER), depth, 200_000)
    assert [stage.first for stage in stages] == [0, *growth_after]
    assert [stage.stop for stage in stages] == [*growth_after, 200_000]
    assert [stage.depth for stage in stages] == list(range(4, depth + 1, 4))


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        # T i^a / sum_j j^a by hand; what the floors leave over goes to the last stage.
        ({"alpha": 1.0}, [10, 20, 30]),
        ({"alpha": 2.0}, [4, 17, 39]),
        ({"alpha": 0.0}, [20, 20, 20]),
        ({"alpha": 0.5}, [14, 20, 26]),
        ({"schedule": "equal", "alpha": 7.0}, [20, 20, 20]),
        ({"schedule": "equal", "steps": 40}, [13, 13, 34]),
        ({"alpha": 1.0, "steps": 12}, [2, 4, 54]),
        ({"schedule": "explicit", "boundaries": (1, 59)}, [1, 58, 1]),
        ({"schedule": "explicit", "boundaries": (25, 26)}, [25, 1, 34]),
        ({"schedule": "explicit", "boundaries": (0, 26)}, [0, 26, 34]),
    ],
)
def test_lengths_of_three_stages_of_sixty_steps(changes, lengths):
    stages = plan_stages(GrowthConfig(operator="midas", block_size=2, **changes), 6, 60)
    assert [stage.steps for stage in stages] == lengths
    assert [stage.first for stage in stages] == [0, lengths[0], lengths[0] + lengths[1]]


def test_a_static_run_is_one_stage():
    (stage,) = plan_stages(GrowthConfig(operator="none", boundaries=(3,), steps=5), 7, 10)
    assert (stage.depth, stage.first, stage.stop, stage.event) == (7, 0, 10, None)
    (stage,) = plan_stages(GrowthConfig(operator="midas", block_size=4), 4, 10)
    assert (stage.depth, stage.steps, stage.event) == (4, 10, None)


def test_stage_at_every_boundary():
    cfg = GrowthConfig(operator="midas", block_size=2, schedule="explicit", boundaries=(3, 5))
    stages = plan_stages(cfg, 6, 9)
    assert [stage_at(stages, step) for step in range(9)] == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    at_once = plan_stages(dataclasses.replace(cfg, boundaries=(0, 5)), 6, 9)
    assert [stage_at(at_once, step) for step in range(6)] == [1, 1, 1, 1, 1, 2]
    # A run that is over is in its last stage.
    assert stage_at(stages, 9) == stage_at(stages, 1000) == 2


@pytest.mark.parametrize(
    ("changes", "depth", "legal"),
    [
        ({"operator": "lidas", "block_size": 4}, 10, "legal depths: 4, 8, 12, 16, 20, 24, 28, 32"),
        ({"operator": "midas", "block_size": 4, "start_depth": 8}, 4, "legal depths: 8, 12, 16"),
        ({"operator": "last", "block_size": 3, "start_depth": 6}, 25, "legal depths: 15, 18, 21, 24, 27, 30"),
        ({"operator": "interleave", "block_size": 5}, 49, "40, 45, 50, 55"),
        ({"operator": "stack", "start_depth": 3}, 20, "legal depths: 3, 6, 12, 24, ..."),
        ({"operator": "stack", "start_depth": 3, "stack_factor": 3}, 26, "legal depths: 3, 9, 27, ..."),
    ],
)
def test_an_unreachable_depth_lists_the_legal_ones(changes, depth, legal):
    message = fails(GrowthConfig(**changes), depth, 1000)
    assert message.startswith(f"depth={depth}: ") and legal in message


def test_a_start_that_is_not_whole_blocks_is_refused():
    message = fails(GrowthConfig(operator="midas", block_size=4, start_depth=6), 14, 100)
    assert message.startswith("growth.start_depth=6: must be a multiple of growth.block_size=4")


def test_a_stage_without_steps_is_refused_instead_of_dropped():
    """PROP-1 gives stage 1 of 6 one step in 21: 20 steps floor to none, 21 are enough."""
    cfg = GrowthConfig(operator="midas", block_size=4)
    assert fails(cfg, 24, 20) == (
        "growth.steps=0: stage 1 of 6 (depth 4) gets 0 steps of train.steps=20; every stage needs at least 1"
    )
    assert [stage.steps for stage in plan_stages(cfg, 24, 21)] == [1, 2, 3, 4, 5, 6]
    short = GrowthConfig(operator="midas", block_size=4, steps=20)
    assert fails(short, 24, 100).startswith("growth.steps=20: stage 1 of 6 (depth 4) gets 0 steps")


@pytest.mark.parametrize(
    ("boundaries", "expected"),
    [
        ((5,), "growth.boundaries=(5,): must name 2 steps, one for each growth event"),
        ((2, 5, 7), "growth.boundaries=(2, 5, 7): must name 2 steps"),
        ((0, 0), "growth.boundaries=(0, 0): stage 2 of 3 (depth 4) gets 0 steps"),
        ((5, 5), "growth.boundaries=(5, 5): stage 2 of 3 (depth 4) gets 0 steps"),
        ((6, 5), "growth.boundaries=(6, 5): stage 2 of 3 (depth 4) gets -1 steps"),
        ((5, 10), "growth.boundaries=(5, 10): stage 3 of 3 (depth 6) gets 0 steps of train.steps=10"),
        ((5, 99), "growth.boundaries=(5, 99): stage 3 of 3 (depth 6) gets -89 steps"),
        ((-1, 5), "growth.boundaries=(-1, 5): stage 1 of 3 (depth 2) gets -1 steps"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(boundaries, expected):
    cfg = GrowthConfig(operator="midas", block_size=2, schedule="explicit", boundaries=boundaries)
    assert fails(cfg, 6, 10).startswith(expected)


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf, 1e4])
def test_an_alpha_without_a_schedule_is_refused(alpha):
    assert fails(GrowthConfig(operator="midas", block_size=2, alpha=alpha), 6, 100).startswith(
        f"growth.alpha={alpha!r}: must lie in [0, 100]"
    )


def test_more_scheduled_steps_than_the_run_has_are_refused():
    cfg = GrowthConfig(operator="midas", block_size=2, steps=101)
    assert fails(cfg, 4, 100) == "growth.steps=101: must not exceed train.steps=100"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"operator": "double"}, "growth.operator='double': must be one of none, midas, lidas, last, "),
        ({"init": "noise"}, "growth.init='noise': must be one of copy, identity, random"),
        ({"optimizer": "keep"}, "growth.optimizer='keep': must be one of copy, zero, reset"),
        ({"schedule": "plateaux"}, "growth.schedule='plateaux': must be one of"),
        ({"gate": "sine"}, "growth.gate='sine': must be one of none, linear, cosine"),
        ({"gate": "linear"}, "growth.gate_steps=0: gate=linear needs at least 1 step"),
        ({"gate_start": 1.5}, "growth.gate_start=1.5: must lie in [0, 1]"),
        ({"gate_start": math.nan}, "growth.gate_start=nan"),
        ({"block_size": 0}, "growth.block_size=0: must be at least 1"),
        ({"stack_factor": 1}, "growth.stack_factor=1: must be at least 2"),
        ({"start_depth": -4}, "growth.start_depth=-4: must be 0 or more"),
    ],
)
def test_bad_growth_field_is_named(changes, expected):
    with pytest.raises(UserError) as caught:
        validate(GrowthConfig(**changes), ModelConfig())
    assert str(caught.value).startswith(expected)
