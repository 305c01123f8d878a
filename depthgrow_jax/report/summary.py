"""One page about an experiment: a table of its arms and two figures, from result files alone."""

import math
import pathlib
import statistics
from typing import Any

from depthgrow_jax.growth.plan import FLOP_UNITS, scaled
from depthgrow_jax.report.figures import loss_figure
from depthgrow_jax.rundir import read_metrics, write_json


def _spread(values: list[float], digits: int = 4) -> str:
    """`mean ± sample standard deviation` over seeds; the mean alone for one seed."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One record an arm, over its finished seeds.

    `saved_flops` and `saved_seconds` are fractions of the first arm's without growth (the static baseline),
    stepping seconds only; None without such an arm.
    """
    arms: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if "diverged" not in result:
            arms.setdefault(result["arm"], []).append(result)
    baseline = next((runs for runs in arms.values() if runs[0]["operator"] == "none"), None)

    def mean(runs, pick):
        return statistics.fmean(pick(run) for run in runs)

    rows = []
    for arm, runs in arms.items():
        row = {
            "arm": arm,
            "operator": runs[0]["operator"],
            "seeds": [run["seed"] for run in runs],
            "steps": runs[0]["steps"],
            "depth": runs[0]["depth"],
            "params": runs[0]["params"],
            "tokens": runs[0]["tokens"],
            "flops": runs[0]["flops"],
            "seconds": {kind: mean(runs, lambda r, k=kind: r["seconds"][k]) for kind in runs[0]["seconds"]},
            "train_loss": [run["train_loss"] for run in runs],
            "val_loss": [run["val_loss"] for run in runs],
            "val_interval": [[run["val_loss_low"], run["val_loss_high"]] for run in runs],
            "saved_flops": None,
            "saved_seconds": None,
        }
        if baseline and runs is not baseline:
            row["saved_flops"] = 1 - row["flops"] / baseline[0]["flops"]
            row["saved_seconds"] = 1 - row["seconds"]["step"] / mean(baseline, lambda r: r["seconds"]["step"])
        rows.append(row)
    return rows


def _markdown(rows: list[dict[str, Any]], results: list[dict[str, Any]]) -> str:
    unit, flops_name = scaled(max((row["flops"] for row in rows), default=0), FLOP_UNITS)
    head = (
        "arm",
        "depth",
        "steps",
        "tokens",
        flops_name,
        "compile s",
        "step s",
        "FLOPs saved",
        "step s saved",
        "train loss",
        "val loss",
        "95% interval",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        interval = row["val_interval"][0]
        single = len(row["seeds"]) == 1 and not math.isnan(interval[0])
        cells = (
            row["arm"],
            str(row["depth"]),
            f"{row['steps']:,}",
            f"{row['tokens']:,}",
            f"{row['flops'] / unit:.3f}",
            f"{row['seconds']['compile']:.1f}",
            f"{row['seconds']['step']:.1f}",
            "-" if row["saved_flops"] is None else f"{row['saved_flops']:.1%}",
            "-" if row["saved_seconds"] is None else f"{row['saved_seconds']:.1%}",
            _spread(row["train_loss"]),
            _spread(row["val_loss"]),
            f"{interval[0]:.4f} - {interval[1]:.4f}" if single else "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    notes = [
        "",
        "Losses are cross-entropy in nats a target: `train` the mean over the last twentieth of the steps, "
        "`val` on held-out documents at the last step. ± is the sample standard deviation over seeds; the "
        "interval is a 95% bootstrap over validation sequences (one seed). FLOPs are analytic "
        "(docs/method.md). Seconds are means over seeds; evaluation, growth and saving are counted apart, in "
        "summary.json.",
    ]
    notes += [f"- {r['directory']} diverged: {r['diverged']}" for r in results if "diverged" in r]
    return "\n".join(lines + notes) + "\n"


def write_summary(root: pathlib.Path, results: list[dict[str, Any]]) -> str:
    """Writes `summary.json`, `summary.md`, `loss_vs_flops.png` and `loss_vs_steps.png` below `root`.

    Args:
      results: one dict a run: `arm`, `seed`, `directory`, `operator`, and what its `DONE` mark holds, or
        `diverged`.

    Returns:
      The text of `summary.md`.
    """
    rows = summarise(results)
    write_json(root / "summary.json", {"arms": rows, "runs": results})
    text = _markdown(rows, results)
    (root / "summary.md").write_text(text)
    curves: dict[str, list[list[dict[str, Any]]]] = {}
    for result in results:
        curves.setdefault(result["arm"], []).append(read_metrics(root / result["directory"]))
    loss_figure(curves, root / "loss_vs_flops.png", x="flops")
    loss_figure(curves, root / "loss_vs_steps.png", x="step")
    return text
