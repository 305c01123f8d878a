"""What erasure and integrated gradients share: short prompts, their answers, and baseline states.

Shapes: P prompts, B of a batch, T positions, A answer positions, D width, K steps.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, embed, run_layers
from depthgrow_jax.probes.config import AttributionConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, num_batches, rows_of
from depthgrow_jax.probes.settings import Settings


class Answers(NamedTuple):
    """The positions that predict the answer: those whose *target* belongs to it.

    Attributes:
      positions: int32 `[P, A]`, filled up with 0 where a prompt has fewer than A.
      targets: int32 `[P, A]` ids.
      mask: bool `[P, A]`, False where filled up.
    """

    positions: np.ndarray
    targets: np.ndarray
    mask: np.ndarray

    def rows(self, indices: np.ndarray) -> "Answers":
        """Those of the prompts `indices`."""
        return Answers(*(field[indices] for field in self))


def crop(prompts: Prompts, config: AttributionConfig) -> Prompts:
    """The first `config.examples` prompts, cut at the end, padded to the longest that is left.

    A prompt with an answer is cut after the first `config.answer_length` positions that predict it, however
    long the prompt is before. One without is cut to `config.length`, and its last `config.answer_length`
    scored positions are its answer.

    Raises:
      UserError: a prompt that is too short for the baseline's mean, or that has no position with a target.
    """
    kept = Prompts(*(np.array(field)[: config.examples] for field in prompts))
    padded = kept.inputs.shape[1]
    scored, answer, stop = kept.scored & kept.valid, kept.answer.copy(), kept.lengths
    least = max(2, config.uncounted + 1)
    for i, first in enumerate(kept.answer):
        where = np.flatnonzero(scored[i])
        if first < padded:
            where = where[where >= first][: config.answer_length]
            stop[i] = where[-1] + 1 if where.size else stop[i]
        else:
            stop[i] = min(stop[i], config.length)
            where = where[where < stop[i]][-config.answer_length :]
        if stop[i] < least:
            raise UserError(
                f"prompt {i + 1}: {stop[i]} positions; attribution needs at least {least} "
                f"(probe.attribution.uncounted={config.uncounted})"
            )
        if not where.size:
            raise UserError(
                f"prompt {i + 1}: no position predicts its answer; one that has a target is needed"
            )
        answer[i] = where[0]
    length = int(stop.max())
    inside = np.arange(length)[None] < stop[:, None]
    inputs, targets = kept.inputs[:, :length], kept.targets[:, :length]
    return Prompts(inputs, targets, scored[:, :length] & inside, inside, answer)


def answers(prompts: Prompts) -> Answers:
    """The answer positions of prompts that `crop` gave."""
    where = prompts.scored & (np.arange(prompts.scored.shape[1])[None] >= prompts.answer[:, None])
    most = int(where.sum(axis=1).max())
    positions = np.argsort(~where, axis=1, kind="stable")[:, :most].astype(np.int32)
    mask = np.take_along_axis(where, positions, axis=1)
    positions = np.where(mask, positions, 0)
    return Answers(positions, np.take_along_axis(prompts.targets, positions, axis=1), mask)


def lanes_of(subject: Subject, prompts: Prompts, cropped: Prompts, settings: Settings) -> int:
    """Copies of a batch of `cropped` that take the memory of `settings.lanes` batches of `prompts`."""
    tokens = [rows_of(subject, p, settings.batch_size) * p.inputs.shape[1] for p in (prompts, cropped)]
    return max(1, settings.lanes * tokens[0] // tokens[1])


def even_chunks(items: int, most: int) -> tuple[int, int]:
    """(chunks, size): chunks of one size, at most `most`, with as few places left over as can be."""
    chunks = -(-items // min(items, most))
    return chunks, -(-items // chunks)


@functools.partial(jax.jit, static_argnames=("cfg",))
def _stream_sums(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    tokens: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> Float[Array, "points D"]:
    def total(h):
        return jnp.sum(jnp.where(counted[..., None], h.astype(jnp.float32), 0.0), axis=(0, 1))

    taps = {"sum": lambda tap: total(tap.h)}
    last, tapped = run_layers(cfg, params, embed(cfg, params, tokens), program=program, taps=taps)
    return jnp.concatenate([tapped["sum"], total(last)[None]])


def _averaged(prompts: Prompts, uncounted: int) -> np.ndarray:
    return np.asarray(prompts.valid) & (np.arange(prompts.valid.shape[1]) >= uncounted)[None]


def dataset_means(
    subject: Subject, prompts: Prompts, settings: Settings, uncounted: int, watch: Watch
) -> np.ndarray:
    """`[K + 1, D]` float32: mean of h_l over all prompts' tokens but the first `uncounted` of each."""
    cfg, params, program = subject.cfg, subject.params, subject.program
    total, number = np.zeros((subject.steps + 1, cfg.width)), 0
    count = num_batches(subject, prompts, settings.batch_size)
    for batch in watch("baseline", count, batches(subject, prompts, settings.batch_size)):
        averaged = _averaged(batch.prompts, uncounted)
        averaged[batch.real :] = False
        total += np.asarray(_stream_sums(cfg, params, program, batch.prompts.inputs, averaged))
        number += averaged.sum()
    return (total / number).astype(np.float32)


