"""The plan's numbers are the published ones, and its rows add up."""

import itertools

import pytest

from depthgrow_jax.growth import GrowthConfig, flops_done, format_plan, make_plan, plan_stages
from depthgrow_jax.growth.cost import flops_per_token, layer_matmul_weights, param_bytes
from depthgrow_jax.model import ModelConfig, preset

PAPER = GrowthConfig(operator="lidas", block_size=4, schedule="prop", alpha=1.0, steps=170_000)


def paper_plan(name, tokens_per_step):
    depth, model = preset(name)
    stages = plan_stages(PAPER, depth, 200_000)
    batch = tokens_per_step // 2048
    return make_plan(
        model,
        stages,
        sequence_length=2048,
        batch_size=batch,
        microbatch_size=batch,
        state_bytes=lambda depth: 3 * param_bytes(model, depth),
    )


@pytest.mark.parametrize(
    ("name", "tokens_per_step", "static", "grown", "saving"),
    [
        ("smollm_1b7", 2**21, "4813222.102", "3736608.182", "22.4%"),
        ("smollm_360m", 2**20, "613527.488", "476147.897", "22.4%"),
    ],
)
def test_pflops_of_table_7_to_three_decimals(name, tokens_per_step, static, grown, saving):
    plan = paper_plan(name, tokens_per_step)
    assert f"{plan['static_flops'] / 1e15:.3f}" == static
    assert f"{plan['flops'] / 1e15:.3f}" == grown
    text = format_plan(plan)
    assert f"total {grown} PFLOPs" in text and f"{static} PFLOPs; saving {saving}" in text


def test_rows_say_what_each_stage_trains_and_copies():
    plan = paper_plan("smollm_1b7", 2**21)
    rows = plan["stages"]
    assert [(row["stage"], row["depth"]) for row in rows] == [(i, 4 * i) for i in range(1, 7)]
    assert [(row["first_step"], row["last_step"]) for row in rows] == [
        (1, 8095),
        (8096, 24285),
        (24286, 48570),
        (48571, 80950),
        (80951, 121426),
        (121427, 200000),
    ]
    assert rows[2]["source"] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]
    assert rows[2]["inserted"] == [6, 7, 8, 9]
    assert rows[0]["source"] is None and rows[0]["inserted"] == []
    assert rows[-1]["params"] == 1_711_376_384
    # A layer: 4 D^2 + 3 D F and two norms.
    per_layer = 4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048
    assert [after["params"] - before["params"] for before, after in itertools.pairwise(rows)] == (
        [4 * per_layer] * 5
    )
    assert rows[1]["tokens"] == (24285 - 8095) * 2**21
    assert sum(row["tokens"] for row in rows) == plan["tokens"] == 200_000 * 2**21
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert plan["compilations"] == 6
    assert "2-5 -> 6-9" in format_plan(plan) and "8,096" not in format_plan(plan)


def tiny_plan(stages=None, **changes):
    model = ModelConfig(vocab_size=64, width=32, heads=4, mlp_dim=48)
    cfg = GrowthConfig(operator="midas", block_size=2, schedule="explicit", boundaries=(3, 5))
    fields = {
        "sequence_length": 16,
        "batch_size": 8,
        "microbatch_size": 8,
        "state_bytes": lambda depth: depth,
    }
    return model, make_plan(model, stages or plan_stages(cfg, 6, 9), **(fields | changes))


def test_flops_done_follows_the_stages():
    model, plan = tiny_plan()
    per_token = {depth: flops_per_token(model, depth, 16) for depth in (2, 4, 6)}
    depth_of_step = [2, 2, 2, 4, 4, 6, 6, 6, 6]
    for step in range(10):
        assert flops_done(plan, step) == sum(8 * 16 * per_token[d] for d in depth_of_step[:step])
    assert flops_done(plan, 9) == plan["flops"] == flops_done(plan, 50)
    assert plan["static_flops"] == 9 * 8 * 16 * per_token[6]
    assert plan["saving"] == pytest.approx(1 - plan["flops"] / plan["static_flops"])


def test_growth_before_the_first_step_trains_no_first_stage():
    cfg = GrowthConfig(operator="midas", block_size=2, schedule="explicit", boundaries=(0, 5))
    model, plan = tiny_plan(stages=plan_stages(cfg, 6, 9))
    per_token = {depth: flops_per_token(model, depth, 16) for depth in (4, 6)}
    for step in range(10):
        assert flops_done(plan, step) == sum(
            8 * 16 * per_token[d] for d in [4] * min(step, 5) + [6] * (step - 5)
        )
    assert plan["compilations"] == 2 and plan["stages"][0]["tokens"] == 0
    assert "none" in format_plan(plan).splitlines()[1]


def test_flops_per_token_by_hand():
    """6 * (L * (2 D N H + 2 D K H + 3 D F + 2 S N H) + V D)."""
    model = ModelConfig(vocab_size=100, width=8, heads=2, kv_heads=1, head_dim=6, mlp_dim=10)
    assert layer_matmul_weights(model) == 2 * 8 * 12 + 2 * 8 * 6 + 3 * 8 * 10
    assert flops_per_token(model, 3, 5) == 6 * (3 * (192 + 96 + 240 + 2 * 5 * 12) + 800)


def test_peak_counts_the_event_where_two_states_coexist():
    """With a huge state the peak is the old and the new one; with a huge batch it is the activations."""
    _, heavy = tiny_plan(state_bytes=lambda depth: depth * 10**9)
    assert [row["peak_bytes"] for row in heavy["stages"][1:]] == [6 * 10**9, 10 * 10**9]
    _, plan = tiny_plan()
    _, half = tiny_plan(microbatch_size=4)
    for row, smaller in zip(plan["stages"], half["stages"], strict=True):
        assert smaller["peak_bytes"] < row["peak_bytes"]
        assert smaller["flops"] == row["flops"]
