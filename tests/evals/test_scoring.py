"""Log-likelihoods equal a plain forward pass on each request alone, whatever the batch, tree or prefix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_forward import forward, random_params

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals import scoring
from depthgrow_jax.evals.scoring import likelihoods_by_exit, likelihoods_by_program, log_likelihoods
from depthgrow_jax.evals.trees import Request, batches, trees_of
from depthgrow_jax.model import ModelConfig, init, layer_program, reorder
from depthgrow_jax.probes.inputs import Subject
from depthgrow_jax.probes.lens import Translators

CFG = ModelConfig(vocab_size=50, width=24, heads=4, kv_heads=2, mlp_dim=32)
DEPTH = 3


def subject_of(cfg=CFG, program=None):
    return Subject(cfg, random_params(cfg, DEPTH), program or layer_program(cfg, DEPTH))


def some_requests(seed=0, shared=200):
    """Few-shot trees with one to four branches, a context without them, single tokens, duplicates."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high: tuple(rng.integers(0, 50, rng.integers(low, high)).tolist())  # noqa: E731
    shots = tuple(rng.integers(0, 50, shared).tolist())
    requests = []
    for _ in range(6):
        context = shots + draw(1, 12)
        requests += [Request(context, draw(1, 6)) for _ in range(4)]
    requests += [Request(shots, (7,)), Request((3,), (4,)), Request((3,), draw(20, 21)), requests[2]]
    requests += [Request(draw(1, 30), draw(1, 9)) for _ in range(4)]
    return [requests[i] for i in rng.permutation(len(requests))]


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def one_by_one(cfg, params, requests, order=None, gate=None):
    """By the float64 network, each request as one row."""
    found = []
    for context, continuation, _ in requests:
        ids = np.array([context + continuation])
        logits = forward(cfg, params, ids, order, gate).logits[0]
        rows = logits[len(context) - 1 : -1]
        total = log_softmax(rows)[np.arange(len(continuation)), list(continuation)].sum()
        found.append((total, (rows.argmax(-1) == continuation).all()))
    return found


def assert_close(found, want, atol=2e-4):
    np.testing.assert_allclose([f.log_prob for f in found], [w[0] for w in want], rtol=1e-5, atol=atol)
    assert [f.greedy for f in found] == [w[1] for w in want]


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_equal_to_each_request_alone(placement):
    subject = subject_of(dataclasses.replace(CFG, norm_placement=placement))
    requests = some_requests()
    want = one_by_one(subject.cfg, subject.params, requests)
    assert_close(log_likelihoods(subject, requests), want)
    some_greedy = [
        Request(r.context, (int(forward(subject.cfg, subject.params, [r.context]).logits[0, -1].argmax()),))
        for r in requests[:3]
    ]
    assert all(f.greedy for f in log_likelihoods(subject, some_greedy))


def test_batch_size_and_order_do_not_matter():
    subject, requests = subject_of(), some_requests(1)
    once = log_likelihoods(subject, requests, batch_tokens=4096)
    for size in (1, 64, 300):
        again = log_likelihoods(subject, requests[::-1], batch_tokens=size)[::-1]
        np.testing.assert_allclose([f.log_prob for f in again], [f.log_prob for f in once], atol=1e-5)
        assert [f.greedy for f in again] == [f.greedy for f in once]


def test_uniform_logits_give_n_log_v():
    params = init(CFG, jax.random.key(0), DEPTH)
    params["embed"]["table"] = jnp.zeros_like(params["embed"]["table"])
    requests = some_requests(2)
    subject = Subject(CFG, params, layer_program(CFG, DEPTH))
    for request, found in zip(requests, log_likelihoods(subject, requests), strict=True):
        assert found.log_prob == pytest.approx(-len(request.continuation) * np.log(50), abs=1e-5)


@pytest.mark.parametrize("score", [log_likelihoods, likelihoods_by_exit])
def test_a_network_that_is_not_finite_is_refused(score):
    params = init(CFG, jax.random.key(0), DEPTH)
    params["embed"]["table"] = params["embed"]["table"].at[3].set(jnp.nan)
    with pytest.raises(UserError, match="likelihood that is not a number"):
        score(Subject(CFG, params, layer_program(CFG, DEPTH)), some_requests(2))


def test_under_programs_with_one_compilation():
    subject, requests = subject_of(), some_requests(3)
    orders = [[0, 1, 2, 1, 2], [2, 1, 0, 0, 0], [0, 0, 1, 1, 2]]
    programs = [reorder(subject.program, order) for order in orders]
    likelihoods_by_program(subject, requests, programs[:1])
    before = scoring._score._cache_size()
    found = likelihoods_by_program(subject, requests, programs)
    assert scoring._score._cache_size() == before
    for order, likelihoods in zip(orders, found, strict=True):
        assert_close(likelihoods, one_by_one(CFG, subject.params, requests, order), atol=5e-4)
    with pytest.raises(ValueError, match="same number of steps"):
        likelihoods_by_program(subject, requests, [programs[0], subject.program])


def test_a_gate_of_zero_is_a_layer_less():
    subject, requests = subject_of(), some_requests(4)
    skipped = subject.program._replace(gate=jnp.ones((DEPTH, 2)).at[1].set(0.0))
    found = log_likelihoods(subject._replace(program=skipped), requests)
    assert_close(found, one_by_one(CFG, subject.params, requests, [0, 2]))


def test_every_exit():
    subject, requests = subject_of(), some_requests(5)
    found = likelihoods_by_exit(subject, requests)
    assert len(found) == DEPTH + 1
    for point in range(1, DEPTH + 1):
        assert_close(found[point], one_by_one(CFG, subject.params, requests, list(range(point))))
    last = [f.log_prob for f in log_likelihoods(subject, requests)]
    np.testing.assert_allclose([f.log_prob for f in found[-1]], last, atol=1e-5)


