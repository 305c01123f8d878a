"""Continuing prompts: token ids in, token ids out, batched, compiled once for each bucket of shapes.

Shapes: B rows, V vocabulary, E ids that end a text.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from depthgrow_jax.errors import require
from depthgrow_jax.model.config import ModelConfig
from depthgrow_jax.model.decoding import Cache, Unrolled, decode, prefill, unroll
from depthgrow_jax.model.program import LayerProgram, layer_program
from depthgrow_jax.model.transformer import Params, depth_of

# Tokens that are made between two looks of the host at what came out.
_CHUNK = 16
_SHORTEST = 16
_NO_END = -1
_COLDEST = 1e-6


class Sampling(NamedTuple):
    """How the next token is drawn.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draws among the k most likely tokens, and those as likely as the last of them; 0: all.
      top_p: draws among the most likely tokens whose probability reaches p together (nucleus sampling, arXiv
        1904.09751), at least one; 1: all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Continuation(NamedTuple):
    """What was made of one prompt.

    Attributes:
      ids: the new tokens; the one that ended the text is left out.
      reason: `end` (an end token), `stop` (the caller's condition) or `length`.
    """

    ids: list[int]
    reason: str


def check_sampling(sampling: Sampling, flag: str = "") -> None:
    """Raises `UserError` for a value that is not legal; `flag` stands before its name."""
    temperature, top_k, top_p = sampling
    legal = temperature == 0 or _COLDEST <= temperature < float("inf")
    require(legal, f"{flag}temperature", temperature, f"must be 0 (greedy) or at least {_COLDEST}")
    require(top_k >= 0, f"{flag}top_k", top_k, "must be 0 (all) or more")
    require(0 < top_p <= 1, f"{flag}top_p", top_p, "must lie in (0, 1]")


