"""Continuations: greedy is argmax of full passes, draws have the right odds, rows do not meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import random_params

from depthgrow_jax.errors import UserError
from depthgrow_jax.model import ModelConfig, Sampling, apply, generate, layer_program, reorder
from depthgrow_jax.model import generation as module
from depthgrow_jax.model.generation import bucket, check_sampling, next_tokens

CFG = ModelConfig(vocab_size=61, width=32, heads=4, kv_heads=2, mlp_dim=48)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [60], [7, 7, 7]]
NEW = 20


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, 2)


def greedy(params, prompt, count, program=None):
    """One full pass for every token."""
    length = len(prompt) + count
    run = jax.jit(lambda ids: apply(CFG, params, ids, program=program).logits[0])
    ids = list(prompt)
    while len(ids) < length:
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.asarray(run(jnp.asarray(padded)))[len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_of_full_passes(params):
    found = generate(CFG, params, PROMPTS, max_tokens=NEW)
    for prompt, continuation in zip(PROMPTS, found, strict=True):
        assert continuation.ids == greedy(params, prompt, NEW) and continuation.reason == "length"


def test_under_a_looped_program(params):
    program = reorder(layer_program(CFG, 2), [0, 1, 0, 1, 1])
    (found,) = generate(CFG, params, PROMPTS[:1], max_tokens=NEW, program=program)
    assert found.ids == greedy(params, PROMPTS[0], NEW, program) != greedy(params, PROMPTS[0], NEW)


def test_ends_at_an_end_token_which_is_left_out(params):
    want = [greedy(params, prompt, NEW) for prompt in PROMPTS]
    end = want[0][4]
    found = generate(CFG, params, PROMPTS, max_tokens=NEW, ends=(end, 999))
    for ids, continuation in zip(want, found, strict=True):
        cut = ids.index(end) if end in ids else NEW
        assert continuation.ids == ids[:cut]
        assert continuation.reason == ("end" if cut < NEW else "length")
    assert generate(CFG, params, PROMPTS[:1], max_tokens=NEW, ends=(want[0][0],))[0] == ([], "end")


def test_the_caller_can_end_a_text(params):
    found = generate(
        CFG, params, PROMPTS, max_tokens=NEW, stopped=lambda row, made: row == 1 and len(made) >= 3
    )
    assert [c.reason for c in found] == ["length", "stop", "length"]
    want = greedy(params, PROMPTS[1], NEW)
    assert 3 <= len(found[1].ids) < NEW and found[1].ids == want[: len(found[1].ids)]


def test_all_done_costs_no_more_steps(params, monkeypatch):
    """The device stops when every row has met an end, padding rows included."""
    counts = []
    original = module._go_on

    def counted(*args, **kwargs):
        result = original(*args, **kwargs)
        counts.append(int(result[2]))
        return result

    monkeypatch.setattr(module, "_go_on", counted)
    want = [greedy(params, prompt, NEW) for prompt in PROMPTS]
    ends = {ids[3] for ids in want}
    last = max(next(i for i, token in enumerate(ids) if token in ends) for ids in want)
    generate(CFG, params, PROMPTS, max_tokens=NEW, ends=tuple(ends))
    assert sum(counts) == last


def test_a_row_does_not_depend_on_the_others(params):
    """Neither on their number nor on their length, drawing or not; another seed draws otherwise."""
    drawn = Sampling(temperature=1.0, top_p=0.95, top_k=30)
    for sampling in (Sampling(), drawn):
        together = generate(CFG, params, PROMPTS, max_tokens=NEW, sampling=sampling, seed=3)
        alone = generate(CFG, params, PROMPTS[:1], max_tokens=NEW, sampling=sampling, seed=3)
        assert together[0].ids == alone[0].ids
    again = generate(CFG, params, PROMPTS[:1], max_tokens=NEW, sampling=drawn, seed=4)
    assert again[0].ids != alone[0].ids


def test_one_compilation_for_a_bucket(params):
    def compiled():
        return module._start._cache_size(), module._go_on._cache_size()

    generate(CFG, params, PROMPTS, max_tokens=NEW)
    before = compiled()
    generate(CFG, params, [[1] * 17, [2], [3], [4, 5]], max_tokens=NEW + 3)
    other = reorder(layer_program(CFG, 2), [1, 0])
    generate(CFG, params, PROMPTS, max_tokens=NEW, program=layer_program(CFG, 2, order=[0, 1]))
    middle = compiled()
    generate(CFG, params, PROMPTS, max_tokens=NEW, program=other)
    assert compiled()[1] == before[1]  # decoding: not even for another order
    assert middle[0] == compiled()[0] == before[0] + 1  # prefill: the plain order has a program of its own


def odds(sampling, logits):
    """What `next_tokens` may draw and how likely, by hand."""
    p = np.exp(logits / sampling.temperature)
    order = np.argsort(-p)
    kept = order[: sampling.top_k] if sampling.top_k else order
    p = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    p /= p.sum()
    nucleus, total = [], 0.0
    for token in np.argsort(-p):
        if total >= sampling.top_p:
            break
        nucleus.append(token)
        total += p[token]
    p = np.where(np.isin(np.arange(len(p)), nucleus), p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.0, top_k=2),
        Sampling(1.0, top_p=0.7),
        Sampling(2.0, top_k=4, top_p=0.6),
        Sampling(1.0, top_p=0.01),
        Sampling(1.0, top_k=99),
    ],
)
def test_draws_have_the_right_odds(sampling):
    logits = np.array([0.3, 2.0, -1.0, 1.5, 0.9], np.float32)
    draws = 20000
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = next_tokens(jnp.tile(logits, (draws, 1)), keys, sampling)
    share = np.bincount(np.asarray(tokens), minlength=5) / draws
    want = odds(sampling, logits.astype(np.float64))
    assert ((want == 0) == (share == 0)).all()
    np.testing.assert_allclose(share, want, atol=5 * np.sqrt(0.25 / draws))


def test_cold_is_greedy():
    logits = jnp.asarray([[5.0, -3.0, 40.0, 2.0, 1.0]])
    keys = jax.random.split(jax.random.key(0), 1)
    for sampling in (Sampling(1e-6), Sampling(1e-6, top_p=0.5), Sampling(1e-6, top_k=2)):
        assert next_tokens(logits, keys, sampling).tolist() == [2]


def test_buckets():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 33, 49, 65, 100, 513)] == [
        16,
        16,
        24,
        24,
        32,
        48,
        64,
        96,
        128,
        768,
    ]


def test_refusals(params):
    for sampling, message in (
        (Sampling(-1.0), r"temperature=-1.0: must be 0"),
        (Sampling(float("nan")), r"temperature=nan: must be"),
        (Sampling(1e-38), r"temperature=1e-38: must be 0 \(greedy\) or at least 1e-06"),
        (Sampling(1.0, -1), r"top_k=-1: must be 0"),
        (Sampling(1.0, 0, 0.0), r"top_p=0.0: must lie in \(0, 1\]"),
        (Sampling(1.0, 0, 1.5), r"top_p=1.5: must lie"),
    ):
        with pytest.raises(UserError, match=message):
            check_sampling(sampling)
    for prompts, message in (
        ([], r"prompts=\[\]: must be at least one"),
        ([[1], []], r"prompts\[1\]=\[\]: must hold"),
        ([[1], [5, 61]], r"prompts\[1\]=61: is outside the vocabulary of 61"),
        ([[-1]], r"prompts\[0\]=-1: is outside"),
    ):
        with pytest.raises(UserError, match=message):
            generate(CFG, params, prompts, max_tokens=2)
    with pytest.raises(UserError, match=r"max_tokens=0: must be at least 1"):
        generate(CFG, params, PROMPTS, max_tokens=0)
