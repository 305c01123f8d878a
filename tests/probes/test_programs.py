"""Changed orders: written out by hand, and run against plain loops over layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import ARCHITECTURES, EVERY, subject, text

from depthgrow_jax import model
from depthgrow_jax.probes import programs

DEPTH = 4


def test_orders_written_out():
    assert programs.plain(3) == programs.Change((0, 1, 2), 0)
    assert programs.skip(6, 1, 2) == programs.Change((0, 3, 4, 5), 1)
    assert programs.skip(6, 4, 2) == programs.Change((0, 1, 2, 3), 4)
    assert programs.skip(6, 0, 6) == programs.Change((), 0)
    assert programs.swap(6, 1, 2) == programs.Change((0, 3, 4, 1, 2, 5), 1)
    assert programs.swap(6, 4, 1) == programs.Change((0, 1, 2, 3, 5, 4), 4)
    assert programs.swap_any(6, 1, 2, 5) == programs.Change((0, 2, 3, 4, 1, 5), 1)
    assert programs.swap_any(6, 0, 3, 4) == programs.Change((3, 0, 1, 2, 4, 5), 0)
    assert programs.reverse(6, 2, 3) == programs.Change((0, 1, 4, 3, 2, 5), 2)
    assert programs.repeat(6, 1, 2) == programs.Change((0, 1, 2, 1, 2, 3, 4, 5), 3)
    assert programs.repeat(6, 5, 1) == programs.Change((0, 1, 2, 3, 4, 5, 5), 6)
    assert programs.transplant(6, 2, 2) == programs.Change((0, 1, 8, 9, 4, 5), 2)
    assert programs.parallel(6, 2, 2) == programs.Change(
        (0, 1, 2, 3, 4, 5), 2, (False, False, False, True, False, False), (1, 1, 0.5, 0.5, 1, 1)
    )


def test_random_orders_move_only_the_run_and_are_never_the_plain_one():
    seen = set()
    for seed in range(60):
        change = programs.permute(6, 2, 3, seed)
        assert change.order[:2] == (0, 1) and change.order[5:] == (5,)
        assert sorted(change.order) == list(range(6))
        assert change.first == next(k for k in range(6) if change.order[k] != k)
        seen.add(change.order[2:5])
    assert len(seen) == 5, "all orders of three layers but the plain one"
    assert programs.permute(6, 2, 3, (1, 2)) == programs.permute(6, 2, 3, (1, 2))
    assert programs.permute(6, 2, 2, 0) == programs.swap(6, 2, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: programs.skip(6, 5, 2),
        lambda: programs.skip(6, -1, 2),
        lambda: programs.skip(6, 0, 0),
        lambda: programs.swap(6, 3, 2),
        lambda: programs.swap_any(6, 1, 1, 3),
        lambda: programs.permute(6, 0, 1, 0),
    ],
)
def test_runs_that_do_not_exist_are_refused(make):
    with pytest.raises(ValueError, match="layer"):
        make()


def test_changes_are_stacked_to_one_number_of_steps():
    stacked = programs.stack(
        [programs.skip(3, 1, 1), programs.parallel(3, 0, 2), programs.repeat(3, 2, 1)], 5
    )
    np.testing.assert_array_equal(stacked.order[:, :4], [[0, 2, 0, 0], [0, 1, 2, 0], [0, 1, 2, 2]])
    np.testing.assert_array_equal(stacked.start, [1, 0, 3])
    np.testing.assert_array_equal(stacked.stop, [2, 3, 4])
    np.testing.assert_array_equal(stacked.weight[1], [0.5, 0.5, 1, 1, 1])
    np.testing.assert_array_equal(stacked.hold[1], [False, True, False, False, False])
    assert stacked.order.shape == (3, 5)
    with pytest.raises(ValueError, match="4 steps does not fit into 3"):
        programs.stack([programs.repeat(3, 2, 1)], 3)


@functools.partial(jax.jit, static_argnames="cfg")
def run_stacked(cfg, params, program, streams, changes):
    return programs.run_programs(cfg, params, program, streams, changes)


@functools.partial(jax.jit, static_argnames="cfg")
def final_stream(cfg, params, tokens, program):
    return model.apply(cfg, params, tokens, program=program).hidden


@functools.partial(jax.jit, static_argnames="cfg")
def step(cfg, params, k, hidden, read, program):
    return model.layer_step(cfg, params, k, hidden, program=program, read=read)


@functools.cache
def toy(name):
    """Network, ids, clean streams."""
    network, tokens = subject(DEPTH, **ARCHITECTURES[name]), text(2).inputs
    clean = [jax.jit(model.embed, static_argnums=0)(network.cfg, network.params, tokens)]
    for k in range(DEPTH):
        clean.append(step(network.cfg, network.params, k, clean[-1], clean[-1], network.program).out)
    return network, tokens, jnp.stack(clean)


def close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("name", EVERY)
def test_sweep_is_a_loop_of_full_forward_passes(name):
    network, tokens, streams = toy(name)
    cfg, params, program = network[:3]
    changes = [
        programs.plain(DEPTH),
        programs.plain(DEPTH, DEPTH),
        programs.skip(DEPTH, 1, 1),
        programs.skip(DEPTH, 3, 1),
        programs.swap(DEPTH, 1, 1),
        programs.swap_any(DEPTH, 1, 2, 4),
        programs.reverse(DEPTH, 0, 3),
        programs.repeat(DEPTH, 1, 1),
        programs.repeat(DEPTH, 3, 1),
        programs.permute(DEPTH, 1, 3, 7),
    ]
    finals = run_stacked(cfg, params, program, streams, programs.stack(changes, 2 * DEPTH))
    for change, final in zip(changes, finals, strict=True):
        close(final, final_stream(cfg, params, tokens, model.reorder(program, np.asarray(change.order))))
    plain = final_stream(cfg, params, tokens, program)
    for same in (0, 1):
        close(finals[same], plain)
    assert all(np.abs(final - plain).max() > 1e-3 for final in finals[2:]), "every other order does something"
    # Nothing shared: all of it run from the embedding.
    scratch = [change._replace(first=0) for change in changes]
    close(run_stacked(cfg, params, program, streams, programs.stack(scratch, 2 * DEPTH)), finals)


@pytest.mark.parametrize("name", EVERY)
def test_skipping_is_a_gate_of_0_and_a_network_without_the_layer(name):
    network, tokens, streams = toy(name)
    cfg, params, program = network[:3]
    got = run_stacked(
        cfg, params, program, streams, programs.stack([programs.skip(DEPTH, 1, 1)] * 10, 2 * DEPTH)
    )
    gated = program._replace(gate=program.gate.at[1].set(0.0))
    close(got[0], final_stream(cfg, params, tokens, gated))
    without = {**params, "layers": jax.tree.map(lambda x: np.delete(x, 1, axis=0), params["layers"])}
    factors = model.LayerProgram(
        None, *(np.delete(x, 1, axis=0) for x in (program.gate, program.norm_scale, program.residual_scale))
    )
    close(got[0], final_stream(cfg, without, tokens, factors))


@pytest.mark.parametrize("name", EVERY)
def test_parallel_layers_by_hand(name):
    network, _, streams = toy(name)
    cfg, params, program = network[:3]
    h = streams[1]
    outputs = [step(cfg, params, k, h, h, program).out for k in (1, 2, 3)]
    got = run_stacked(
        cfg, params, program, streams, programs.stack([programs.parallel(DEPTH, 1, 3)] * 10, 2 * DEPTH)
    )
    close(got[0], np.mean([np.asarray(x) for x in outputs], axis=0))


def test_held_steps_of_any_order_by_hand():
    network, _, streams = toy("pre_lns")
    cfg, params, program = network[:3]
    # Layer 2 reads h_0; layers 0 and 3 read what layer 2 read, layer 1 reads what they left.
    change = programs.Change((2, 0, 3, 1), 0, (False, True, True, False), (1.0, 0.25, -1.0, 2.0))
    x = read = streams[0]
    for layer, held, weight in zip(change.order, change.hold, change.weight, strict=True):
        read = read if held else x
        tap = step(cfg, params, layer, x, read, program)
        x = x + weight * (tap.out - x)
    got = run_stacked(cfg, params, program, streams, programs.stack([change] * 10, 2 * DEPTH))
    close(got[0], x)


def test_weights_do_not_reach_into_the_layer_but_gates_of_the_program_do():
    network, _, streams = toy("pre")
    cfg, params = network[:2]
    program = model.layer_program(cfg, DEPTH, gate=[1.0, 0.5, 1.0, 0.25])
    tap = step(cfg, params, 3, streams[0], streams[0], program)
    change = programs.Change((3,), 0, weight=(0.5,))
    got = run_stacked(cfg, params, program, streams, programs.stack([change] * 10, 2 * DEPTH))
    close(got[0], streams[0] + 0.5 * tap.attn + 0.5 * tap.mlp)


def test_any_number_of_orders_compiles_once():
    network, prompts = subject(3), text(2)
    cfg, params, program = network[:3]
    counted = np.ones(prompts.inputs.shape, bool)
    streams, _ = programs.clean_run(cfg, params, program, prompts.inputs, prompts.targets, counted, 1 << 20)
    before = programs._effects._cache_size()
    sets = [
        [programs.plain(3)],
        [programs.skip(3, s, 1) for s in range(3)] + [programs.repeat(3, 0, 3)],
        [programs.parallel(3, 0, n) for n in (2, 3)] * 5,
    ]
    for changes in sets:
        found = programs.sweep(
            cfg, params, program, streams, prompts.targets, counted, changes, chunk_bytes=1 << 20
        )
        assert found["kl"][0].shape == (4, len(changes), 2)
        assert found["kl"][1].shape == (len(changes), 2)
    assert programs._effects._cache_size() - before == 1
