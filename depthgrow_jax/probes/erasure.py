"""Residual erasure: which token's state still matters to the answer after how many layers.

One state h_l at one token is replaced by a baseline, and the layers above run again (Csordas et al.,
arXiv 2505.13898). Shapes: B batch, T positions, A answer positions, D width, K steps; points are h_0..h_K.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from depthgrow_jax.model import LayerProgram, ModelConfig, Params, run_layers
from depthgrow_jax.probes.attribution import (
    Answers,
    Baselines,
    answers,
    attribution_conventions,
    attribution_notes,
    crop,
    even_chunks,
    lanes_of,
)
from depthgrow_jax.probes.config import AttributionConfig
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, no_watch, num_batches
from depthgrow_jax.probes.outputs import effects
from depthgrow_jax.probes.result import (
    TOKEN_STATISTICS,
    Axis,
    Result,
    over_tokens,
    quantity,
    stream_axis,
    token_quantity,
)
from depthgrow_jax.probes.settings import Settings, conventions, counted, pooling_weights
from depthgrow_jax.probes.streams import clean_streams


@functools.partial(jax.jit, static_argnames=("cfg", "lanes", "chunk_bytes"))
def _erase(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    streams: Float[Array, "points B T D"],
    baseline: Float[Array, "points B D"],
    counted: Bool[Array, "B T"],
    answers: Answers,
    *,
    lanes: int,
    chunk_bytes: int,
) -> dict[str, Array]:
    """Effects of every erasure, leaves led by the points, then (statistics), then tokens, then B.

    Every point runs T + 1 lanes: one for each token, and one in which nothing is erased. That one is what the
    others are compared with, because it rounds as they do. Padding needs no mask: nothing attends to it.
    """
    points, batch, length, width = streams.shape
    chunks, lanes = even_chunks(length + 1, lanes)
    # Lane `length`, and those that only fill the last chunk, hit no position.
    lane_tokens = jnp.arange(chunks * lanes).reshape(chunks, lanes)
    at_answers = answers.positions[:, None, :, None]
    clean_BAD = jnp.take_along_axis(streams[-1], answers.positions[..., None], axis=1)

    def erase_at(point):
        start, h_BTD, mean_BD = point

        def run(tokens_n):
            hit_nT = tokens_n[:, None] == jnp.arange(length)[None]
            erased_BnTD = jnp.where(
                hit_nT[None, :, :, None], mean_BD.astype(h_BTD.dtype)[:, None, None], h_BTD[:, None]
            )
            lanes_NTD = erased_BnTD.reshape(batch * lanes, length, width)
            last_NTD, _ = run_layers(cfg, params, lanes_NTD, program=program, start=start)
            return jnp.take_along_axis(last_NTD.reshape(erased_BnTD.shape), at_answers, axis=2)

        last_SBAD = jnp.moveaxis(jax.lax.map(run, lane_tokens), 1, 2).reshape(
            chunks * lanes, *clean_BAD.shape
        )
        others_SBAD = jnp.concatenate([last_SBAD[:length], clean_BAD[None]])
        effect = effects(
            cfg, params, last_SBAD[length], others_SBAD, jnp.asarray(answers.targets), chunk_bytes
        )
        prob_l2 = over_tokens(effect["prob_l2"], jnp.asarray(answers.mask)[None])
        drop = jnp.sum(jnp.where(answers.mask[None], effect["loss_increase"], 0.0), axis=-1)
        largest_BT = prob_l2[TOKEN_STATISTICS.index("max"), :length].T
        return {
            "prob_l2": prob_l2[:, :length],
            "prob_l2_floor": prob_l2[TOKEN_STATISTICS.index("max"), length],
            "log_prob_drop": drop[:length],
            "log_prob_drop_floor": jnp.abs(drop[length]),
            "by_layer": over_tokens(largest_BT, counted),
        }

    return jax.lax.map(erase_at, (jnp.arange(points), streams, baseline))


def erasure(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: AttributionConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """Effect on the answer of replacing h_l at token t by a baseline; T + 1 suffixes at each of K + 1 points.

    Quantities over (stream, token), of p at the answer positions, clean less erased:
      prob_l2: Euclidean norm of the difference of the distributions. Its statistics are over answer
        positions: `max` and `mean_of_max` are the references' maximum, `mean` the mean.
      log_prob_drop: log-probability that the answer loses, nats, summed over its tokens.
    Over (stream,):
      by_layer.prob_l2: statistics over counted tokens t of the maximum over answer positions.

    Point K is the stream after the last layer: erasing it touches the prediction at t alone.

    Args:
      prompts: `[P, T]`; the map is of the first few (`attribution.crop`), a `dataset` baseline of all.

    Raises:
      UserError: prompts that `crop` refuses; parallel layers.
    """
    cfg, params, program = subject.cfg, subject.params, subject.program
    cropped = crop(prompts, config)
    answer = answers(cropped)
    baselines = Baselines(subject, prompts, settings, config, config.erasure_baseline, watch)
    lanes = lanes_of(subject, prompts, cropped, settings)
    gathered: dict[str, list[np.ndarray]] = {}
    count = num_batches(subject, cropped, settings.batch_size)
    for batch in watch("erasure", count, batches(subject, cropped, settings.batch_size)):
        streams = clean_streams(cfg, params, program, batch.prompts.inputs)
        measured = _erase(
            cfg,
            params,
            program,
            streams,
            baselines.of(streams, batch.prompts),
            counted(settings, batch.prompts),
            answer.rows(batch.indices),
            lanes=lanes,
            chunk_bytes=settings.chunk_bytes,
        )
        for name, values in measured.items():
            gathered.setdefault(name, []).append(np.asarray(values)[..., : batch.real])
    values = {name: np.concatenate(parts, axis=-1) for name, parts in gathered.items()}

    answer_counts, token_counts = answer.mask.sum(axis=1), np.asarray(counted(settings, cropped)).sum(axis=1)
    floor = float(values["prob_l2_floor"].max())
    maps, points = ("stream", "token"), ("stream",)
    return Result(
        probe="erasure",
        steps=subject.steps,
        axes={"stream": stream_axis(subject.steps), "token": Axis(np.arange(cropped.inputs.shape[1]))},
        quantities={
            "prob_l2": token_quantity(
                maps,
                "",
                values["prob_l2"].transpose(1, 3, 0, 2),
                pooling_weights(settings, answer_counts),
                floor,
            ),
            "log_prob_drop": quantity(
                maps,
                "nats",
                {"mean": values["log_prob_drop"].transpose(2, 0, 1)},
                noise_floor=float(values["log_prob_drop_floor"].max()),
            ),
            "by_layer.prob_l2": token_quantity(
                points,
                "",
                values["by_layer"].transpose(1, 2, 0),
                pooling_weights(settings, token_counts),
                floor,
            ),
        },
        conventions=conventions(settings, cfg)
        | attribution_conventions(config, config.erasure_baseline)
        | {
            "prob_l2": "||p erased - p clean||_2; statistics over answer positions; by_layer: over counted "
            "tokens of the maximum over answer positions",
            "log_prob_drop": "sum over answer tokens of clean less erased log-probability, mean over "
            "examples",
        },
        examples=len(cropped.inputs),
        tokens=int(token_counts.sum()),
        notes=attribution_notes(cropped, answer),
    )