def bucket(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, ... (2^k and 1.5 * 2^k) that holds `length`: few compilations."""
    size = _SHORTEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def next_tokens(logits: Float[Array, "B V"], keys: jax.Array, sampling: Sampling) -> Int[Array, " B"]:
    """One token a row. `keys [B]`, one a row, so that a row's draw does not depend on the others."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The largest becomes 0, so that no temperature makes it infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k:
        kept = min(sampling.top_k, logits.shape[-1])
        least = jax.lax.top_k(logits, kept)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        share = jax.nn.softmax(ordered, axis=-1)
        # A token is needed while those before it do not reach p.
        needed = jnp.cumsum(share, axis=-1) - share < sampling.top_p
        least = jnp.min(jnp.where(needed, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _fold(keys: jax.Array, count: Int[Array, ""]) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, count)


@functools.partial(jax.jit, static_argnames=("cfg", "slots", "sampling"))
def _start(cfg, params, tokens, length, keys, program, *, slots: int, sampling: Sampling):
    logits, cache = prefill(cfg, params, tokens, length, slots=slots, program=program)
    return next_tokens(logits, _fold(keys, jnp.int32(0)), sampling), cache


@functools.partial(jax.jit, static_argnames=("cfg", "sampling"), donate_argnames="cache")
def _go_on(cfg, network, cache: Cache, token, done, made, count, ends, keys, *, sampling: Sampling):
    """At most `count` (of `_CHUNK`) more tokens: `[B, _CHUNK]`; stops when all rows have met an end.

    `made` tokens were made before; `token [B]` is the last of them.
    """

    def more(carry):
        i, _, _, done, _ = carry
        return (i < count) & ~done.all()

    def body(carry):
        i, cache, token, done, out = carry
        logits, cache = decode(cfg, network, cache, token)
        token = next_tokens(logits, _fold(keys, made + i), sampling)
        done = done | (token[:, None] == ends[None]).any(axis=-1)
        return i + 1, cache, token, done, out.at[:, i].set(token)

    out = jnp.full((token.shape[0], _CHUNK), _NO_END, jnp.int32)
    i, cache, token, _, out = jax.lax.while_loop(more, body, (jnp.int32(0), cache, token, done, out))
    return cache, token, i, out


def generate(
    cfg: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008
    seed: int = 0,
    program: LayerProgram | None = None,
    unrolled: Unrolled | None = None,
    ends: Sequence[int] = (),
    stopped: Callable[[int, list[int]], bool] | None = None,
) -> list[Continuation]:
    """Continues every prompt by at most `max_tokens` tokens.

    Rows do not influence each other: each draws from a key of its own (`seed`, index), and the padding of
    shorter prompts is never seen.

    Args:
      prompts: ids, at least one each; lengths may differ.
      program: which layers run; each of its steps has its own cache.
      unrolled: `unroll(cfg, params, program)`, for calls that follow each other; None makes it anew, which
        copies the layers.
      ends: ids that end a text.
      stopped: called with the index of a prompt and all that was made of it, now and then; True ends it.

    Raises `UserError` for a prompt that is empty or holds an id outside the vocabulary, and for `sampling`.
    """
    check_sampling(sampling)
    require(max_tokens >= 1, "max_tokens", max_tokens, "must be at least 1")
    _check_prompts(prompts, cfg.vocab_size)
    count, longest = len(prompts), max(map(len, prompts))
    rows = 1 << (count - 1).bit_length()
    tokens = np.zeros((rows, bucket(longest)), np.int32)
    length = np.ones(rows, np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], length[row] = ids, len(ids)
    keys = _fold_rows(seed, rows)
    program = layer_program(cfg, depth_of(params)) if program is None else program
    slots = bucket(max(longest + max_tokens, tokens.shape[1]))
    token, cache = _start(cfg, params, tokens, length, keys, program, slots=slots, sampling=sampling)
    made: list[list[int]] = [[] for _ in prompts]
    reasons: list[str] = [""] * count
    _take(np.asarray(token)[:count, None], made, reasons, ends, stopped)
    ids_of_end = jnp.asarray(list(ends) or [_NO_END], jnp.int32)
    done_tokens = 1
    if max_tokens > 1 and unrolled is None:
        unrolled = unroll(cfg, params, program)
    while done_tokens < max_tokens and not all(reasons):
        done = np.array([bool(reason) for reason in reasons] + [True] * (rows - count))
        left = min(_CHUNK, max_tokens - done_tokens)
        cache, token, new, out = _go_on(
            cfg,
            unrolled,
            cache,
            token,
            done,
            jnp.int32(done_tokens),
            jnp.int32(left),
            ids_of_end,
            keys,
            sampling=sampling,
        )
        _take(np.asarray(out)[:count, : int(new)], made, reasons, ends, stopped)
        done_tokens += left
    return [Continuation(ids, reason or "length") for ids, reason in zip(made, reasons, strict=True)]


def _fold_rows(seed: int, rows: int) -> jax.Array:
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(jnp.arange(rows))


def _check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    require(len(prompts) > 0, "prompts", list(prompts), "must be at least one")
    for index, ids in enumerate(prompts):
        require(len(ids) > 0, f"prompts[{index}]", list(ids), "must hold at least one token")
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        require(bad is None, f"prompts[{index}]", bad, f"is outside the vocabulary of {vocab_size}")


def _take(
    out: np.ndarray,
    made: list[list[int]],
    reasons: list[str],
    ends: Sequence[int],
    stopped: Callable[[int, list[int]], bool] | None,
) -> None:
    """Adds new tokens `[B, n]` to those of each row that goes on, and says why it ends where it does."""
    for row, ids in enumerate(out.tolist()):
        if reasons[row]:
            continue
        end = next((i for i, token in enumerate(ids) if token in ends), None)
        made[row] += ids[:end]
        if stopped is not None and stopped(row, made[row]):
            reasons[row] = "stop"
        elif end is not None:
            reasons[row] = "end"
