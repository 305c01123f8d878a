"""Gradients against a plainly written loss, finite differences and derivatives by the gate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import ARCHITECTURES, EVERY, ragged, subject, text

from depthgrow_jax import model
from depthgrow_jax.errors import UserError
from depthgrow_jax.probes.gradients import gradients
from depthgrow_jax.probes.inputs import Prompts
from depthgrow_jax.probes.settings import Settings

DEPTH = 3
LENGTHS = (7, 5)


@functools.cache
def network(name):
    return subject(DEPTH, **ARCHITECTURES[name])


def prompts_and_weights(first):
    """Prompts, and `[P, T]` weights that average over the real tokens from `first` on."""
    prompts = ragged(LENGTHS)
    weights = np.zeros((2, 7), np.float32)
    for p, length in enumerate(LENGTHS):
        weights[p, first:length] = 1 / (length - first)
    return prompts, weights


def cross_entropy(logits, targets, weights):
    """Of one prompt, `[T, V]`, `[T]`, `[T]`."""
    exponentials = jnp.exp(logits)
    right = jax.nn.one_hot(targets, logits.shape[-1])
    return -jnp.sum(weights * jnp.log(jnp.sum(exponentials * right, -1) / jnp.sum(exponentials, -1)))


def plain_loss(cfg, params, program, inputs, targets, weights):
    logits = model.apply(cfg, params, inputs[None], program=program).logits[0]
    return cross_entropy(logits, targets, weights)


@functools.partial(jax.jit, static_argnums=0)
def plain_gradient(cfg, params, gate, program, inputs, targets, weights):
    """(loss, (gradient by the parameters, by the gate)) of one prompt."""

    def loss(params, gate):
        return plain_loss(cfg, params, program._replace(gate=gate), inputs, targets, weights)

    return jax.value_and_grad(loss, argnums=(0, 1))(params, gate)


def by_prompt(net, prompts, weights):
    rows = zip(prompts.inputs, prompts.targets, weights, strict=True)
    return [plain_gradient(net.cfg, net.params, net.program.gate, net.program, *row) for row in rows]


def parameter_norms(tree):
    """Names of the groups -> `[L]` norms in float64."""
    norms = [leaf for name, leaf in tree.items() if "norm" in name]
    groups = {"attention": tree["attn"], "mlp": tree["mlp"], "norms": norms, "layer": tree}

    def flat(group):
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(group)]
        return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)

    return {name: np.linalg.norm(flat(group), axis=1) for name, group in groups.items()}


def check_parameters(net, axis):
    prompts, weights = prompts_and_weights(2)
    got = gradients(net, prompts, Settings(uncounted=2))
    size = parameter_norms(net.params["layers"])
    want = [parameter_norms(found[0]["layers"]) for _, found in by_prompt(net, prompts, weights)]
    for group in size:
        by_example = np.array([norms[group] for norms in want])
        found, relative = got.quantities[f"parameters.{group}"], got.quantities[f"relative.{group}"]
        assert found.axes == relative.axes == (axis,)
        np.testing.assert_allclose(found.by_example["mean"], by_example, rtol=2e-4)
        np.testing.assert_allclose(found.statistics["mean"], by_example.mean(axis=0), rtol=2e-4)
        np.testing.assert_allclose(relative.by_example["mean"], by_example / size[group][None], rtol=2e-4)
    return got


@pytest.mark.parametrize("name", EVERY)
def test_parameter_norms_are_those_of_a_plain_gradient(name):
    got = check_parameters(network(name), "layer")
    assert got.examples == 2 and got.tokens == 7 + 5 - 2 * 2


def test_looped_layers():
    """Stored layers that run several times have one gradient, the sum over their runs."""
    net = subject(DEPTH, residual_scaling="learned", residual_init=0.8)
    gate = jnp.asarray([[1, 0.5], [1, 1], [0.3, 1], [1, 2], [1, 1]], jnp.float32)
    program = model.layer_program(net.cfg, 5, order=[0, 1, 1, 2, 1], gate=gate)
    got = check_parameters(net._replace(program=program), "stored_layer")
    for name, found in got.quantities.items():
        assert found.statistics["mean"].shape == tuple(len(got.axes[a].values) for a in found.axes), name
    assert len(got.axes["stored_layer"].values) == 3 and len(got.axes["layer"].values) == 5


def test_stream_gradients_are_those_of_the_rest_of_the_network():
    net, (prompts, weights) = network("post"), prompts_and_weights(1)
    found = gradients(net, prompts, Settings(uncounted=1)).quantities["stream"]

    @jax.jit
    def plain(inputs, targets, counted):
        hidden, gradient = model.embed(net.cfg, net.params, inputs[None]), []
        for start in range(DEPTH + 1):

            def rest(h, start=start):
                out = model.apply(net.cfg, net.params, hidden=h, program=net.program, start=start)
                return cross_entropy(out.logits[0], targets, counted)

            gradient.append(jax.grad(rest)(hidden)[0])
            if start < DEPTH:
                hidden = model.layer_step(net.cfg, net.params, start, hidden, program=net.program).out
        return gradient

    norms = []
    for p, length in enumerate(LENGTHS):
        summed = plain(prompts.inputs[p], prompts.targets[p], (weights[p] > 0).astype(np.float32))
        norms.append(np.linalg.norm(np.asarray(summed, np.float64)[:, 1:length], axis=-1))
    for statistic, fn in (("mean", np.mean), ("median", np.median), ("max", np.max)):
        want = [fn(values, axis=1) for values in norms]
        np.testing.assert_allclose(found.by_example[statistic], want, rtol=2e-4)
    want = np.concatenate(norms, axis=1).mean(axis=1)
    np.testing.assert_allclose(found.statistics["mean"], want, rtol=2e-4)


def test_stream_gradient_by_finite_differences():
    """One counted token, so that the statistic is its norm: the loss is moved along every feature of it."""
    net, prompts, point, step = network("pre"), ragged((7, 7)), 1, 1e-2
    found = gradients(net, prompts, Settings(uncounted=6)).quantities["stream"].by_example["mean"][0, point]
    hidden = model.embed(net.cfg, net.params, jnp.asarray(prompts.inputs[:1]))
    hidden = model.layer_step(net.cfg, net.params, 0, hidden, program=net.program).out
    moves = step * np.concatenate([np.eye(net.cfg.width), -np.eye(net.cfg.width)]).astype(np.float32)
    moved = jnp.repeat(hidden, len(moves), axis=0).at[:, 6].add(moves)
    logits = model.apply(net.cfg, net.params, hidden=moved, program=net.program, start=point).logits
    logits = np.asarray(logits, np.float64)[:, 6]
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[:, prompts.targets[0, 6]]
    ahead, back = np.split(losses, 2)
    np.testing.assert_allclose(found, np.linalg.norm((ahead - back) / (2 * step)), rtol=5e-3)


def first_order(net, prompts, **settings):
    found = gradients(net, prompts, Settings(**settings)).quantities["first_order.loss_increase"]
    return found.by_example["mean"]


def gated(net, gate):
    return net._replace(program=net.program._replace(gate=jnp.asarray(gate, jnp.float32)))


@pytest.mark.parametrize("name", EVERY)
def test_first_order_estimate_is_the_derivative_by_the_gate(name):
    """With one kind of sub-layer switched off, the other's gate scales all that a layer adds."""
    prompts, weights = prompts_and_weights(1)
    for column in (0, 1):
        net = gated(network(name), np.ones((DEPTH, 1)) * (np.arange(2) == column)[None])
        want = [-by_gate[:, column] for _, (_, by_gate) in by_prompt(net, prompts, weights)]
        np.testing.assert_allclose(first_order(net, prompts), want, rtol=5e-4, atol=1e-6 * np.abs(want).max())


