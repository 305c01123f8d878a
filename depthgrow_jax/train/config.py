"""How a network is trained: objective, optimizer, cadence, checkpoints, devices."""

import dataclasses

from depthgrow_jax.errors import require, require_choice

OBJECTIVES = ("causal", "masked")
OPTIMIZERS = ("adamw", "lion", "muon", "adafactor", "sgd")
LR_SCHEDULES = ("wsd", "cosine", "linear", "constant")
INIT_FROM_WHAT = ("params", "all")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """One optimizer for the whole network; each layer is its own block to it.

    Attributes:
      name: `adamw`, `lion`, `muon` (matrices of the layers; Adam for the rest), `adafactor`, `sgd`
        (with Nesterov momentum).
      learning_rate: peak.
      schedule: `wsd` (constant, then 1 - sqrt decay), `cosine`, `linear`, `constant`; all after a linear
        warm-up, one continuous curve over the whole run, growth events included.
      warmup_steps: steps of linear warm-up from 0.
      decay_steps: `wsd`: length of the final decay.
      final_fraction: learning rate at the end as a fraction of the peak (`wsd`, `cosine`, `linear`).
      b1, b2, eps: moments of `adamw`; `lion` uses b1, b2; `muon` uses b1 as its momentum and both for
        its Adam part; `sgd` uses b1 as its momentum.
      weight_decay: decoupled, on matrices and embeddings (leaves named `kernel` and `table`) only.
      clip_norm: global gradient norm limit; 0 for none.
    """

    name: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "wsd"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Attributes:
      objective: `causal` (next token) or `masked` (15% of the positions, of which 80% show the mask
        token, 10% a random token, 10% themselves).
      steps: optimizer steps.
      batch_size: sequences in one optimizer step, all devices together.
      sequence_length: T.
      accumulation: microbatches that a batch is cut into, one after another.
      mask_rate: share of the positions that `masked` hides.
      z_loss: weight of the squared log-partition in the training loss.
      ema_decay: decay of a moving average of the parameters; 0 for none.
      log_every, eval_every: steps between lines of `metrics.jsonl`; 0 evaluates only at the end.
      eval_batches: validation batches of `batch_size` sequences in one evaluation, at most.
    """

    objective: str = "causal"
    steps: int = 1000
    batch_size: int = 16
    sequence_length: int = 256
    accumulation: int = 1
    mask_rate: float = 0.15
    z_loss: float = 0.0
    ema_decay: float = 0.0
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Attributes:
    every: steps between checkpoints; 0 saves only at growth boundaries and at the end.
    keep: how many of the regular ones to keep; growth boundaries and the last are always kept.
    """

    every: int = 500
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Attributes:
    data: devices over which the batch is split; 0 takes all that `fsdp` leaves.
    fsdp: devices over which the batch, the parameters and the optimizer state are split.
    """

    data: int = 0
    fsdp: int = 1


@dataclasses.dataclass(frozen=True)
class InitFromConfig:
    """Where a run that has no checkpoint of its own starts.

    Attributes:
      path: another run's directory, or a pretrained model (`hf:DIR`, `hf:org/name`, `gguf:FILE`,
        `gguf:PACKAGE`); empty for a fresh initialisation.
      step: which of the run's checkpoints; 0 for the latest.
      what: `params`, or `all` of a run (optimizer state, average and lineage too; the step starts at 0).
    """

    path: str = ""
    step: int = 0
    what: str = "params"


def validate(
    train: TrainConfig,
    optimizer: OptimizerConfig,
    checkpoint: CheckpointConfig,
    mesh: MeshConfig,
    start: InitFromConfig,
) -> None:
    """Refuses an impossible training config. Raises `UserError` naming the field."""
    require_choice("train.objective", train.objective, OBJECTIVES)
    for field in ("steps", "batch_size", "sequence_length", "accumulation", "log_every", "eval_batches"):
        require(getattr(train, field) >= 1, f"train.{field}", getattr(train, field), "must be at least 1")
    require(train.sequence_length >= 2, "train.sequence_length", train.sequence_length, "must be at least 2")
    require(
        train.eval_every >= 0, "train.eval_every", train.eval_every, "must be 0 (only at the end) or more"
    )
    require(
        train.batch_size % train.accumulation == 0,
        "train.accumulation",
        train.accumulation,
        f"must divide train.batch_size={train.batch_size}",
    )
    require(0 < train.mask_rate < 1, "train.mask_rate", train.mask_rate, "must lie between 0 and 1")
    require(train.z_loss >= 0, "train.z_loss", train.z_loss, "must be 0 or more")
    require(0 <= train.ema_decay < 1, "train.ema_decay", train.ema_decay, "must lie in [0, 1)")

    require_choice("optimizer.name", optimizer.name, OPTIMIZERS)
    require_choice("optimizer.schedule", optimizer.schedule, LR_SCHEDULES)
    rate = optimizer.learning_rate
    require(rate > 0, "optimizer.learning_rate", rate, "must be above 0")
    for field in ("warmup_steps", "decay_steps"):
        value = getattr(optimizer, field)
        require(
            0 <= value <= train.steps,
            f"optimizer.{field}",
            value,
            f"must lie in [0, train.steps={train.steps}]",
        )
    require(
        optimizer.warmup_steps + optimizer.decay_steps <= train.steps,
        "optimizer.decay_steps",
        optimizer.decay_steps,
        f"warm-up ({optimizer.warmup_steps}) and decay must fit into train.steps={train.steps}",
    )
    for field in ("b1", "b2", "final_fraction"):
        value = getattr(optimizer, field)
        legal = 0 <= value <= 1 if field == "final_fraction" else 0 <= value < 1
        require(
            legal,
            f"optimizer.{field}",
            value,
            "must lie in [0, 1)" if field != "final_fraction" else "must lie in [0, 1]",
        )
    require(optimizer.eps > 0, "optimizer.eps", optimizer.eps, "must be above 0")
    for field in ("weight_decay", "clip_norm"):
        require(
            getattr(optimizer, field) >= 0,
            f"optimizer.{field}",
            getattr(optimizer, field),
            "must be 0 or more",
        )

    require(
        checkpoint.every >= 0, "checkpoint.every", checkpoint.every, "must be 0 (boundaries and end) or more"
    )
    require(checkpoint.keep >= 1, "checkpoint.keep", checkpoint.keep, "must be at least 1")
    validate_mesh(mesh)
    require_choice("init_from.what", start.what, INIT_FROM_WHAT)
    require(start.step >= 0, "init_from.step", start.step, "must be 0 (latest) or more")


def validate_mesh(mesh: MeshConfig) -> None:
    """Refuses impossible numbers of devices. Raises `UserError` naming the field."""
    require(mesh.data >= 0, "mesh.data", mesh.data, "must be 0 (all remaining devices) or more")
    require(mesh.fsdp >= 1, "mesh.fsdp", mesh.fsdp, "must be at least 1")
