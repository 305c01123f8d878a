"""What every probe takes: a network and prompts. B prompts of a batch, P prompts in all, T positions."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import LayerProgram, ModelConfig, Params


class Subject(NamedTuple):
    """The network that is probed, as it runs.

    Attributes:
      cfg, params, program: `model.apply(cfg, params, tokens, program=program)` is the clean run. K steps.
      batch_sharding: where a batch goes; None leaves it to JAX.
      devices: over which the rows of a batch are split.
    """

    cfg: ModelConfig
    params: Params
    program: LayerProgram
    batch_sharding: jax.sharding.Sharding | None = None
    devices: int = 1

    @property
    def steps(self) -> int:
        """K, the layers that run."""
        return self.program.steps


class Prompts(NamedTuple):
    """Token sequences, padded on the right. Leading axis P (numpy), or B for a batch (on the devices).

    Attributes:
      inputs: int32 `[P, T]` ids.
      targets: int32 `[P, T]` ids that the outputs are scored against.
      scored: bool `[P, T]`, where there is a target (causal: every token with a successor).
      valid: bool `[P, T]`, False at padding. The first position is never padding.
      answer: int32 `[P]`, the first position whose *target* belongs to the answer; T where the prompt has
        no answer.
    """

    inputs: Any
    targets: Any
    scored: Any
    valid: Any
    answer: Any

    @property
    def lengths(self) -> np.ndarray:
        """`[P]`, positions that are not padding."""
        return np.asarray(self.valid).sum(axis=1)


class Batch(NamedTuple):
    """`rows` prompts on the devices, of which the first `real` count; the others only fill the shape."""

    prompts: Prompts
    real: int
    indices: np.ndarray


Watch = Callable[[str, int, Iterator], Iterator]


def no_watch(what: str, total: int, items: Iterator) -> Iterator:
    """Takes the place of a progress bar: passes `items` on."""
    return items


def windows(tokens: np.ndarray) -> Prompts:
    """Prompts of packed text: `[P, T + 1]` ids give T positions each, all scored, none padding."""
    inputs = np.ascontiguousarray(tokens[:, :-1], np.int32)
    everywhere = np.ones(inputs.shape, bool)
    answer = np.full(len(inputs), inputs.shape[1], np.int32)
    return Prompts(
        inputs, np.ascontiguousarray(tokens[:, 1:], np.int32), everywhere, everywhere.copy(), answer
    )


def check_prompts(subject: Subject, prompts: Prompts) -> None:
    """Raises `UserError` for prompts that the network cannot run as they are."""
    count, length = prompts.inputs.shape
    if count < 1 or length < 1:
        raise UserError(f"prompts: {count} prompts of {length} positions; at least one of each is needed")
    lowest, largest = int(prompts.inputs.min()), int(prompts.inputs.max())
    if lowest < 0 or largest >= subject.cfg.vocab_size:
        bad = lowest if lowest < 0 else largest
        raise UserError(f"prompts: token id {bad} is outside the vocabulary of {subject.cfg.vocab_size}")
    if not subject.cfg.causal and not prompts.valid.all():
        raise UserError(
            "prompts: of unequal lengths; a bidirectional model would attend to the padding. "
            f"Lower probe.prompts.length to {int(prompts.lengths.min())} or leave the shorter ones out"
        )


def rows_of(subject: Subject, prompts: Prompts, batch_size: int) -> int:
    """Prompts a batch: at most `batch_size`, no more than there are, a multiple of the devices."""
    count = min(batch_size, len(prompts.inputs))
    return -(-count // subject.devices) * subject.devices


def placed(subject: Subject, prompts: Prompts, indices: np.ndarray) -> Prompts:
    """The prompts `indices`, on the devices."""
    chosen = (np.asarray(field)[indices] for field in prompts)
    return Prompts(*(jax.device_put(field, subject.batch_sharding) for field in chosen))


def batches(subject: Subject, prompts: Prompts, batch_size: int) -> Iterator[Batch]:
    """All prompts in order, in batches of one shape.

    The last batch is filled up with prompts from the start; what they give is to be dropped (`Batch.real`).
    """
    total, rows = len(prompts.inputs), rows_of(subject, prompts, batch_size)
    for start in range(0, total, rows):
        indices = np.arange(start, start + rows) % total
        yield Batch(placed(subject, prompts, indices), min(rows, total - start), indices)


def num_batches(subject: Subject, prompts: Prompts, batch_size: int) -> int:
    """How many `batches` yields."""
    return -(-len(prompts.inputs) // rows_of(subject, prompts, batch_size))
