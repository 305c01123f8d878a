"""One optimizer step: accumulation is rounding only, the average follows, the metrics are right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import MASK, SEPARATOR, VOCABULARY, ToyBatches, fresh_state, tiny_config

from depthgrow_jax.model import apply
from depthgrow_jax.train.objective import Examples, SpecialTokens, loss_by_sequence
from depthgrow_jax.train.optimizer import make_optimizer
from depthgrow_jax.train.step import StepConfig, loss_and_grad, make_eval_step, make_train_step

SPECIAL = SpecialTokens(VOCABULARY, SEPARATOR, MASK)


def step_config(cfg) -> StepConfig:
    return StepConfig(cfg.model, cfg.growth, cfg.train, cfg.optimizer, SPECIAL, (), 0)


def gradients(cfg, params, examples):
    return jax.jit(lambda p, e: loss_and_grad(step_config(cfg), p, e, None))(params, examples)


def tokens(count: int = 8) -> jax.Array:
    return jnp.asarray(ToyBatches(8).train_batch(0, count, 0))


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_accumulation_is_rounding_only(objective):
    """Loss, gradient norm, parameters of two steps; masked microbatches hold unequal numbers of targets."""
    after = []
    for accumulation in (1, 4):
        cfg = tiny_config(
            model={"causal": objective == "causal"},
            growth={"operator": "none"},
            optimizer={"name": "sgd"},
            train={"objective": objective, "accumulation": accumulation, "mask_rate": 0.3, "z_loss": 0.01},
        )
        tx = make_optimizer(cfg.optimizer)
        step = jax.jit(make_train_step(step_config(cfg), tx))
        state = fresh_state(cfg, tx, 1)
        for _ in range(2):
            state, metrics = step(state, tokens())
        after.append((state.params, metrics))
    for one, four in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(one, four, rtol=2e-4, atol=2e-6)


def test_unequal_microbatches_weigh_targets_not_parts(getkey):
    """The mean over all targets, which is not the mean of the microbatches' means."""
    cfg = tiny_config(train={"accumulation": 4})
    tx = make_optimizer(cfg.optimizer)
    params = fresh_state(cfg, tx, 2).params
    rows = tokens()
    weights = np.zeros((8, 8), np.float32)
    weights[0, :] = weights[1, :2] = weights[6, 0] = 1  # 8, 2, 1 and 0 targets in the four microbatches
    examples = Examples(rows[:, :-1], rows[:, 1:], jnp.asarray(weights))
    loss, grads = gradients(cfg, params, examples)
    logits = np.asarray(apply(cfg.model, params, examples.inputs).logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = -np.take_along_axis(log_p, np.asarray(examples.targets)[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx((picked * weights).sum() / weights.sum(), rel=1e-5)

    def mean(p):
        logits = apply(cfg.model, p, examples.inputs).logits
        return jnp.sum(loss_by_sequence(logits, examples)[1]) / weights.sum()

    for found, wanted in zip(
        jax.tree.leaves(grads), jax.tree.leaves(jax.jit(jax.grad(mean))(params)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6)


def test_a_batch_without_targets_moves_nothing():
    cfg = tiny_config()
    params = fresh_state(cfg, make_optimizer(cfg.optimizer), 1).params
    rows = tokens()
    examples = Examples(rows[:, :-1], rows[:, 1:], jnp.zeros((8, 8)))
    loss, grads = gradients(cfg, params, examples)
    assert float(loss) == 0.0 and all(not np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_step_applies_the_rate_and_the_average():
    """params - rate * direction; ema * decay + params * (1 - decay); `grad_norm` is unclipped."""
    cfg = tiny_config(
        optimizer={"name": "sgd", "b1": 0.0, "weight_decay": 0.0, "clip_norm": 0.5, "schedule": "constant"},
        train={"ema_decay": 0.75},
    )
    tx = make_optimizer(cfg.optimizer)
    state = fresh_state(cfg, tx, 2, ema=True)
    after, metrics = jax.jit(make_train_step(step_config(cfg), tx))(state, tokens())
    rows = tokens()
    examples = Examples(rows[:, :-1], rows[:, 1:], jnp.ones((8, 8)))
    _, grads = gradients(cfg, state.params, examples)
    norm = np.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4) and norm > 0.5
    rate = float(metrics["learning_rate"])
    assert rate == pytest.approx(0.02 / 3) and int(after.step) == 1
    old, new, gradient, average = map(jax.tree.leaves, (state.params, after.params, grads, after.ema))
    for p, q, g, e in zip(old, new, gradient, average, strict=True):
        # Nesterov with momentum 0 is the plain gradient.
        np.testing.assert_allclose(q, p - rate * 0.5 / norm * g, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(e, 0.75 * p + 0.25 * q, rtol=1e-5, atol=1e-7)


def test_evaluation_reads_the_average_where_there_is_one():
    cfg = tiny_config(train={"ema_decay": 0.5})
    state = fresh_state(cfg, make_optimizer(cfg.optimizer), 2, ema=True)
    state = state.replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params))
    evaluate = jax.jit(make_eval_step(step_config(cfg)))
    loss, targets = evaluate(state, tokens(), np.int32(0))
    assert loss.shape == (8,) and np.isfinite(loss).all() and (np.asarray(targets) == 8).all()
    assert np.isnan(evaluate(state.replace(ema=None), tokens(), np.int32(0))[0]).all()


def test_evaluation_corrupts_a_batch_always_alike():
    cfg = tiny_config(model={"causal": False}, train={"objective": "masked", "mask_rate": 0.4})
    state = fresh_state(cfg, make_optimizer(cfg.optimizer), 1)
    first = jax.jit(make_eval_step(step_config(cfg)))(state, tokens(), np.int32(3))
    later = dataclasses.replace(state, step=state.step + 7)
    again = jax.jit(make_eval_step(step_config(cfg)._replace(seed=9)))(later, tokens(), np.int32(3))
    other = jax.jit(make_eval_step(step_config(cfg)))(state, tokens(), np.int32(4))
    np.testing.assert_array_equal(first[0], again[0])
    assert (np.asarray(first[0]) != np.asarray(other[0])).any()
