"""The gate of newly inserted layers ramps from its start to 1, counted from each layer's own event."""

import jax.numpy as jnp
import numpy as np
import pytest

from depthgrow_jax.growth import GrowthConfig, gate_at

# Two original layers, one inserted at step 10, one at step 14.
BORN = jnp.asarray([-1, 10, -1, 14])


@pytest.mark.parametrize(
    ("gate", "start", "step", "expected"),
    [
        ("linear", 0.0, 14, [1, 0.5, 1, 0]),
        ("linear", 0.0, 10, [1, 0, 1, 0]),
        ("linear", 0.2, 16, [1, 0.2 + 0.8 * 0.75, 1, 0.2 + 0.8 * 0.25]),
        ("linear", 0.0, 18, [1, 1, 1, 0.5]),
        ("linear", 0.5, 10**6, [1, 1, 1, 1]),
        ("cosine", 0.0, 14, [1, 0.5, 1, 0]),
        ("cosine", 0.0, 12, [1, (1 - 0.5**0.5) / 2, 1, 0]),
        ("cosine", 0.5, 18, [1, 1, 1, 0.75]),
    ],
)
def test_gate_by_hand(gate, start, step, expected):
    cfg = GrowthConfig(operator="midas", gate=gate, gate_start=start, gate_steps=8)
    np.testing.assert_allclose(gate_at(cfg, jnp.asarray(step), BORN), expected, atol=1e-6)


def test_without_a_gate_there_is_nothing_to_multiply():
    assert gate_at(GrowthConfig(operator="midas", gate_steps=8), jnp.asarray(3), BORN) is None


def test_an_event_near_the_start_leaves_original_layers_alone():
    """They are not layers born at step -1 that would still be ramping."""
    cfg = GrowthConfig(operator="midas", gate="linear", gate_steps=8)
    got = gate_at(cfg, jnp.asarray(3), jnp.asarray([-1, 2, -1, 3]))
    np.testing.assert_allclose(got, [1, 1 / 8, 1, 0])
