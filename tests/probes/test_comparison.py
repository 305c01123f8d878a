"""Which results may be overlaid, and on what axis."""

import numpy as np
import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.comparison import differences, overlay
from depthgrow_jax.probes.result import Result, constant, layer_axis, quantity, stream_axis


def result(steps: int, probe: str = "geometry", unit: str = "nats", **conventions) -> Result:
    values = np.arange(2 * steps, dtype=float).reshape(2, steps)
    quantities = {
        "curve": quantity(("layer",), unit, {"mean": values, "median": values, "p95": values, "max": values}),
        "map": constant(("layer", "layer_to"), "", np.zeros((steps, steps))),
        "free": constant(("place",), "", np.zeros(3)),
        "number": constant((), "", np.float64(3)),
    }
    axes = {"layer": layer_axis(steps), "layer_to": layer_axis(steps), "stream": stream_axis(steps)}
    axes["place"] = axes["layer"]._replace(values=np.arange(3), normalised=None)
    return Result(probe, steps, axes, quantities, {"kl": "clean || other", "dtype": "a"} | conventions, 2, 8)


def test_networks_of_any_depth_are_comparable():
    assert differences(result(4), result(7)) == []
    curves = overlay({"small": result(4), "large": result(7)}, "curve")
    assert list(curves) == ["small", "large"]
    for label, steps in (("small", 4), ("large", 7)):
        x, y, low, high = curves[label]
        np.testing.assert_allclose(x, [(layer + 0.5) / steps for layer in range(steps)])
        # The mean of row 0 (0, 1, ...) and row 1 (K, K + 1, ...), and an interval that holds it.
        np.testing.assert_allclose(y, np.arange(steps) + steps / 2)
        assert (low < y).all() and (y < high).all()


def test_differences_name_both_values():
    a, b = result(4, kl="p || q"), result(4, kl="q || p", splits="4")
    assert differences(a, b) == ["kl: 'p || q' and 'q || p'", "splits: 'not said' and '4'"]
    assert differences(a, result(4, probe="ablation")) == ["of different probes: 'geometry' and 'ablation'"]
    with pytest.raises(UserError) as error:
        overlay({"first": a, "same": a, "second": b}, "curve")
    assert str(error.value) == (
        "first and second cannot be compared; kl: 'p || q' and 'q || p'; splits: 'not said' and '4'"
    )


def test_statistics_and_missing_intervals():
    found = {"a": result(4)}
    low = result(4).quantities["curve"].statistics["p95_low"]
    np.testing.assert_array_equal(overlay(found, "curve", "p95")["a"].low, low)
    largest = overlay(found, "curve", "max")["a"]
    np.testing.assert_array_equal(largest.y, np.arange(4) + 4)
    assert np.isnan(largest.low).all() and np.isnan(largest.high).all()


@pytest.mark.parametrize(
    ("name", "statistic", "pattern"),
    [
        ("curves", "mean", r"a: quantity='curves': must be one of curve, map, free, number"),
        ("map", "mean", r"a: map runs over layer, layer_to; must be one axis of depth"),
        ("free", "mean", r"a: free runs over place; must be one axis of depth"),
        ("number", "mean", r"a: number runs over no axis; must be one axis of depth"),
        ("curve", "mode", r"a: statistic of curve='mode': must be one of mean, mean_low"),
    ],
)
def test_what_is_no_curve(name, statistic, pattern):
    with pytest.raises(UserError, match=pattern):
        overlay({"a": result(4)}, name, statistic)


def test_units_must_agree():
    with pytest.raises(UserError, match=r"curve: has units that differ: nats \(a\), bits \(b\)"):
        overlay({"a": result(4), "b": result(4, unit="bits")}, "curve")
