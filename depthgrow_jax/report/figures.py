"""Figures of training, drawn from `metrics.jsonl`."""

import pathlib
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

matplotlib.use("Agg")

# Okabe and Ito's colours: told apart by readers with any colour vision, and in grey by the markers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
X_LABELS = {"flops": "training FLOPs", "step": "step", "tokens": "tokens"}


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Trailing mean over up to `window` values."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) + 1 - window, 0)
    return (sums[1:] - sums[low]) / (np.arange(len(values)) + 1 - low)


def loss_figure(curves: dict[str, list[list[dict[str, Any]]]], path: pathlib.Path, *, x: str) -> None:
    """Training loss (thin, smoothed) and validation loss (marked) of every arm against `x`.

    Args:
      curves: arm -> one list of `metrics.jsonl` records for each seed.
      path: the PNG to write.
      x: `flops`, `step` or `tokens`.

    The line is the mean over seeds, the band their range. Growth events are short ticks on the curve.
    """
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lows, highs = [], []
    for number, (arm, seeds) in enumerate(curves.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        seeds = [[line for line in seed if "loss" in line] or None for seed in seeds]
        lengths = [len(seed) for seed in seeds if seed]
        if not lengths:
            continue
        length = min(lengths)
        lines = [seed[:length] for seed in seeds if seed]
        at = np.array([line[x] for line in lines[0]], float)
        losses = np.array(
            [_smooth(np.array([line["loss"] for line in seed]), max(1, length // 40)) for seed in lines]
        )
        mean = losses.mean(axis=0)
        axes.plot(at, mean, color=colour, linewidth=1.2, alpha=0.75)
        if len(losses) > 1:
            axes.fill_between(
                at, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
        depths = np.array([line["depth"] for line in lines[0]])
        events = np.flatnonzero(np.diff(depths)) + 1
        axes.plot(at[events], mean[events], linestyle="", marker="|", markersize=11, color=colour)

        evaluated = [[line for line in seed if "val_loss" in line] for seed in curves[arm]]
        shared = min(len(seed) for seed in evaluated)
        if shared:
            steps = [line["step"] for line in evaluated[0][:shared]]
            where = np.interp(steps, [line["step"] for line in lines[0]], at)
            values = np.mean([[line["val_loss"] for line in seed[:shared]] for seed in evaluated], axis=0)
            label = f"{arm} (val {values[-1]:.3f})"
            axes.plot(where, values, color=colour, marker=marker, markersize=4.5, linewidth=1.6, label=label)
            lows.append(values.min())
        else:
            axes.plot([], [], color=colour, label=arm)
        lows.append(mean.min())
        highs.append(np.quantile(mean, 0.93))
    axes.set_xlabel(X_LABELS[x])
    axes.set_ylabel("cross-entropy (nats a target)")
    if lows:
        axes.set_ylim(min(lows) - 0.1, max(highs) + 0.2)
        axes.legend(
            frameon=False, title="line: training, markers: validation, ticks: growth", title_fontsize=8
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(path)
