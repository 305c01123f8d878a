"""The learning rate equals curves written down again in NumPy, for every schedule, across growth events."""

import math

import numpy as np
import pytest

from depthgrow_jax.train.config import OptimizerConfig
from depthgrow_jax.train.schedule import learning_rate

TOTAL, WARMUP, DECAY, PEAK = 60, 7, 15, 0.3


def planned(schedule: str, step: int, final: float, events=(), rewarmup=0) -> float:
    """Rate of the update after `step` finished steps, from the definitions (float64, branch by branch)."""
    if step < WARMUP:
        rate = PEAK * (step + 1) / WARMUP
    elif schedule == "constant":
        rate = PEAK
    elif schedule == "wsd":
        begin = TOTAL - DECAY
        shape = 1.0 if step < begin else 1 - math.sqrt((step - begin) / DECAY)
        rate = PEAK * (final + (1 - final) * shape)
    else:
        over = (step - WARMUP) / (TOTAL - WARMUP)
        shape = 1 - over if schedule == "linear" else (1 + math.cos(math.pi * over)) / 2
        rate = PEAK * (final + (1 - final) * shape)
    last = max((event for event in events if event <= step), default=None)
    if rewarmup and last is not None:
        rate *= min(1.0, (step - last + 1) / rewarmup)
    return rate


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear", "constant"])
@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("rewarmup", [0, 4])
def test_curve(schedule, final, rewarmup):
    cfg = OptimizerConfig(
        learning_rate=PEAK,
        schedule=schedule,
        warmup_steps=WARMUP,
        decay_steps=DECAY,
        final_fraction=final,
    )
    events = (20, 22, 50)  # the second event comes while the first re-warm-up still lasts
    found = [
        float(learning_rate(cfg, np.int32(step), TOTAL, events=events, rewarmup_steps=rewarmup))
        for step in range(TOTAL)
    ]
    wanted = [planned(schedule, step, final, events, rewarmup) for step in range(TOTAL)]
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=1e-7)


def test_rewarmup_without_events_changes_nothing():
    cfg = OptimizerConfig(learning_rate=PEAK, schedule="constant")
    assert float(learning_rate(cfg, np.int32(3), TOTAL, rewarmup_steps=5)) == pytest.approx(PEAK)


def test_no_warmup_starts_at_the_peak_and_decay_over_everything_is_legal():
    cfg = OptimizerConfig(learning_rate=PEAK, schedule="wsd", decay_steps=TOTAL)
    rates = [float(learning_rate(cfg, np.int32(step), TOTAL)) for step in range(TOTAL)]
    assert rates[0] == pytest.approx(PEAK)
    assert all(after < before for before, after in zip(rates, rates[1:], strict=False))
    assert rates[-1] == pytest.approx(PEAK * (1 - math.sqrt((TOTAL - 1) / TOTAL)), rel=1e-4)
