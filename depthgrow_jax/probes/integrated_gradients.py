"""Integrated gradients (Sundararajan et al., arXiv 1703.01365) of every point of the residual stream.

Csordas et al. (arXiv 2505.13898) take them of the stream, with the sign kept. Shapes: B batch, T positions,
A answer positions, D width, K steps, n nodes of the path at once, N = B*n; points are h_0..h_K.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from depthgrow_jax.model import LayerProgram, ModelConfig, Params, layer_step, rotation, unembed
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
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, no_watch, num_batches, rows_of
from depthgrow_jax.probes.outputs import target_log_prob
from depthgrow_jax.probes.result import Axis, Result, quantity, stream_axis
from depthgrow_jax.probes.settings import Settings, conventions
from depthgrow_jax.probes.streams import clean_streams

# Below it, a change of the target is too small to divide by.
SMALLEST_CHANGE = 1e-6
PATHS = {"legendre": "Gauss-Legendre quadrature", "left": "left Riemann sums, k / nodes"}


def path_rule(rule: str, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(nodes, weights), `[nodes]` each, of the integral over [0, 1].

    `legendre`: Gauss-Legendre. `left`: left Riemann sums k / nodes, which never reach the state itself.
    """
    if rule == "left":
        return np.arange(nodes) / nodes, np.full(nodes, 1 / nodes)
    places, weights = np.polynomial.legendre.leggauss(nodes)
    return (places + 1) / 2, weights / 2


def _suffix_gradient(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    start: Int[Array, ""],
    hidden: Float[Array, "N T D"],
    target: Callable[[Array], tuple[Array, Array]],
) -> tuple[Float[Array, "N T D"], Array]:
    """Gradient of `target(stream after the last layer)[0]` with respect to the stream that enters `start`.

    Reverse mode by hand: a loop of dynamic length that keeps what enters each layer, and one back that runs
    each layer again under `vjp`. It compiles once for every `start` and costs nothing below it. Measured
    against it (12 layers of width 256, CPU), `grad` of a scan whose steps below `start` are switched off took
    1.2 to 1.7 times as long and, by the remat policy, 1.5 to 12 times the memory.
    """
    steps = program.steps
    rotary = rotation(cfg, jnp.arange(hidden.shape[1])[None])

    def step(k, x):
        return layer_step(cfg, params, k, x, program=program, rotary=rotary).out

    def forward(k, carry):
        x, entered = carry
        return step(k, x), entered.at[k].set(x)

    kept = jnp.zeros((steps, *hidden.shape), hidden.dtype)
    last, entered = jax.lax.fori_loop(start, steps, forward, (hidden, kept))
    gradient, seen = jax.grad(target, has_aux=True)(last)

    def backward(i, gradient):
        k = steps - 1 - i
        _, pull = jax.vjp(functools.partial(step, k), entered[k])
        return pull(gradient)[0]

    return jax.lax.fori_loop(0, steps - start, backward, gradient), seen


@functools.partial(jax.jit, static_argnames=("cfg", "target"))
def _attribute(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    streams: Float[Array, "points B T D"],
    baseline: Float[Array, "points B D"],
    answers: Answers,
    nodes: Float[Array, "chunks n"],
    weights: Float[Array, "chunks n"],
    *,
    target: str,
) -> tuple[Float[Array, "points B T"], Float[Array, "points B nodes"]]:
    """Attributions of every token, and the target at every node of the path, one chunk after another."""
    points, batch, length, width = streams.shape
    lanes = nodes.shape[1]
    at_answers = answers.positions[:, None, :, None]

    def target_of(last_NTD):
        last_BnAD = jnp.take_along_axis(last_NTD.reshape(batch, lanes, length, width), at_answers, axis=2)
        lane_shape = last_BnAD.shape[:3]
        log_probs_NAV = jax.nn.log_softmax(unembed(cfg, params, last_BnAD.reshape(batch * lanes, -1, width)))
        targets_BnA = jnp.broadcast_to(answers.targets[:, None], lane_shape)
        values_NA = target_log_prob(log_probs_NAV, targets_BnA.reshape(batch * lanes, -1))
        values_BnA = (jnp.exp(values_NA) if target == "prob" else values_NA).reshape(lane_shape)
        values_Bn = jnp.sum(jnp.where(answers.mask[:, None], values_BnA, 0.0), axis=-1)
        # Lanes do not interact: the gradient of their sum holds that of each.
        return jnp.sum(values_Bn), values_Bn

    def attribute_at(point):
        start, h_BTD, mean_BD = point
        path_BTD = h_BTD.astype(jnp.float32) - mean_BD[:, None]

        def run(chunk):
            nodes_n, weights_n = chunk
            x_BnTD = mean_BD[:, None, None] + nodes_n[None, :, None, None] * path_BTD[:, None]
            x_NTD = x_BnTD.reshape(batch * lanes, length, width).astype(streams.dtype)
            gradient_NTD, values_Bn = _suffix_gradient(cfg, params, program, start, x_NTD, target_of)
            gradient_BnTD = gradient_NTD.astype(jnp.float32).reshape(x_BnTD.shape)
            averaged_BTD = jnp.sum(weights_n[None, :, None, None] * gradient_BnTD, axis=1)
            return jnp.sum(averaged_BTD * path_BTD, axis=-1), values_Bn

        parts, values = jax.lax.map(run, (nodes, weights))
        return jnp.sum(parts, axis=0), jnp.moveaxis(values, 0, 1).reshape(batch, -1)

    return jax.lax.map(attribute_at, (jnp.arange(points), streams, baseline))


