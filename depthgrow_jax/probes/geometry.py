"""Geometry of the residual stream: how much each layer adds, in which direction, and how the stream grows.

One forward pass without the head. B prompts of a batch, P prompts, T positions, D width, K steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from depthgrow_jax import model
from depthgrow_jax.errors import require
from depthgrow_jax.model import LayerProgram, LayerTap, ModelConfig, Params
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, check_prompts, no_watch, num_batches
from depthgrow_jax.probes.result import (
    Result,
    Score,
    layer_axis,
    over_tokens,
    quantity,
    score,
    stream_axis,
    token_quantity,
)
from depthgrow_jax.probes.settings import Settings, conventions, counted, pooling_weights
from depthgrow_jax.probes.streams import norms

# Quantities of every token, and their units; on the axes `layer` and `stream`.
OF_LAYERS = {
    "relative.attention": "",
    "relative.mlp": "",
    "relative.layer": "",
    "cosine.attention": "",
    "cosine.mlp": "",
    "cosine.layer": "",
    "norm.attention": "activation",
    "norm.mlp": "activation",
    "norm.layer": "activation",
    "log_rms.attention": "nats",
    "log_rms.mlp": "nats",
    "block_influence": "",
}
OF_STREAM = {"rms": "activation", "log_rms": "nats"}
SMALLEST_STREAM = 1e-6
SMALLEST_RMS = 1e-12


def _unit(x: Float[Array, "*axes D"]) -> Float[Array, "*axes D"]:
    """The direction of each vector; of a zero vector, zero."""
    norm = norms(x)
    return x / jnp.where(norm > 0, norm, 1.0)[..., None]


def _log_rms(x: Float[Array, "*axes D"]) -> Float[Array, "*axes"]:
    return jnp.log(jnp.maximum(norms(x) * x.shape[-1] ** -0.5, SMALLEST_RMS))


def angular_distance(u: Float[Array, "*axes D"], v: Float[Array, "*axes D"]) -> Float[Array, "*axes"]:
    """Angle between unit vectors as a share of pi: 0 the same direction, 1 opposite ones.

    The half-angle form is exactly 0 for equal vectors and accurate next to it, where arccos loses half of the
    digits or is NaN because rounding took a cosine above 1. Zero vectors: 0 from each other, 1/2 from others.
    """
    return 2 / jnp.pi * jnp.arctan2(norms(u - v), norms(u + v))


def _block_influence(u: Float[Array, "*axes D"], v: Float[Array, "*axes D"]) -> Float[Array, "*axes"]:
    """1 - cos of unit vectors, as ||u - v||^2 / 2: exactly 0 for equal ones, zero vectors included."""
    one_is_zero = jnp.any(u != 0, axis=-1) != jnp.any(v != 0, axis=-1)
    return jnp.where(one_is_zero, 1.0, jnp.sum(jnp.square(u - v), axis=-1) / 2)


def _of_layer(tap: LayerTap) -> Float[Array, "Q B T"]:
    """`OF_LAYERS` but the last, which needs two points of the stream."""
    h, a, m = (x.astype(jnp.float32) for x in (tap.h, tap.attn, tap.mlp))
    middle, both = h + a, a + m
    values: dict[str, Array] = {}
    for part, added, stream in (("attention", a, h), ("mlp", m, middle), ("layer", both, h)):
        values[f"norm.{part}"] = norms(added)
        values[f"relative.{part}"] = norms(added) / jnp.maximum(norms(stream), SMALLEST_STREAM)
        values[f"cosine.{part}"] = jnp.sum(_unit(added) * _unit(stream), axis=-1)
    values["log_rms.attention"], values["log_rms.mlp"] = _log_rms(a), _log_rms(m)
    return jnp.stack([values[name] for name in list(OF_LAYERS)[:-1]])


def _of_point(h: Float[Array, "B T D"]) -> tuple[Float[Array, "Q B T"], Float[Array, "B T D"]]:
    """Quantities of one point of the stream, and its direction."""
    h = h.astype(jnp.float32)
    values = {"rms": norms(h) * h.shape[-1] ** -0.5, "log_rms": _log_rms(h)}
    return jnp.stack([values[name] for name in OF_STREAM]), _unit(h)


@functools.partial(jax.jit, static_argnames=("cfg",))
def _measure(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    inputs: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    counted_BT: Bool[Array, "B T"],
) -> dict[str, Any]:
    """Everything of one batch, the examples on the last axis (S token statistics, Q quantities).

    `layer [S, K, Q, B]`, `stream [S, K + 1, Q, B]`, `first_layer` and `first_stream` the same at the first
    position without S; `angular [K + 1, S, K + 1, B]` and `angular_last [K + 1, K + 1, B]`.
    """
    hidden = model.embed(cfg, params, inputs)
    # Points are tapped where they enter: XLA may keep more digits of what leaves than a bfloat16 stream has.
    taps = {"layer": _of_layer, "point": lambda tap: _of_point(tap.h)}
    hidden, tapped = model.run_layers(cfg, params, hidden, program=program, taps=taps)
    points, units = jax.tree.map(
        lambda points, last: jnp.concatenate([points, last[None]]), tapped["point"], _of_point(hidden)
    )
    influence = _block_influence(units[:-1], units[1:])
    layers = jnp.concatenate([tapped["layer"], influence[:, None]], axis=1)
    is_last = jnp.arange(inputs.shape[1])[None] == jnp.sum(valid, axis=1)[:, None] - 1

    def from_point(unit):
        angles = angular_distance(unit[None], units)
        return over_tokens(angles, counted_BT), jnp.sum(jnp.where(is_last[None], angles, 0.0), axis=-1)

    angular, angular_last = jax.lax.map(from_point, units)
    return {
        "layer": over_tokens(layers, counted_BT),
        "stream": over_tokens(points, counted_BT),
        "first_layer": layers[..., 0],
        "first_stream": points[..., 0],
        "angular": angular,
        "angular_last": angular_last,
    }


def _slope(values: np.ndarray) -> np.ndarray:
    """Least-squares slope over the last axis, per step of it."""
    position = np.arange(values.shape[-1]) - (values.shape[-1] - 1) / 2
    return values @ position / np.sum(position**2)


def residual_growth(log_rms: np.ndarray, weights: np.ndarray | None = None) -> Score:
    """Growth of the stream a layer, the curse of depth as one number (arXiv 2502.05795 has the phenomenon).

    Args:
      log_rms: `[P, K + 1]`, each example's mean log RMS of h_0..h_K, nats.
      weights: `[P]` tokens of each example, or None.

    Returns:
      exp(slope) = g of the least-squares line of the mean log RMS over l. Normalised 1 - 1/g, the share of a
      point's RMS that the layer before it added: 0 for a stream that does not grow or shrinks.
    """
    growth = score(
        lambda means: np.exp(_slope(means)),
        [log_rms],
        "growth factor g of the RMS per layer: exp(slope of the least-squares line of the mean log RMS of "
        "h_l over l); normalised: max(0, 1 - 1/g)",
        weights=[weights],
    )
    ends = (growth.value, growth.low, growth.high)
    normalised, low, high = (float(np.maximum(0.0, 1 - 1 / g)) for g in ends)
    return growth._replace(normalised=normalised, normalised_low=low, normalised_high=high)


def geometry(subject: Subject, prompts: Prompts, settings: Settings, *, watch: Watch = no_watch) -> Result:
    """Contributions, cosines, norms and angles of the residual stream, h before the final norm.

    With a_l, m_l what attention and MLP add to the stream h_l, on the axis `layer` `[K]`:
      `relative.*`: ||a||/||h||, ||m||/||h + a||, ||a + m||/||h|| (Csordas et al., arXiv 2505.13898).
      `cosine.*`: cos(a, h), cos(m, h + a), cos(a + m, h): below 0 the layer erases, above it amplifies.
      `block_influence`: 1 - cos(h_l, h_{l+1}) (ShortGPT, arXiv 2403.03853).
      `norm.*`, `log_rms.attention`, `log_rms.mlp`: of a, m (and a + m).
    On `stream` `[K + 1]`: `rms` over features of h_l and its natural logarithm `log_rms`.
    On `stream` and `stream_to` `[K + 1, K + 1]`, symmetric: `angular`, the angle between two points as a
      share of pi, over counted tokens, and `angular.last` on the last token of every prompt, as Gromov et al.
      (arXiv 2403.17887) do.
    `first.*`: the quantities of `layer` and `stream` at the first position, one value an example, whether it
      is counted or not; examples weigh the same there, and in `angular.last`.

    Returns:
      The quantities above, and the score `residual_growth`.

    Raises:
      UserError: prompts that the network cannot run, or one without counted tokens.
    """
    check_prompts(subject, prompts)
    counts = np.asarray(counted(settings, prompts)).sum(axis=1)
    shortest = int(prompts.lengths.min())
    legal = f"must be below {shortest}, the length of the shortest prompt"
    require(counts.min() > 0, "probe.uncounted", settings.uncounted, legal)
    measured: dict[str, list[np.ndarray]] = {}
    total = num_batches(subject, prompts, settings.batch_size)
    for batch in watch("geometry", total, batches(subject, prompts, settings.batch_size)):
        chosen = batch.prompts
        got = _measure(
            subject.cfg,
            subject.params,
            subject.program,
            chosen.inputs,
            chosen.valid,
            counted(settings, chosen),
        )
        for name, values in got.items():
            measured.setdefault(name, []).append(np.asarray(values)[..., : batch.real])
    joined = {name: np.concatenate(parts, axis=-1) for name, parts in measured.items()}

    weights = pooling_weights(settings, counts)
    quantities = {}
    for axis, units in (("layer", OF_LAYERS), ("stream", OF_STREAM)):
        for q, (name, unit) in enumerate(units.items()):
            statistics = np.swapaxes(joined[axis][:, :, q], 1, 2)
            quantities[name] = token_quantity((axis,), unit, statistics, weights)
            first = {"mean": joined[f"first_{axis}"][:, q].T}
            quantities[f"first.{name}"] = quantity((axis,), unit, first)
    pair = ("stream", "stream_to")
    angles = np.transpose(joined["angular"], (1, 3, 0, 2))
    quantities["angular"] = token_quantity(pair, "share of pi", angles, weights)
    last = {"mean": np.moveaxis(joined["angular_last"], -1, 0)}
    quantities["angular.last"] = quantity(pair, "share of pi", last)
    points = stream_axis(subject.steps)
    return Result(
        "geometry",
        subject.steps,
        {"layer": layer_axis(subject.steps), "stream": points, "stream_to": points},
        quantities,
        conventions(settings, subject.cfg)
        | {
            "stream": "h_l before any norm; the last point before the final norm",
            "relative": "||a||/||h||, ||m||/||h + a||, ||a + m||/||h||, ratio at every token, "
            f"denominators at least {SMALLEST_STREAM:g}",
            "cosine": "cos(a, h), cos(m, h + a), cos(a + m, h); 0 where a vector is zero",
            "block influence": "1 - cos(h_l, h_{l+1}); 0 where both are zero",
            "angular distance": "angle / pi; angular over counted tokens, angular.last on the last token",
            "log RMS": f"natural logarithm, at every token, of at least {SMALLEST_RMS:g}",
            "first": "position 0 alone, examples weigh the same",
        },
        len(counts),
        int(counts.sum()),
        scores={"residual_growth": residual_growth(quantities["log_rms"].by_example["mean"], weights)},
    )
