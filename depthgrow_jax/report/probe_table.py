"""What probes found, for the terminal: a row a layer, then every scalar and score with its interval."""

import math
from typing import Any

import numpy as np

from depthgrow_jax.probes.result import Quantity, Result, Score

# (probe, quantity, heading). What is measured at points of the stream stands beside the layer that made it.
_COLUMNS = (
    ("ablation", "current.layer.loss_increase", "loss without it, nats"),
    ("ablation", "current.layer.kl", "KL without it, nats"),
    ("geometry", "relative.layer", "relative contribution"),
    ("geometry", "cosine.layer", "cosine with stream"),
    ("logit_lens", "kl", "lens KL after it, nats"),
    ("tuned_lens", "kl", "tuned lens KL, nats"),
)
# (probe, quantity, which entries, heading): curves that have no column above, without their intervals.
_CURVES: tuple[tuple[str, str, Any, str], ...] = (
    ("order", "swap.loss_increase", 0, "loss by swapping layers l, l + 1"),
    ("order", "swap.loss_increase", 1, "loss by swapping pairs, from l"),
    ("order", "repeat.loss_increase", 0, "loss by running a layer twice"),
    ("gradients", "stream", (), "gradient of the summed loss by h_l, norm"),
    ("gradients", "first_order.loss_increase", (), "first-order loss without a layer"),
    ("erasure", "by_layer.prob_l2", (), "change of p by erasing a token at h_l"),
    ("integrated_gradients", "completeness_relative", (), "share not accounted for, at h_l"),
    ("representations", "cka", -1, "CKA of h_l with the last point"),
    ("linear_maps", "r2", np.s_[..., -1], "R2 of the map from h_l to the last point"),
    ("blocks", "transplant.loss_increase", 0, "loss with a layer of the other network"),
)


def probe_table(results: dict[str, Result], headline: str = "mean") -> str:
    """The table of results by probe.

    Args:
      headline: the statistic of token quantities that is shown, where a quantity has it.
    """
    blocks = [f"statistic: {headline}; scores have their own", _layers(results, headline)]
    for probe, result in results.items():
        counted = f"{result.examples} examples, {result.tokens:,} tokens" if result.examples else "parameters"
        lines = [f"{probe}: {counted}{_floor(result)}"]
        for name, quantity in result.quantities.items():
            # Nulls are the bounds of other quantities, not findings.
            if not quantity.axes and ".null" not in name:
                lines.append(f"  {name} {_cell(quantity, (), headline)} {quantity.unit}".rstrip())
        lines += [
            f"  {heading}: {_curve(result.quantities[name], entries, headline)}"
            for of, name, entries, heading in _CURVES
            if of == probe and name in result.quantities
        ]
        lines += [f"  {name} {_score(score)}" for name, score in result.scores.items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(filter(None, blocks))


def _layers(results: dict[str, Result], headline: str) -> str:
    """A row for each layer that ran; empty if no probe measured layers."""
    columns = [
        (heading, results[probe].quantities[name])
        for probe, name, heading in _COLUMNS
        if probe in results and name in results[probe].quantities
    ]
    if not columns:
        return ""
    steps = next(iter(results.values())).steps
    table = [("layer", *(heading for heading, _ in columns))]
    for layer in range(steps):
        places = [(layer + (quantity.axes[0] == "stream"),) for _, quantity in columns]
        cells = (_cell(q, place, headline) for (_, q), place in zip(columns, places, strict=True))
        table.append((str(layer), *cells))
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in table)


def _cell(quantity: Quantity, place: tuple[int, ...], headline: str) -> str:
    name = headline if headline in quantity.statistics else "mean"
    values = [quantity.statistics.get(f"{name}{end}") for end in ("", "_low", "_high")]
    return _interval(*(math.nan if v is None else float(np.asarray(v)[place]) for v in values))


def _curve(quantity: Quantity, entries: Any, headline: str) -> str:
    name = headline if headline in quantity.statistics else "mean"
    values = np.asarray(quantity.statistics[name])
    # A run length that the network is too short for has no row.
    chosen = values[entries] if not isinstance(entries, int) or entries < len(values) else []
    return " ".join(f"{value:.2g}" for value in np.ravel(chosen) if math.isfinite(value)) or "none"


def _interval(value: float, low: float, high: float) -> str:
    known = math.isfinite(low) and math.isfinite(high)
    return f"{value:.3g} [{low:.3g}, {high:.3g}]" if known else f"{value:.3g}"


def _score(score: Score) -> str:
    text = _interval(score.value, score.low, score.high)
    if (score.normalised, score.normalised_low) != (score.value, score.low):
        text += f", normalised {_interval(score.normalised, score.normalised_low, score.normalised_high)}"
    if math.isfinite(score.null_low):
        text += f", null [{score.null_low:.3g}, {score.null_high:.3g}]"
    return text


def _floor(result: Result) -> str:
    floors = [q.noise_floor for q in result.quantities.values() if q.noise_floor is not None]
    return f", no-op at most {max(floors):.1g}" if floors else ""
