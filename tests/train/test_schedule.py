"""The learning rate equals curves written down again in NumPy, for every schedule, across growth events."""

import itertools
import math

import numpy as np
import pytest
from toys import planned_rate

from depthgrow_jax.train.config import OptimizerConfig
from depthgrow_jax.train.schedule import learning_rate

TOTAL, WARMUP, DECAY, PEAK = 60, 7, 15, 0.3


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
    wanted = [planned_rate(cfg, TOTAL, step, events, rewarmup) for step in range(TOTAL)]
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=1e-7)


def test_rewarmup_without_events_changes_nothing():
    cfg = OptimizerConfig(learning_rate=PEAK, schedule="constant")
    assert float(learning_rate(cfg, np.int32(3), TOTAL, rewarmup_steps=5)) == pytest.approx(PEAK)


def test_no_warmup_starts_at_the_peak_and_decay_over_everything_is_legal():
    cfg = OptimizerConfig(learning_rate=PEAK, schedule="wsd", decay_steps=TOTAL)
    rates = [float(learning_rate(cfg, np.int32(step), TOTAL)) for step in range(TOTAL)]
    assert rates[0] == pytest.approx(PEAK)
    assert all(after < before for before, after in itertools.pairwise(rates))
    assert rates[-1] == pytest.approx(PEAK * (1 - math.sqrt((TOTAL - 1) / TOTAL)), rel=1e-4)
