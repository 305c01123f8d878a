"""Exact log-likelihoods of continuations: few passes, few compilations, any order of layers, every exit.

B rows, T tokens, S sources, C targets of a batch of trees (`evals.trees`); K steps, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.trees import PADDING, Batch, Request, Rows, batches
from depthgrow_jax.model import LayerProgram, ModelConfig, Params, embed, layer_step, rotation, unembed
from depthgrow_jax.model.layers import causal_attention
from depthgrow_jax.probes.inputs import Subject, Watch, no_watch
from depthgrow_jax.probes.lens import Translators, apply_translators

# Tokens of a batch on a CPU, and on each accelerator.
_CPU_TOKENS, _DEVICE_TOKENS = 2048, 16384
# Rows of logits that exist at once.
_LOGIT_ROWS = 256


class Likelihood(NamedTuple):
    """`log_prob`, nats, of all tokens of a continuation; `greedy`: each of them was the most likely one."""

    log_prob: float
    greedy: bool


def log_likelihoods(
    subject: Subject,
    requests: Sequence[Request],
    *,
    batch_tokens: int = 0,
    watch: Watch = no_watch,
) -> list[Likelihood]:
    """The likelihood of every request, in their order.

    Args:
      subject: the network, as its program runs it.
      batch_tokens: tokens of a batch; 0 chooses by the device.
      watch: passes batches on and shows how many are done.

    Raises `UserError` for an empty context or continuation, an id outside the vocabulary, a bidirectional
    network, and one whose likelihoods are not numbers.
    """
    (found,) = _scored(subject, requests, (subject.program,), batch_tokens, watch)
    return found


def likelihoods_by_program(
    subject: Subject,
    requests: Sequence[Request],
    programs: Sequence[LayerProgram],
    *,
    batch_tokens: int = 0,
    watch: Watch = no_watch,
) -> list[list[Likelihood]]:
    """`log_likelihoods` under each of `programs`, of the same number of steps: one compilation a bucket.

    Raises `UserError` as `log_likelihoods`; `ValueError` for programs of unequal length.
    """
    if len({program.steps for program in programs}) != 1:
        raise ValueError("programs of one sweep must have the same number of steps")
    return _scored(subject, requests, programs, batch_tokens, watch)


def likelihoods_by_exit(
    subject: Subject,
    requests: Sequence[Request],
    *,
    lens: Translators | None = None,
    batch_tokens: int = 0,
    watch: Watch = no_watch,
) -> list[list[Likelihood]]:
    """`log_likelihoods` read off the stream after 0, 1, ..., K steps.

    Args:
      lens: of a tuned lens, applied before the head at all points but the last, which is the model's own
        output; None is the logit lens.

    Raises `UserError` as `log_likelihoods`.
    """
    check_requests(subject, requests)
    points = subject.steps + 1
    found = [[Likelihood(0.0, False)] * len(requests) for _ in range(points)]
    for batch, rows in _placed(subject, requests, batch_tokens, watch):
        prefix = _prefix(subject, subject.program, batch.prefix)
        log_prob, greedy = _exits(
            subject.cfg, subject.params, subject.program, rows, prefix, lens, linear=batch.linear
        )
        for point in range(points):
            _collect(batch, np.asarray(log_prob[point]), np.asarray(greedy[point]), found[point])
    return found


def check_requests(subject: Subject, requests: Sequence[Request]) -> None:
    """Raises `UserError` for requests that the network cannot answer."""
    if not subject.cfg.causal:
        raise UserError("a bidirectional network gives no likelihoods of continuations")
    size = subject.cfg.vocab_size
    for index, (context, continuation, _) in enumerate(requests):
        if not context or not continuation:
            raise UserError(f"requests[{index}]: context and continuation must hold at least one token each")
        bad = next((i for i in (*context, *continuation) if not 0 <= i < size), None)
        if bad is not None:
            raise UserError(f"requests[{index}]: token id {bad} is outside the vocabulary of {size}")


def _scored(
    subject: Subject,
    requests: Sequence[Request],
    programs: Sequence[LayerProgram],
    batch_tokens: int,
    watch: Watch,
) -> list[list[Likelihood]]:
    check_requests(subject, requests)
    found = [[Likelihood(0.0, False)] * len(requests) for _ in programs]
    prefixes: dict[tuple[int, tuple[int, ...]], Any] = {}
    for batch, rows in _placed(subject, requests, batch_tokens, watch):
        for number, program in enumerate(programs):
            # Batches of one prefix follow each other.
            key = (number, batch.prefix)
            if key not in prefixes:
                prefixes = {k: kept for k, kept in prefixes.items() if k[1] == batch.prefix}
                prefixes[key] = _prefix(subject, program, batch.prefix)
            log_prob, greedy = _score(
                subject.cfg, subject.params, program, rows, prefixes[key], linear=batch.linear
            )
            _collect(batch, np.asarray(log_prob), np.asarray(greedy), found[number])
    return found


def _placed(
    subject: Subject, requests: Sequence[Request], batch_tokens: int, watch: Watch
) -> Iterator[tuple[Batch, Rows]]:
    """Batches, and their rows on the devices."""
    if not batch_tokens:
        on_cpu = jax.default_backend() == "cpu"
        batch_tokens = _CPU_TOKENS if on_cpu else _DEVICE_TOKENS * subject.devices
    planned = list(batches(requests, batch_tokens, subject.devices))
    for batch in watch("scoring", len(planned), iter(planned)):
        yield batch, Rows(*(jax.device_put(field, subject.batch_sharding) for field in batch.rows))


def _collect(batch: Batch, log_prob: np.ndarray, greedy: np.ndarray, found: list[Likelihood]) -> None:
    """Sums the targets `[B, C]` of each branch, and gives them to the requests that asked."""
    for row, tree in enumerate(batch.trees):
        seen = 0
        for branch, wanted in zip(tree.branches, tree.wanted, strict=True):
            span = slice(seen, seen + len(branch))
            total = float(log_prob[row, span].sum(dtype=np.float64))
            if math.isnan(total):
                raise UserError("the network gives a likelihood that is not a number: it is not finite")
            likelihood = Likelihood(total, bool(greedy[row, span].all()))
            for index in wanted:
                found[index] = likelihood
            seen += len(branch)


def _prefix(subject: Subject, program: LayerProgram, ids: tuple[int, ...]):
    """Keys and values `[K, 1, P, kv_heads, H]` of a prefix; None where there is none."""
    if not ids:
        return None
    return _read_prefix(subject.cfg, subject.params, program, jnp.asarray([ids], jnp.int32))


@functools.partial(jax.jit, static_argnames="cfg")
def _read_prefix(cfg: ModelConfig, params: Params, program: LayerProgram, tokens):
    rotary = rotation(cfg, jnp.arange(tokens.shape[1])[None])

    def body(x, k):
        read = []

        def attend(query, key, value):
            read.extend((key, value))
            return causal_attention(query, key, value)

        tap = layer_step(cfg, params, k, x, program=program, rotary=rotary, attend=attend)
        return tap.out, tuple(read)

    return jax.lax.scan(body, embed(cfg, params, tokens), jnp.arange(program.steps))[1]


def _attention_behind(past, query, key, value, visible):
    """Attention over keys and values `past`, `[1, P, K, H]`, that all rows share, and then over their own.

    What the rows share is one matmul for all of them, and copied for none: with five examples behind it the
    attention of a short prompt takes a fourth of the time (measured, CPU).

    Args:
      query: `[B, T, K * G, H]`; key, value: `[B, T, K, H]`; visible: `[B, T, T]`, which own keys are seen.
    """
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, width) * width**-0.5
    own = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32)
    own = jnp.where(visible[:, None, None], own, -jnp.inf)
    by_head = jnp.moveaxis(query, 2, 0)
    shared = jnp.einsum("kbtgh,pkh->kbtgp", by_head, past[0][0], preferred_element_type=jnp.float32)
    # Both parts are taken relative to their common maximum, and divided by their common sum at the end.
    most = jnp.maximum(jnp.max(shared, axis=-1), jnp.einsum("bkgt->kbtg", jnp.max(own, axis=-1)))
    shared = jnp.exp(shared - most[..., None])
    own = jnp.exp(own - jnp.einsum("kbtg->bkgt", most)[..., None])
    total = jnp.sum(shared, axis=-1) + jnp.einsum("bkgt->kbtg", jnp.sum(own, axis=-1))
    mixed = jnp.einsum("kbtgp,pkh->kbtgh", shared.astype(value.dtype), past[1][0])
    mixed += jnp.einsum("bkgts,bskh->kbtgh", own.astype(value.dtype), value)
    mixed = (mixed / total[..., None]).astype(value.dtype)
    return jnp.moveaxis(mixed, 0, 2).reshape(batch, length, heads, width)


def _run(cfg, params, program, rows: Rows, prefix, linear: bool, tap):
    """The stream after the last step, `[B, T, D]`, and what `tap` makes of that after each, `[K, ...]`."""
    rotary = rotation(cfg, rows.position)
    order = jnp.arange(rows.tokens.shape[1])
    seen = rows.branch[:, None, :]
    mask = (order[:, None] >= order[None])[None] & ((seen == 0) | (seen == rows.branch[:, :, None]))
    before = jnp.arange(program.steps), prefix

    def body(x, step):
        k, past = step

        def attend(query, key, value):
            if past is None and linear:
                return causal_attention(query, key, value)
            if past is None:
                return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
            return _attention_behind(past, query, key, value, mask)

        out = layer_step(cfg, params, k, x, program=program, rotary=rotary, attend=attend).out
        return out, tap(out)

    return jax.lax.scan(body, embed(cfg, params, rows.tokens), before)


def _targets(cfg, params, hidden, rows: Rows):
    """Log probability and greediness `[B, C]` of the targets of `rows`, read off `hidden [B, S, D]`."""
    batch, count, width = hidden.shape
    # Cut along the sources: rows of a batch may lie on several devices.
    each = max(1, min(count, _LOGIT_ROWS // batch))
    chunks = -(-count // each)
    hidden = jnp.pad(hidden, ((0, 0), (0, chunks * each - count), (0, 0))).reshape(batch, chunks, each, width)

    def read(logits, source, target):
        """Of one row: a map over rows stays on the device of each."""
        chosen = logits[source, jnp.maximum(target, 0)] - jax.nn.logsumexp(logits, axis=-1)[source]
        return chosen, jnp.argmax(logits, axis=-1)[source] == target

    def chunk(log_prob_and_greedy, part):
        log_prob, greedy = log_prob_and_greedy
        first, states = part
        # Targets of other chunks read something here, which is not kept.
        source = jnp.clip(rows.source - first, 0, each - 1)
        mine = rows.source - first == source
        found, best = jax.vmap(read)(unembed(cfg, params, states), source, rows.target)
        return (jnp.where(mine, found, log_prob), jnp.where(mine, best, greedy)), None

    start = jnp.zeros(rows.target.shape, jnp.float32), jnp.zeros(rows.target.shape, bool)
    parts = jnp.arange(chunks) * each, jnp.swapaxes(hidden, 0, 1)
    (log_prob, greedy), _ = jax.lax.scan(chunk, start, parts)
    return jnp.where(rows.target == PADDING, 0.0, log_prob), greedy


def _at(x, place):
    return jnp.take_along_axis(x, place[..., None], axis=1)


@functools.partial(jax.jit, static_argnames=("cfg", "linear"))
def _score(cfg, params, program, rows, prefix, *, linear: bool):
    x, _ = _run(cfg, params, program, rows, prefix, linear, lambda out: None)
    return _targets(cfg, params, _at(x, rows.place), rows)


@functools.partial(jax.jit, static_argnames=("cfg", "linear"))
def _exits(cfg, params, program, rows, prefix, lens, *, linear: bool):
    """`[K + 1, B, C]` each."""
    _, after = _run(cfg, params, program, rows, prefix, linear, lambda out: _at(out, rows.place))
    points = jnp.concatenate([_at(embed(cfg, params, rows.tokens), rows.place)[None], after])
    if lens is not None:
        points = apply_translators(lens, points)
    return jax.lax.map(lambda hidden: _targets(cfg, params, hidden, rows), points)