def test_first_order_estimate_leaves_protected_tokens_alone():
    """Of both sub-layers together, from a network whose layers add a share of what they would."""
    net, (prompts, weights) = network("pre"), prompts_and_weights(1)

    @jax.jit
    @jax.grad
    def by_share(share, inputs, targets, weights):
        hidden = model.embed(net.cfg, net.params, inputs[None])
        for layer in range(DEPTH):
            out = model.layer_step(net.cfg, net.params, layer, hidden, program=net.program).out
            kept = jnp.where(jnp.arange(7) >= 2, share[layer], 1.0)[None, :, None]
            hidden = hidden + kept * (out - hidden)
        return cross_entropy(model.unembed(net.cfg, net.params, hidden)[0], targets, weights)

    rows = zip(prompts.inputs, prompts.targets, weights, strict=True)
    want = -np.array([by_share(jnp.ones(DEPTH), *row) for row in rows])
    found = first_order(net, prompts, protect=2)
    np.testing.assert_allclose(found, want, rtol=5e-4)
    assert not np.allclose(found, first_order(net, prompts), rtol=1e-2)
    pooled = gradients(net, prompts, Settings(protect=2)).quantities["first_order.loss_increase"]
    np.testing.assert_allclose(pooled.statistics["mean"], (6 * want[0] + 4 * want[1]) / 10, rtol=5e-4)


