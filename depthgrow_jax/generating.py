"""The glue of `launch.py generate`: texts in, their continuations out."""

from collections.abc import Sequence
from typing import NamedTuple

from depthgrow_jax.corpora import tokenizer_of, vocabulary_of
from depthgrow_jax.data.tokenizer import Tokenizer
from depthgrow_jax.errors import UserError, require
from depthgrow_jax.interop import Vocabulary
from depthgrow_jax.model import Sampling, Unrolled, check_sampling, generate, parse_order, reorder
from depthgrow_jax.probes.inputs import Subject
from depthgrow_jax.subjects import load_network
from depthgrow_jax.telling import line
from depthgrow_jax.train.config import MeshConfig

# Rows of a batch go to one device: a generation is bound by the weights that it reads.
_ONE_DEVICE = MeshConfig(data=1)


class Text(NamedTuple):
    """A continuation: `text`, and the `reason` that it ends (`end`, `stop` or `length`)."""

    text: str
    reason: str


def continue_texts(
    place: str,
    prompts: Sequence[str],
    *,
    flag: str = "--run",
    step: int | None = None,
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    stops: Sequence[str],
    order: str | None,
) -> int:
    """Prints every prompt with its continuation. Returns the exit code, 0.

    Args:
      place, flag, step: see `subjects.load_network`.
      order: the layers to run (`model.parse_order`); None: as they are.

    Raises `UserError` for anything the user can mend.
    """
    check_sampling(sampling, "--")
    require(max_tokens >= 1, "--max_tokens", max_tokens, "must be at least 1")
    require(0 <= seed < 2**32, "--seed", seed, "must lie in [0, 2**32), where every seed is another")
    require(all(stops), "--stop", "", "must not be empty")
    if not prompts:
        raise UserError("--prompt is missing: a text to continue")
    loaded = load_network(place, step, flag=flag, mesh=_ONE_DEVICE)
    if not loaded.subject.cfg.causal:
        raise UserError(f"{flag}={place!r}: is a bidirectional model, which does not continue texts")
    tokenizer, vocabulary = tokenizer_of(loaded, line), vocabulary_of(loaded, line)
    ids = [encode_prompt(prompt, tokenizer, vocabulary, loaded.subject.cfg.vocab_size) for prompt in prompts]
    _check_room(prompts, ids, max_tokens, loaded.context)
    subject = loaded.subject
    if order is not None:
        subject = subject._replace(program=reorder(subject.program, parse_order(order, subject.steps)))
    texts = continuations(
        subject,
        tokenizer,
        ids,
        ends=vocabulary.ends if vocabulary else (),
        sampling=sampling,
        max_tokens=max_tokens,
        seed=seed,
        stops=stops,
    )
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt}{text.text}")
    return 0


def encode_prompt(
    prompt: str, tokenizer: Tokenizer, vocabulary: Vocabulary | None, vocab_size: int
) -> list[int]:
    """The ids of a prompt, after what the tokenizer puts before every text.

    Raises `UserError` for ids that a network of `vocab_size` has no embedding for, and if there are none.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"--prompt={prompt!r}: is not valid UTF-8") from None
    ids = [*(vocabulary.prefix if vocabulary else ()), *tokenizer.encode(prompt)]
    bad = next((i for i in ids if i >= vocab_size), None)
    require(bad is None, "--prompt", prompt, f"holds token id {bad}, outside the vocabulary of {vocab_size}")
    require(bool(ids), "--prompt", prompt, "is empty, and the tokenizer puts nothing before it")
    return ids


def _check_room(prompts: Sequence[str], ids: Sequence[Sequence[int]], max_tokens: int, context: int) -> None:
    """Raises `UserError` unless `context` holds every prompt and `max_tokens` more."""
    longest = max(map(len, ids))
    made_for = f"the network is made for {context} in all"
    for prompt, row in zip(prompts, ids, strict=True):
        require(len(row) < context, "--prompt", prompt, f"has {len(row)} tokens; {made_for}")
    legal = f"must be at most {context - longest} after a prompt of {longest} tokens; {made_for}"
    require(max_tokens <= context - longest, "--max_tokens", max_tokens, legal)


def continuations(
    subject: Subject,
    tokenizer: Tokenizer,
    ids: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    seed: int = 0,
    stops: Sequence[str] = (),
    unrolled: Unrolled | None = None,
) -> list[Text]:
    """The texts that follow prompts of `ids`, up to an id of `ends` or the first of `stops` that appears."""

    def text_of(row: int, made: list[int]) -> str:
        # Not decoded alone: SentencePiece tokenizers drop the space that a text begins with.
        before, whole = tokenizer.decode(ids[row]), tokenizer.decode([*ids[row], *made])
        return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(made)

    def stopped(row: int, made: list[int]) -> bool:
        text = text_of(row, made)
        return any(stop in text for stop in stops)

    made = generate(
        subject.cfg,
        subject.params,
        ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=seed,
        program=subject.program,
        unrolled=unrolled,
        ends=ends,
        stopped=stopped if stops else None,
    )
    return [Text(_cut(text_of(row, new.ids), stops), new.reason) for row, new in enumerate(made)]


def _cut(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of `stops`."""
    places = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return text[: min(places)] if places else text
