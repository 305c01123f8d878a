"""A forward pass cut at any layer is the plain one: prefixes can be shared, early exits read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import random_params

from depthgrow_jax.model import ModelConfig, apply, embed, layer_program, run_layers, unembed

# Position-dependent factors: a cut that restarted the count of layers would show.
CFG = ModelConfig(
    vocab_size=64,
    width=32,
    heads=4,
    kv_heads=2,
    mlp_dim=48,
    norm_placement="pre_lns",
    residual_scaling="depth",
)
DEPTH = 4
TOKENS = jnp.asarray(np.random.default_rng(4).integers(0, 64, (2, 16)))
PROGRAMS = {"stored_order": None, "given_order": [1, 0, 3, 3, 2]}


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, DEPTH)


def program_of(name):
    order = PROGRAMS[name]
    return layer_program(CFG, len(order or range(DEPTH)), order=order)


@pytest.fixture(scope="module", params=PROGRAMS)
def streams(request, params):
    """The program and the stream before each of its steps, and after the last: `[K + 1, B, T, D]`."""
    program = program_of(request.param)
    got = jax.jit(lambda p: apply(CFG, p, TOKENS, program=program, taps={"h": lambda t: t.h}))(params)
    return program, np.concatenate([got.taps["h"], got.hidden[None]])


def test_python_and_traced_bounds_give_the_plain_streams(params, streams):
    program, stream = streams
    compilations = []

    @jax.jit
    def traced(hidden, start, stop):
        compilations.append(1)
        return run_layers(CFG, params, hidden, program=program, start=start, stop=stop)[0]

    for start, stop in [(0, 2), (2, 4), (1, 3), (0, program.steps), (2, 2)]:
        close = {"rtol": 0, "atol": 1e-6 * np.abs(stream).max()}
        got = traced(jnp.asarray(stream[start]), start, stop)
        np.testing.assert_allclose(got, stream[stop], **close)
    assert len(compilations) == 1, "one compilation serves every pair of bounds"

    @jax.jit
    def cut(hidden):
        return run_layers(
            CFG, params, hidden, program=program, start=1, stop=3, taps={"out": lambda t: t.out}
        )

    got, taps = cut(jnp.asarray(stream[1]))
    np.testing.assert_allclose(got, stream[3], **close)
    np.testing.assert_allclose(taps["out"], stream[2:4], **close)


def test_an_early_exit_reads_the_logits_off_the_stream(params, streams):
    program, stream = streams
    got = jax.jit(lambda p: apply(CFG, p, TOKENS, program=program, stop=2))(params)
    np.testing.assert_allclose(got.hidden, stream[2], rtol=0, atol=1e-6 * np.abs(stream).max())
    np.testing.assert_allclose(got.logits, unembed(CFG, params, got.hidden), atol=1e-5)
    resumed = jax.jit(lambda p, h: apply(CFG, p, hidden=h, program=program, start=2).hidden)
    np.testing.assert_allclose(
        resumed(params, got.hidden), stream[-1], rtol=0, atol=1e-6 * np.abs(stream).max()
    )


def test_no_layers_leave_the_embedding(params):
    hidden = apply(CFG, params, TOKENS, stop=0).hidden
    np.testing.assert_array_equal(hidden, embed(CFG, params, TOKENS))
    np.testing.assert_array_equal(hidden, params["embed"]["table"][TOKENS])


def test_a_cut_with_python_bounds_is_differentiable_and_touches_only_its_layers(params):
    hidden = embed(CFG, params, TOKENS)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(run_layers(CFG, p, hidden, start=1, stop=3)[0]))))(
        params
    )
    moved = np.abs(grads["layers"]["attn"]["q"]["kernel"]).max(axis=(1, 2)) > 0
    assert moved.tolist() == [False, True, True, False]


def test_taps_with_traced_bounds_are_refused(params):
    hidden = embed(CFG, params, TOKENS)
    with pytest.raises(ValueError, match="taps need Python integers"):
        run_layers(CFG, params, hidden, stop=jnp.asarray(2), taps={"h": lambda t: t.h})


def test_tokens_and_hidden_exclude_each_other(params):
    with pytest.raises(ValueError, match="tokens or hidden"):
        apply(CFG, params)
    with pytest.raises(ValueError, match="tokens or hidden"):
        apply(CFG, params, TOKENS, hidden=embed(CFG, params, TOKENS))


def test_ids_outside_the_vocabulary_do_not_pass_for_tokens(params):
    assert np.isnan(embed(CFG, params, jnp.asarray([[0, 64]]))[0, 1]).all()