def test_first_order_estimate_is_the_effect_of_skipping_a_small_layer():
    gate = np.ones((DEPTH, 2))
    gate[1] = 3e-3
    net, (prompts, weights) = gated(network("pre"), gate), prompts_and_weights(1)
    gate[1] = 0
    with_layer, without = (
        np.array([loss for loss, _ in by_prompt(n, prompts, weights)]) for n in (net, gated(net, gate))
    )
    np.testing.assert_allclose(first_order(net, prompts)[:, 1], without - with_layer, rtol=0.1)


def same(one, other, example=slice(None)):
    for name, found in one.quantities.items():
        for statistic, values in found.by_example.items():
            want = other.quantities[name].by_example[statistic][example]
            np.testing.assert_allclose(values, want, rtol=2e-4, atol=1e-5 * np.abs(want).max(), err_msg=name)


def test_padding_does_not_count():
    net, prompts = network("pre"), ragged(LENGTHS)
    shortest = (field[1:2, :5] for field in prompts[:4])
    alone = gradients(net, Prompts(*shortest, prompts.answer[1:2]), Settings())
    same(alone, gradients(net, prompts, Settings()), slice(1, 2))


def test_batches_and_devices_do_not_count():
    """Two rows a device, some of which only fill the batch."""
    net, prompts = network("pre"), text(11, 7)
    found = gradients(net, prompts, Settings(batch_size=2))
    assert len(found.quantities["stream"].by_example["mean"]) == 11
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = Settings(batch_size=11)
    same(gradients(net._replace(batch_sharding=split, devices=8), prompts, whole), found)


def test_parameters_that_are_zero_give_no_ratio_and_no_effect():
    net = network("pre")
    layers = jax.tree.map(lambda leaf: leaf.at[1].set(0.0), net.params["layers"])
    net = net._replace(params={**net.params, "layers": layers})
    found = gradients(net, ragged(LENGTHS), Settings()).quantities
    for group in ("attention", "mlp", "norms", "layer"):
        relative = found[f"relative.{group}"].by_example["mean"]
        assert (relative[:, 1] == 0).all() and (relative[:, [0, 2]] > 0).all()
    effect = found["first_order.loss_increase"].by_example["mean"]
    assert (effect[:, 1] == 0).all() and (effect[:, [0, 2]] != 0).all()
    stream = found["stream"].by_example["mean"]
    np.testing.assert_allclose(stream[:, 1], stream[:, 2], rtol=1e-6)


def test_a_prompt_without_targets_is_refused():
    prompts = ragged(LENGTHS)
    prompts.scored[1] = False
    with pytest.raises(UserError, match=r"probe\.uncounted=1: .* prompt 2 has none"):
        gradients(network("pre"), prompts, Settings())
