"""The results of an evaluation as a table for the terminal."""

from typing import Any

# What a sweep or an exit is shown by, where a task has several metrics.
_FIRST = ("accuracy", "f1", "drop_f1", "exact")
_RIGHT_OR_WRONG = ("accuracy", "accuracy_norm", "exact")


def eval_table(results: dict[str, dict[str, Any]]) -> str:
    """Every metric of every task, with its 95% interval over items; then sweeps and exits, a line each.

    Shots are marked `(cut)` where some items did not fit into the context and lost their beginning.

    Args:
      results: task -> what its file holds.
    """
    rows = [("task", "items", "shots", "metric", "value", "95% interval", "stderr", "chance")]
    for task, result in results.items():
        for metric, value in result["metrics"].items():
            chance = result["chance"] if metric.startswith("accuracy") else None
            rows.append(
                (
                    task,
                    str(result["n"]),
                    f"{result['shots']}{' (cut)' if result['cut'] else ''}",
                    metric,
                    _shown(value["mean"]),
                    "-" if value["low"] is None else f"{_shown(value['low'])} - {_shown(value['high'])}",
                    _shown(value["stderr"], 2),
                    _shown(chance, 3),
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for task, result in results.items():
        for metric, value in result.get("paired", {}).items():
            test = "McNemar" if metric in _RIGHT_OR_WRONG else "sign test"
            lines.append(
                f"{task} {metric}, less that of {result['other']['run']}: {value['difference']:.4g}, 95% "
                f"{_shown(value['low'])} - {_shown(value['high'])}, {test} p = {value['p']:.2g}"
            )
        lines += _curves(task, result)
    return "\n".join(lines)


def _curves(task: str, result: dict[str, Any]) -> list[str]:
    metric = next((name for name in _FIRST if name in result["metrics"]), None)
    if metric is None:
        return []
    lines = []
    if metric.startswith("accuracy") and result["chance"] is not None:
        metric_of = f"{metric} (chance {_shown(result['chance'], 3)})"
    else:
        metric_of = metric
    for sweep in result["sweeps"]:
        what = f"{sweep['operation']} {sweep['run_length']}"
        lines.append(f"{task} {metric_of}, {what}, by start: {_means(sweep['results'], metric)}")
    if "exits" in result:
        means, lens = _means(result["exits"]["results"], metric), result["exits"]["lens"]
        lines.append(f"{task} {metric_of}, {lens} exit after 0, 1, ... layers: {means}")
    return ["", *lines] if lines else []


def _means(results: list[dict[str, Any]], metric: str) -> str:
    return " ".join(f"{result['metrics'][metric]['mean']:.2f}" for result in results)


def _shown(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
