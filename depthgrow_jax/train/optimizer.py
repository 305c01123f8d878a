"""Optimizers that see every layer as itself.

The layers' parameters are stacked, `[L, ...]`. An optimizer that looked at the stack would take the norm
scales `[L, D]` for matrices, share factored moments and trust ratios between layers, and keep one count
for all. So the transformation is mapped over the layer axis: inside, each layer has its own shapes, and
outside, *every* leaf of its state leads with L, which is what growth indexes.
"""

import jax
import optax

from depthgrow_jax.train.config import OptimizerConfig


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `tx` to each index of the leading axis of the tree on its own."""

    def init(params):
        return jax.vmap(tx.init)(params)

    def update(updates, state, params=None):
        return jax.vmap(tx.update)(updates, state, params)

    return optax.GradientTransformation(init, update)


def part_labels(params) -> dict[str, str]:
    """Which of the two parts, `layers` or `rest`, each top-level group of parameters belongs to."""
    return {
        group: jax.tree.map(lambda _, label="layers" if group == "layers" else "rest": label, tree)
        for group, tree in params.items()
    }


def decay_mask(params):
    """True for matrices and embeddings, told by name: a stacked norm scale is two-dimensional too."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "table"), params)


def _direction(cfg: OptimizerConfig) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Preconditioners (of one layer, of the rest); their output is the direction of ascent."""
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    if cfg.name == "adamw":
        return adam, adam
    if cfg.name == "lion":
        lion = optax.scale_by_lion(cfg.b1, cfg.b2)
        return lion, lion
    if cfg.name == "sgd":
        momentum = optax.trace(cfg.b1, nesterov=True)
        return momentum, momentum
    if cfg.name == "adafactor":
        # arXiv 1804.04235 without the relative step size: the learning rate is the schedule's.
        factored = optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
        )
        return factored, factored
    # Updates scaled to the RMS of Adam's (arXiv 2502.16982), so that one learning rate fits both parts.
    muon = optax.contrib.muon(
        1.0, beta=cfg.b1, adam_b1=cfg.b1, adam_b2=cfg.b2, eps=cfg.eps, consistent_rms=0.2
    )
    return optax.chain(muon, optax.scale(-1.0)), adam


def make_optimizer(cfg: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients to the update *before* the learning rate: params change by `-learning_rate * update`.

    Clips by the global norm, preconditions, adds decoupled weight decay. The learning rate is not part of
    it, so no optimizer state that growth or a reset could touch decides the schedule.
    """
    layer, rest = _direction(cfg)
    steps = [optax.clip_by_global_norm(cfg.clip_norm)] if cfg.clip_norm else []
    steps.append(optax.partition({"layers": per_layer(layer), "rest": rest}, part_labels))
    if cfg.weight_decay:
        steps.append(optax.add_decayed_weights(cfg.weight_decay, mask=decay_mask))
    return optax.chain(*steps)
