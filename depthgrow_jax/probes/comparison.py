"""Which results may be drawn over each other, and the curves to draw. Depth need not agree: it is an axis."""

from typing import NamedTuple

import numpy as np

from depthgrow_jax.errors import UserError, require_choice
from depthgrow_jax.probes.result import Result


class Curve(NamedTuple):
    """A quantity along normalised depth, `[n]` each; `low` and `high` are NaN where there is no interval."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


def differences(a: Result, b: Result) -> list[str]:
    """Why two results must not be overlaid, one sentence each; empty if they may be.

    They measure the same if they are of the same probe and every convention agrees (KL direction, counted
    tokens, reduction, ...). The network and its depth may differ: that is what one compares.
    """
    if a.probe != b.probe:
        return [f"of different probes: {a.probe!r} and {b.probe!r}"]
    return [
        f"{name}: {a.conventions.get(name, 'not said')!r} and {b.conventions.get(name, 'not said')!r}"
        for name in sorted({*a.conventions, *b.conventions})
        if a.conventions.get(name) != b.conventions.get(name)
    ]


def overlay(results: dict[str, Result], quantity: str, statistic: str = "mean") -> dict[str, Curve]:
    """Curves of one quantity with a single axis, one a result, over normalised depth.

    Args:
      results: label -> result; the labels are those of the answer.

    Raises:
      UserError: results that are not comparable, naming every difference; a quantity or statistic that one of
        them lacks; more than one axis, or an axis without normalised coordinates; units that differ.
    """
    items = list(results.items())
    for label, result in items[1:]:
        found = differences(items[0][1], result)
        if found:
            raise UserError(f"{items[0][0]} and {label} cannot be compared; {'; '.join(found)}")
    units = {label: _curve_unit(label, result, quantity) for label, result in items}
    if len(set(units.values())) > 1:
        shown = ", ".join(f"{unit or 'none'} ({label})" for label, unit in units.items())
        raise UserError(f"{quantity}: has units that differ: {shown}")
    return {label: _curve(label, result, quantity, statistic) for label, result in items}


def _curve_unit(label: str, result: Result, quantity: str) -> str:
    require_choice(f"{label}: quantity", quantity, result.quantities)
    found = result.quantities[quantity]
    if len(found.axes) != 1 or result.axes[found.axes[0]].normalised is None:
        raise UserError(
            f"{label}: {quantity} runs over {', '.join(found.axes) or 'no axis'}; must be one axis of depth"
        )
    return found.unit


def _curve(label: str, result: Result, quantity: str, statistic: str) -> Curve:
    found = result.quantities[quantity]
    require_choice(f"{label}: statistic of {quantity}", statistic, found.statistics)
    x, y = result.axes[found.axes[0]].normalised, found.statistics[statistic]
    assert x is not None
    unknown = np.full(y.shape, np.nan)
    low, high = (found.statistics.get(f"{statistic}_{end}", unknown) for end in ("low", "high"))
    return Curve(x, y, low, high)
