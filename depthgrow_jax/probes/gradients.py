"""Gradients of the loss by every layer and every point of the stream, and what skipping a layer would cost.

One forward and one backward pass an example. B prompts of a batch, P prompts, T positions, D width, L stored
layers, K steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from depthgrow_jax import model
from depthgrow_jax.errors import require
from depthgrow_jax.model import LayerProgram, ModelConfig, Params
from depthgrow_jax.probes.inputs import Prompts, Subject, Watch, batches, check_prompts, no_watch, num_batches
from depthgrow_jax.probes.outputs import target_log_prob
from depthgrow_jax.probes.result import (
    Axis,
    Result,
    layer_axis,
    over_tokens,
    quantity,
    stream_axis,
    token_quantity,
)
from depthgrow_jax.probes.settings import (
    Settings,
    conventions,
    counted,
    counted_outputs,
    intervened,
    pooling_weights,
)

GROUPS = ("attention", "mlp", "norms", "layer")


def _norms(layers: Params) -> Float[Array, "4 L"]:
    """L2 norm of each of `GROUPS` in every layer; `layers` leads with L."""
    norms = {name: leaf for name, leaf in layers.items() if name.endswith("_norm")}

    def norm(group):
        squares = [jnp.sum(jnp.square(x).reshape(len(x), -1), axis=1) for x in jax.tree.leaves(group)]
        return jnp.sqrt(jnp.sum(jnp.stack(squares), axis=0))

    return jnp.stack([norm(group) for group in (layers["attn"], layers["mlp"], norms, layers)])


def _run(
    cfg: ModelConfig,
    layers: Params,
    program: LayerProgram,
    hidden: Float[Array, "B T D"],
    shifts: Float[Array, "K1 B T D"],
) -> tuple[Float[Array, "B T D"], Float[Array, "K B T D"]]:
    """The layers, with `shifts[l]` added to h_l: the last stream, and what every layer adds to it.

    The parameters of the steps are scanned over. Indexed inside the scan, their gradient would be a sum of K
    arrays of the size of the whole stack.
    """

    def step(x, xs):
        layer, gate, norm_scale, residual_scale, shift = xs
        alone = LayerProgram(None, gate[None], norm_scale[None], residual_scale[None])
        stack = {"layers": jax.tree.map(lambda p: p[None], layer)}
        tap = model.layer_step(cfg, stack, 0, x + shift, program=alone, rotary=rotary)
        return tap.out, tap.attn + tap.mlp

    rotary = model.rotation(cfg, jnp.arange(hidden.shape[1])[None])
    if program.order is not None:
        layers = jax.tree.map(lambda p: p[program.order], layers)
    xs = (layers, program.gate, program.norm_scale, program.residual_scale, shifts[:-1])
    x, added = jax.lax.scan(step, hidden, xs)
    return x + shifts[-1], added


@functools.partial(jax.jit, static_argnames=("cfg", "devices"))
def _measure(
    cfg: ModelConfig,
    params: Params,
    program: LayerProgram,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    counted_BT: Bool[Array, "B T"],
    outputs_BT: Bool[Array, "B T"],
    intervened_BT: Bool[Array, "B T"],
    devices: int,
) -> dict[str, Any]:
    """Everything of one batch: `parameters [B, 4, L]`, `stream [4, B, K + 1]`, `first_order [B, K]`, and the
    norms of the parameters themselves, `size [4, L]`.

    Examples run one after another on each device, so a device holds the gradient of one example.
    """

    def example(inputs, targets, outputs, intervened):
        hidden = model.embed(cfg, params, inputs[None])
        shifts = jnp.zeros((program.steps + 1, *hidden.shape), hidden.dtype)

        def summed_loss(layers, shifts):
            last, added = _run(cfg, layers, program, hidden, shifts)
            log_probs = target_log_prob(jax.nn.log_softmax(model.unembed(cfg, params, last)), targets[None])
            return -jnp.sum(jnp.where(outputs[None], log_probs, 0.0)), added

        (by_layers, by_stream), added = jax.grad(summed_loss, argnums=(0, 1), has_aux=True)(
            params["layers"], shifts
        )
        by_stream, added = (x[:, 0].astype(jnp.float32) for x in (by_stream, added))
        removed = jnp.sum(by_stream[1:] * added, axis=-1)
        number = jnp.sum(outputs)
        return {
            "parameters": _norms(by_layers) / number,
            "stream": jnp.sqrt(jnp.sum(jnp.square(by_stream), axis=-1)),
            "first_order": -jnp.sum(jnp.where(intervened[None], removed, 0.0), axis=-1) / number,
        }

    # Rows of a device are neighbours. Every turn of the loop takes one row of each.
    def turns(x):
        return jnp.swapaxes(x.reshape(devices, -1, *x.shape[1:]), 0, 1)

    rows = tuple(turns(x) for x in (inputs, targets, outputs_BT, intervened_BT))
    by_turn = jax.lax.map(lambda row: jax.vmap(example)(*row), rows)
    got = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), by_turn)
    return got | {
        "stream": over_tokens(got["stream"], counted_BT[:, None]),
        "size": _norms(params["layers"]),
    }


def gradients(subject: Subject, prompts: Prompts, settings: Settings, *, watch: Watch = no_watch) -> Result:
    """Gradient norms of every layer, and the first-order estimate of what skipping it costs.

    The loss is the cross-entropy of the counted tokens that have a target, nats.

    `parameters.attention`, `.mlp`, `.norms`, `.layer`: L2 norm of the gradient of an example's *mean* loss by
      the parameters of the layer. `.layer` has them all. `relative.*`: the same over the L2 norm of the
      parameters, 0 where that is 0. Axis `layer` `[K]`; under a program with its own order they are of the
      stored layers, axis `stored_layer` `[L]`, summed over the steps that run the layer.
    `stream`, axis `stream` `[K + 1]`: norm of the gradient of an example's *summed* loss by h_l at one token,
      over counted tokens. The sum makes it independent of how many tokens and examples share a loss (the
      mean loss shrinks it by their number).
    `first_order.loss_increase`, axis `layer` `[K]`: -<dLoss/dh_{l+1}, a_l + m_l> summed over the intervened
      tokens, with the mean loss of the example: its rise without layer l, were it linear in h_{l+1}
      (attribution patching, arXiv 2310.10348). One backward pass for all layers.

    Memory: one example's activations, logits and gradient of all layers on every device.

    Raises:
      UserError: prompts that the network cannot run, or one without a counted token that has a target.
    """
    check_prompts(subject, prompts)
    counts = np.asarray(counted(settings, prompts)).sum(axis=1)
    outputs = np.asarray(counted_outputs(settings, prompts)).sum(axis=1)
    legal = f"must leave a token with a target in every prompt; prompt {outputs.argmin() + 1} has none"
    require(outputs.min() > 0, "probe.uncounted", settings.uncounted, legal)
    parts: dict[str, list[np.ndarray]] = {"parameters": [], "stream": [], "first_order": []}
    size = np.zeros((len(GROUPS), 0))
    total = num_batches(subject, prompts, settings.batch_size)
    for batch in watch("gradients", total, batches(subject, prompts, settings.batch_size)):
        chosen = batch.prompts
        got = _measure(
            subject.cfg,
            subject.params,
            subject.program,
            chosen.inputs,
            chosen.targets,
            counted(settings, chosen),
            counted_outputs(settings, chosen),
            intervened(settings, chosen),
            devices=subject.devices,
        )
        size = np.asarray(got["size"])
        parts["parameters"].append(np.asarray(got["parameters"])[: batch.real])
        parts["first_order"].append(np.asarray(got["first_order"])[: batch.real])
        parts["stream"].append(np.asarray(got["stream"])[:, : batch.real])
    by_parameters = np.concatenate(parts["parameters"])
    stream = np.concatenate(parts["stream"], axis=1)
    first_order = np.concatenate(parts["first_order"])

    axes = {"layer": layer_axis(subject.steps), "stream": stream_axis(subject.steps)}
    own = "layer"
    if subject.program.order is not None:
        own = "stored_layer"
        axes[own] = Axis(np.arange(size.shape[1]))
    quantities = {}
    for g, name in enumerate(GROUPS):
        norms = by_parameters[:, g]
        ratio = np.divide(norms, size[g][None], out=np.zeros_like(norms), where=size[g][None] > 0)
        quantities[f"parameters.{name}"] = quantity((own,), "nats / weight", {"mean": norms})
        quantities[f"relative.{name}"] = quantity((own,), "nats / weight^2", {"mean": ratio})
    quantities["stream"] = token_quantity(
        ("stream",), "nats / activation", stream, pooling_weights(settings, counts)
    )
    quantities["first_order.loss_increase"] = quantity(
        ("layer",), "nats", {"mean": first_order}, pooling_weights(settings, outputs)
    )
    return Result(
        "gradients",
        subject.steps,
        axes,
        quantities,
        conventions(settings, subject.cfg)
        | {
            "loss": "cross-entropy of the targets at counted tokens, nats",
            "parameter gradients": "L2 norm, of each example's mean loss; examples weigh the same",
            "relative": "norm of the gradient over norm of the parameters, layer by layer",
            "stream gradients": "L2 norm at a token, of each example's summed loss (mean times tokens)",
            "first order": "-<d loss / d h_{l+1}, a_l + m_l> over all but the first "
            f"{settings.protect} tokens, mean loss of the example; positive: skipping hurts",
        },
        len(counts),
        int(counts.sum()),
    )
