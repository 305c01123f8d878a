"""The plan of a run: what each stage trains, copies and costs, known before anything is paid."""

from collections.abc import Callable
from typing import Any

from depthgrow_jax.growth.cost import activation_bytes, flops_per_token, param_bytes
from depthgrow_jax.growth.schedule import Stage
from depthgrow_jax.model import ModelConfig, abstract_params, num_params


def make_plan(
    model: ModelConfig,
    stages: tuple[Stage, ...],
    *,
    sequence_length: int,
    batch_size: int,
    microbatch_size: int,
    state_bytes: Callable[[int], int],
) -> dict[str, Any]:
    """A JSON-ready plan.

    Args:
      batch_size: sequences in one optimizer step.
      microbatch_size: sequences in memory at once (all devices together).
      state_bytes: depth -> bytes of the whole train state.

    Returns:
      `stages`: a list of dicts (depth, first_step, last_step counted from 1, tokens, params, flops, share of
      the total, source, inserted layers, peak_bytes); `flops`, `static_flops` (the final depth for all
      steps), `saving` (1 - flops / static_flops), `compilations` (distinct depths).
    """
    tokens_per_step = batch_size * sequence_length
    rows, previous = [], None
    for index, stage in enumerate(stages):
        tokens = stage.steps * tokens_per_step
        peak = state_bytes(stage.depth) + param_bytes(model, stage.depth)
        peak += activation_bytes(model, stage.depth, microbatch_size, sequence_length)
        # At the event both states exist, the old one until the new one is made.
        growing = state_bytes(stage.depth) + (state_bytes(previous.depth) if previous else 0)
        rows.append(
            {
                "stage": index + 1,
                "depth": stage.depth,
                "first_step": stage.first + 1,
                "last_step": stage.stop,
                "tokens": tokens,
                "params": num_params(abstract_params(model, stage.depth)),
                "flops": tokens * flops_per_token(model, stage.depth, sequence_length),
                "source": list(stage.event.source) if stage.event else None,
                "inserted": [i for i, new in enumerate(stage.event.new) if new] if stage.event else [],
                "peak_bytes": max(peak, growing),
            }
        )
        previous = stage
    flops = sum(row["flops"] for row in rows)
    for row in rows:
        row["share"] = row["flops"] / flops
    final = flops_per_token(model, stages[-1].depth, sequence_length)
    static = stages[-1].stop * tokens_per_step * final
    return {
        "stages": rows,
        "tokens": stages[-1].stop * tokens_per_step,
        "flops": flops,
        "static_flops": static,
        "saving": 1 - flops / static,
        "compilations": len({stage.depth for stage in stages if stage.steps}),
    }


def flops_done(plan: dict[str, Any], step: int) -> int:
    """Training FLOPs of the first `step` steps of a plan."""
    done = 0
    for row in plan["stages"]:
        length = row["last_step"] - row["first_step"] + 1
        if length:  # growth before the first step leaves its stage empty
            done += row["flops"] * min(max(step - row["first_step"] + 1, 0), length) // length
    return done


def _runs(layers: list[int]) -> str:
    """`[4, 5, 6, 9]` as `4-6 9`."""
    groups: list[list[int]] = []
    for layer in layers:
        if groups and layer == groups[-1][-1] + 1:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return " ".join(str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups)


def scaled(value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest unit of which `value` holds at least one, as (size, name); the last one otherwise."""
    return next((unit for unit in units if value >= unit[0]), units[-1])


FLOP_UNITS = ((1e15, "PFLOPs"), (1e12, "TFLOPs"), (1e9, "GFLOPs"))
BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"))


def format_plan(plan: dict[str, Any]) -> str:
    """The plan as a table for the terminal."""
    unit, flops_name = scaled(plan["static_flops"], FLOP_UNITS)
    columns = (
        "stage",
        "depth",
        "steps",
        "tokens",
        "copied -> lands at",
        "params",
        flops_name,
        "share",
        "peak",
    )
    table: list[tuple[str, ...]] = [columns]
    for row in plan["stages"]:
        size, bytes_name = scaled(row["peak_bytes"], BYTE_UNITS)
        copied = [row["source"][i] for i in row["inserted"]] if row["source"] else []
        table.append(
            (
                str(row["stage"]),
                str(row["depth"]),
                f"{row['first_step']}-{row['last_step']}" if row["tokens"] else "none",
                f"{row['tokens']:,}",
                f"{_runs(copied)} -> {_runs(row['inserted'])}" if copied else "-",
                f"{row['params']:,}",
                f"{row['flops'] / unit:.3f}",
                f"{row['share']:.1%}",
                f"{row['peak_bytes'] / size:.1f} {bytes_name}",
            )
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    lines += [
        f"total {plan['flops'] / unit:.3f} {flops_name} over {plan['tokens']:,} tokens; "
        f"static at the final depth {plan['static_flops'] / unit:.3f} {flops_name}; "
        f"saving {plan['saving']:.1%} "
        f"({plan['static_flops'] / plan['flops']:.3f}x)",
        f"{plan['compilations']} compilations of the train step; "
        "peak is an estimate for one device that holds everything",
    ]
    return "\n".join(lines)