def integrated_gradients(
    subject: Subject,
    prompts: Prompts,
    settings: Settings,
    config: AttributionConfig,
    *,
    watch: Watch = no_watch,
) -> Result:
    """How much every token's state contributes to the answer: gradients along a path from a baseline.

    At each point l all tokens go together, on a straight line, from the baseline to h_l; the layers above
    run at each node of the line. The target f is the sum over the answer's tokens of their log-probability
    (nats) or probability. Gradients are taken of the activations alone: about 3 forward passes a node.

    Quantities over (stream, token):
      attribution: sum over features of the averaged gradient times (h_l - baseline), signed, in units of f.
    Over (stream,):
      by_layer.attribution: sum over tokens of its absolute value.
      target_change: f(h_l) - f(baseline), what the attributions of a point should add up to.
      completeness: by how much they miss it, absolute: the error of the quadrature.
      completeness_relative: that divided by |target_change|.

    Args:
      prompts: `[P, T]`; the map is of the first few (`attribution.crop`), a `dataset` baseline of all.

    Raises:
      UserError: prompts that `crop` refuses; parallel layers.
    """
    cfg, params, program = subject.cfg, subject.params, subject.program
    cropped = crop(prompts, config)
    answer = answers(cropped)
    baselines = Baselines(subject, prompts, settings, config, config.baseline, watch)
    nodes, weights = path_rule(config.rule, config.nodes)
    rows = rows_of(subject, cropped, settings.batch_size)
    # A lane keeps what enters each layer, for the way back.
    most = min(
        lanes_of(subject, prompts, cropped, settings) // subject.steps,
        settings.chunk_bytes // (4 * rows * answer.mask.shape[1] * cfg.vocab_size),
    )
    # Both ends of the path are nodes without weight: they give f there. Zeros fill the last chunk.
    shape = even_chunks(config.nodes + 2, max(1, most))
    filler = np.zeros(int(np.prod(shape)) - config.nodes - 2)
    nodes_at = np.concatenate([nodes, [0.0, 1.0], filler]).reshape(shape).astype(np.float32)
    weights_at = np.concatenate([weights, [0.0, 0.0], filler]).reshape(shape).astype(np.float32)

    maps, targets = [], []
    count = num_batches(subject, cropped, settings.batch_size)
    for batch in watch("integrated_gradients", count, batches(subject, cropped, settings.batch_size)):
        streams = clean_streams(cfg, params, program, batch.prompts.inputs)
        attributed, values = _attribute(
            cfg,
            params,
            program,
            streams,
            baselines.of(streams, batch.prompts),
            answer.rows(batch.indices),
            nodes_at,
            weights_at,
            target=config.target,
        )
        maps.append(np.asarray(attributed, np.float64)[:, : batch.real])
        targets.append(np.asarray(values, np.float64)[:, : batch.real])
    attribution_PST = np.concatenate(maps, axis=1).swapaxes(0, 1)
    values_PSN = np.concatenate(targets, axis=1).swapaxes(0, 1)
    change_PS = values_PSN[..., config.nodes + 1] - values_PSN[..., config.nodes]
    missed_PS = np.abs(attribution_PST.sum(axis=-1) - change_PS)
    relative_PS = missed_PS / np.maximum(np.abs(change_PS), SMALLEST_CHANGE)

    unit = "nats" if config.target == "log_prob" else "probability"
    points = ("stream",)
    return Result(
        probe="integrated_gradients",
        steps=subject.steps,
        axes={"stream": stream_axis(subject.steps), "token": Axis(np.arange(cropped.inputs.shape[1]))},
        quantities={
            "attribution": quantity(("stream", "token"), unit, {"mean": attribution_PST}),
            "by_layer.attribution": quantity(points, unit, {"mean": np.abs(attribution_PST).sum(axis=-1)}),
            "target_change": quantity(points, unit, {"mean": change_PS}),
            "completeness": quantity(points, unit, {"mean": missed_PS}),
            "completeness_relative": quantity(points, "", {"mean": relative_PS}),
        },
        conventions=conventions(settings, cfg)
        | attribution_conventions(config, config.baseline)
        | {
            "counted tokens": "all that are not padding",
            "reduction": "mean over examples",
            "target": f"sum over answer tokens of {config.target} of the given token",
            "path": f"{config.nodes} nodes of {PATHS[config.rule]}, all tokens at once",
            "completeness_relative": f"divided by at least {SMALLEST_CHANGE:g}",
        },
        examples=len(cropped.inputs),
        tokens=int(cropped.lengths.sum()),
        notes=attribution_notes(cropped, answer),
    )