def test_exits_through_a_tuned_lens():
    """A translator that doubles the stream leaves a normed exit as it is; one that negates it does not."""
    subject, requests = subject_of(), some_requests(6)
    plain = likelihoods_by_exit(subject, requests)
    eye = jnp.tile(jnp.eye(CFG.width), (DEPTH, 1, 1))
    doubled = likelihoods_by_exit(subject, requests, lens=Translators(eye, jnp.zeros((DEPTH, CFG.width))))
    negated = likelihoods_by_exit(
        subject, requests, lens=Translators(-2 * eye, jnp.zeros((DEPTH, CFG.width)))
    )
    for point in range(DEPTH + 1):
        a, b, c = (np.array([f.log_prob for f in run[point]]) for run in (plain, doubled, negated))
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3)
        assert (np.abs(a - c).max() < 1e-6) == (point == DEPTH)


def test_on_a_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    requests = some_requests(7)
    one = log_likelihoods(subject_of(), requests)
    eight = log_likelihoods(subject_of()._replace(batch_sharding=sharding, devices=8), requests)
    np.testing.assert_allclose([f.log_prob for f in one], [f.log_prob for f in eight], atol=1e-5)


def test_a_shared_context_is_read_once():
    """Four choices after one context, and few-shot examples before all of them."""
    shots = tuple(i % 40 for i in range(300))
    requests = [Request((*shots, 41 + i, 7), (c, 1, 2)) for i in range(5) for c in (1, 2, 3, 4)]
    trees = trees_of(requests)
    assert len(trees) == 5 and all(tree.size == 302 + 4 * 2 and tree.targets == 12 for tree in trees)
    (batch,) = batches(requests, 4096)
    assert batch.prefix == shots and not batch.linear
    assert [tree.size for tree in batch.trees] == [2 + 4 * 2] * 5
    read = (batch.rows.branch[: len(batch.trees)] >= 0).sum()
    assert read == 5 * 10  # 20 requests of 304 tokens each would read 6,080


@pytest.mark.parametrize(
    ("common", "own", "prefixes"),
    [
        # Ten trees in each half. Shared by all: 20 x 19 < 1,024; by halves: 2 x (220 x 9 - 1,024) are saved.
        (20, 200, {220: 10}),
        # 200 x 19 - 1,024 = 2,776 are saved by one prefix, 2 x (220 x 9 - 1,024) = 1,912 by two.
        (200, 20, {200: 20}),
        # 30 x 19 < 1,024 and 40 x 9 < 1,024: none is worth a pass.
        (30, 10, {0: 20}),
        # The halves are the same ten, and one of them is the beginning itself, of which a token is left.
        (200, 0, {199: 10}),
    ],
)
def test_beginnings_that_save_the_most(common, own, prefixes):
    start = tuple(i % 7 for i in range(common))
    requests = [
        Request((*start, *[10 + half] * own, *[30 + i] * (own + i > 0)), (3, i))
        for half in (0, 1)
        for i in range(10)
    ]
    found = {}
    for batch in batches(requests, 100_000):
        found[len(batch.prefix)] = len(batch.trees)
        assert all((*batch.prefix, *tree.trunk) in {r.context for r in requests} for tree in batch.trees)
    assert found == prefixes


def test_many_branches_are_several_trees():
    """Contexts cut to the same few tokens must not make one row of everything."""
    requests = [Request((1, 2), (i % 50, j % 50, 3)) for i in range(50) for j in range(10)]
    trees = trees_of(requests)
    assert len(trees) == 12 and all(tree.targets <= 128 for tree in trees)
    assert sorted(i for tree in trees for wanted in tree.wanted for i in wanted) == list(range(500))
    subject = subject_of()
    assert_close(log_likelihoods(subject, requests)[::50], one_by_one(CFG, subject.params, requests[::50]))


def test_another_length_where_it_saves_much_padding():
    """Of 8, 16, ..., 64 tokens: eight each, of which another length saves 32 x 32 at most; and many more."""
    rng = np.random.default_rng(0)
    for times, lengths in ((1, {64}), (80, {8, 16, 24, 32, 40, 48, 56, 64})):
        requests = [
            Request(tuple(rng.integers(0, 50, size).tolist()), (1,))
            for size in range(8, 65, 8)
            for _ in range(8 * times)
        ]
        assert {batch.rows.tokens.shape[1] for batch in batches(requests, 256)} == lengths


def test_few_trees_are_not_padded_to_a_large_batch():
    requests = [Request((i, 2, 3), (i + 1,)) for i in range(5)]
    (batch,) = batches(requests, 100_000)
    assert batch.rows.tokens.shape[0] == 8
    (batch,) = batches(requests, 100_000, multiple=3)
    assert batch.rows.tokens.shape[0] == 9


def test_refusals():
    subject = subject_of()
    for request, message in (
        (Request((), (1,)), r"requests\[1\]: context and continuation must hold at least one"),
        (Request((1,), ()), r"requests\[1\]: context and continuation must hold"),
        (Request((1,), (50,)), r"requests\[1\]: token id 50 is outside the vocabulary of 50"),
        (Request((-1,), (5,)), r"requests\[1\]: token id -1 is outside"),
    ):
        with pytest.raises(UserError, match=message):
            log_likelihoods(subject, [Request((1,), (2,)), request])
    encoder = subject_of(dataclasses.replace(CFG, causal=False))
    with pytest.raises(UserError, match="bidirectional"):
        log_likelihoods(encoder, [Request((1,), (2,))])
    assert log_likelihoods(subject, []) == []
