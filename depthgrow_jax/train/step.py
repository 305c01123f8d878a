"""One optimizer step and one evaluation step, pure functions of the state and a batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from depthgrow_jax.growth import GrowthConfig, gate_at
from depthgrow_jax.model import ModelConfig, Params, apply, depth_of, layer_program
from depthgrow_jax.train.config import OptimizerConfig, TrainConfig
from depthgrow_jax.train.objective import Examples, SpecialTokens, loss_by_sequence, make_examples
from depthgrow_jax.train.schedule import learning_rate
from depthgrow_jax.train.state import TrainState

# Keys of the random draws of a run, apart from its initialisation: fold_in(key(seed), one of these).
CORRUPTION, EVALUATION, GROWTH = 101, 102, 103


class StepConfig(NamedTuple):
    """What the step functions close over. Hashable, and without depth: that is read from the parameters."""

    model: ModelConfig
    growth: GrowthConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    special: SpecialTokens
    events: tuple[int, ...]
    seed: int


def _program(cfg: StepConfig, params: Params, step, born):
    return layer_program(cfg.model, depth_of(params), gate=gate_at(cfg.growth, step, born))


def loss_and_grad(
    cfg: StepConfig, params: Params, examples: Examples, program
) -> tuple[Float[Array, ""], Params]:
    """Mean cross-entropy (nats a target) and the gradient of the mean objective, over all microbatches.

    Microbatch i takes every `accumulation`-th row, so a batch split over devices stays where it is.
    """

    def objective(params, part: Examples):
        logits = apply(cfg.model, params, part.inputs, program=program).logits
        return jax.tree.map(jnp.sum, loss_by_sequence(logits, part, cfg.train.z_loss))

    grad_fn = jax.value_and_grad(objective, has_aux=True)
    targets = jnp.maximum(jnp.sum(examples.weights), 1.0)
    parts = cfg.train.accumulation
    if parts == 1:
        (_, total), grads = grad_fn(params, examples)
    else:
        split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), examples)

        def add(carry, part):
            (_, loss), grads = grad_fn(params, part)
            return jax.tree.map(jnp.add, carry, (loss, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (total, grads), _ = jax.lax.scan(add, zeros, split)
    return total / targets, jax.tree.map(lambda g: g / targets, grads)


def make_train_step(
    cfg: StepConfig, tx: optax.GradientTransformation
) -> Callable[[TrainState, Int[Array, "B T1"]], tuple[TrainState, dict[str, Array]]]:
    """The function `(state, tokens [B, T+1]) -> (state, metrics)`.

    Metrics, float32 scalars: `loss` (cross-entropy, nats a target), `grad_norm` (before clipping),
    `learning_rate`.
    """

    def train_step(state: TrainState, tokens):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.seed), CORRUPTION), state.step)
        examples = make_examples(cfg.train, tokens, key, cfg.special)
        program = _program(cfg, state.params, state.step, state.born)
        loss, grads = loss_and_grad(cfg, state.params, examples, program)
        rate = learning_rate(
            cfg.optimizer,
            state.step,
            cfg.train.steps,
            events=cfg.events,
            rewarmup_steps=cfg.growth.rewarmup_steps,
        )
        direction, opt_state = tx.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, d: p - rate * d, state.params, direction)
        ema = state.ema
        if ema is not None:
            decay = cfg.train.ema_decay
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "learning_rate": rate}
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state, ema=ema), metrics

    return train_step


def make_eval_step(cfg: StepConfig):
    """The function `(state, tokens [B, T+1], index) -> (cross-entropy [B], targets [B])`, sums by sequence.

    The moving average is evaluated where there is one. `index` numbers the batch: the same batch is always
    corrupted the same way.
    """

    def eval_step(state: TrainState, tokens, index):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), EVALUATION), index)
        examples = make_examples(cfg.train, tokens, key, cfg.special)
        params = state.params if state.ema is None else state.ema
        program = _program(cfg, params, state.step, state.born)
        logits = apply(cfg.model, params, examples.inputs, program=program).logits
        return loss_by_sequence(logits, examples)[1], jnp.sum(examples.weights, axis=-1)

    return eval_step