@jax.jit
def _prompt_means(
    streams: Float[Array, "points B T D"], averaged: Bool[Array, "B T"]
) -> Float[Array, "points B D"]:
    kept = jnp.where(averaged[None, :, :, None], streams.astype(jnp.float32), 0.0)
    return jnp.sum(kept, axis=2) / jnp.sum(averaged, axis=1)[None, :, None]


class Baselines:
    """What replaces a state: one vector for each point of the stream and each prompt.

    `dataset`: the mean over all the prompts of a probe, cut or not. `prompt`: over the cropped prompt itself.
    """

    def __init__(
        self,
        subject: Subject,
        prompts: Prompts,
        settings: Settings,
        config: AttributionConfig,
        over: str,
        watch: Watch,
    ):
        """`over`: `dataset` or `prompt`."""
        self._uncounted, self._means = config.uncounted, None
        if over == "dataset":
            self._means = dataset_means(subject, prompts, settings, config.uncounted, watch)

    def of(self, streams: Float[Array, "points B T D"], prompts: Prompts) -> Float[Array, "points B D"]:
        """Float32, for a batch of prompts and their clean streams."""
        if self._means is None:
            return _prompt_means(streams, _averaged(prompts, self._uncounted))
        return jnp.broadcast_to(
            jnp.asarray(self._means)[:, None], (*streams.shape[:2], self._means.shape[-1])
        )


def attribution_conventions(config: AttributionConfig, over: str) -> dict[str, str]:
    """The words that both probes carry; `over` as in `Baselines`."""
    mean = {"dataset": "all prompts of the probe, cut or not", "prompt": "the same prompt, as cut"}
    front = f"but the first {config.uncounted}" if config.uncounted else "the first included"
    return {
        "prompts": f"the first {config.examples}, cut after their answer, without one to {config.length} "
        "positions",
        "answer": f"the first {config.answer_length} positions whose target belongs to the answer; without "
        f"one the last {config.answer_length} scored positions",
        "baseline": f"{over}: mean of h_l over the tokens of {mean[over]}, {front}",
        "protected tokens": "none: the first position is treated like the others",
        "token axis": "positions from the start; a prompt that is shorter counts as 0 beyond its end",
    }


def attribution_notes(prompts: Prompts, answers: Answers) -> dict[str, list]:
    """Ids and answer positions of every prompt, to label the token axis."""
    return {
        "inputs": [row[keep].tolist() for row, keep in zip(prompts.inputs, prompts.valid, strict=True)],
        "answer_positions": [
            row[keep].tolist() for row, keep in zip(answers.positions, answers.mask, strict=True)
        ],
    }
