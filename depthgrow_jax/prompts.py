"""Prompts for probes: held-out windows of a run's own data, or the records of a file."""

import gzip
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from depthgrow_jax.data import Corpus
from depthgrow_jax.data.readers import one_line, resolve
from depthgrow_jax.data.tokenizer import Tokenizer
from depthgrow_jax.errors import UserError, require
from depthgrow_jax.probes.config import PromptConfig
from depthgrow_jax.probes.inputs import Prompts, windows
from depthgrow_jax.train.config import TrainConfig
from depthgrow_jax.train.objective import SpecialTokens, masked_examples

# Prompts of the masked objective are always hidden in the same way.
_MASK_SEED = 0


class Masking(NamedTuple):
    """How a masked model's prompts are hidden: as in training."""

    rate: float
    special: SpecialTokens


def masking(train: TrainConfig, tokenizer: Tokenizer | Corpus) -> Masking | None:
    """That of the run's objective; None for a causal one."""
    if train.objective == "causal":
        return None
    special = SpecialTokens(tokenizer.vocab_size, tokenizer.separator_id, tokenizer.mask_id)
    return Masking(train.mask_rate, special)


def from_corpus(corpus: Corpus, examples: int, length: int, mask: Masking | None = None) -> Prompts:
    """The first windows of the validation split in its fixed order, `[P, length]`.

    Args:
      examples: windows at most; fewer if the split holds fewer.
      length: positions of each, at most the sequence length of training.
      mask: positions are hidden, and only those are scored; windows without one are left out.

    Raises `UserError` if the windows are shorter than `length`, or nothing is hidden.
    """
    tokens = np.concatenate(list(corpus.validation_batches(1, examples)))
    longest = tokens.shape[1] - 1
    legal = f"must be at most {longest}, the sequence length of the run"
    require(1 <= length <= longest, "probe.prompts.length", length, legal)
    text = windows(tokens[:, : length + 1])
    return text if mask is None else _hidden(text._replace(targets=text.inputs), mask)


def from_file(
    cfg: PromptConfig,
    tokenizer: Tokenizer,
    length: int,
    vocab_size: int,
    mask: Masking | None = None,
) -> tuple[Prompts, dict[str, Any]]:
    """Prompts of a `.jsonl` file (also `.gz`), one record a line, padded on the right to the longest.

    A record holds `text`, or `prompt` (or `question`) and `answer`, which fill `cfg.template`. The answer is
    what follows the longest common token prefix of the text before it and of the whole text: a token that
    spans the border belongs to the answer. It reaches to the end of the prompt.

    Args:
      cfg: which file, how many records, the template.
      length: positions at most; longer prompts are cut at the end.
      vocab_size: of the network.
      mask: see `from_corpus`; prompts of which nothing is hidden are left out.

    Returns:
      The prompts, and `facts` of them with how many were `cut`, and how many lost their answer by it.

    Raises:
      UserError: naming file and line for what cannot be read, a record without these fields or with empty
        ones, fewer than two tokens, or an id outside the vocabulary.
    """
    path = resolve(cfg.path)
    rows, text = [], hashlib.sha256(repr((cfg.template, cfg.separator_first)).encode())
    for place, record in _records(path, cfg.path):
        text.update(json.dumps(record, sort_keys=True).encode())
        ids, start = _tokens(record, cfg, tokenizer, place)
        if max(ids) >= vocab_size:
            raise UserError(f"{place}: token id {max(ids)} is outside the vocabulary of {vocab_size}")
        rows.append((ids, start))
        if len(rows) == cfg.examples:
            break
    if not rows:
        raise UserError(f"{path}: holds no records")
    # The target of a position is the token after it, of a masked model the one it hides.
    prompts, lost = _padded(rows, length, tokenizer.separator_id, shift=1 if mask is None else 0)
    prompts = prompts if mask is None else _hidden(prompts, mask)
    cut = sum(len(ids) > length for ids, _ in rows)
    return prompts, facts(prompts, str(path), text) | {"cut": cut, "answers_cut_off": lost}


def facts(prompts: Prompts, source: str, text: Any = None) -> dict[str, Any]:
    """What a result's header says of its prompts; `sha256` changes with every token, mask and answer.

    Args:
      text: a hash of what the tokens were made of, the same for every tokenizer; None: that of the tokens.
    """
    digest = hashlib.sha256()
    for field in prompts:
        digest.update(repr(field.shape).encode() + np.ascontiguousarray(field).tobytes())
    return {
        "source": source,
        "sha256": digest.hexdigest(),
        "text": (text or digest).hexdigest()[:12],
        "examples": len(prompts.inputs),
        "length": prompts.inputs.shape[1],
        "shortest": int(prompts.lengths.min()),
        "tokens": int(prompts.lengths.sum()),
    }


def _hidden(prompts: Prompts, mask: Masking) -> Prompts:
    """Hides positions of `prompts`, whose inputs and targets are the same ids, as training does."""
    padded = jnp.pad(prompts.inputs, ((0, 0), (0, 1)))
    examples = masked_examples(padded, jax.random.key(_MASK_SEED), mask.rate, mask.special)
    scored = (np.asarray(examples.weights) > 0) & prompts.valid
    inputs = np.where(scored, np.asarray(examples.inputs), prompts.inputs).astype(np.int32)
    # Probes leave the first position out, so one that is hidden there alone says nothing.
    some = scored[:, 1:].any(axis=1)
    if not some.any():
        raise UserError(
            f"train.mask_rate={mask.rate}: hides no position of the {len(inputs)} prompts; raise "
            "probe.prompts.examples or probe.prompts.length"
        )
    return Prompts(*(field[some] for field in prompts._replace(inputs=inputs, scored=scored)))


def _records(path: pathlib.Path, given: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, record) of every line that is not blank."""
    field = f"probe.prompts.path={given!r}"
    if path.name.removesuffix(".gz").rpartition(".")[2] != "jsonl":
        raise UserError(f"{field}: must be a .jsonl file, optionally .gz")
    if not path.is_file():
        raise UserError(f"{field}: no such file")
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                text = line.decode("utf-8-sig").strip()
                record = json.loads(text) if text else {}
                if not isinstance(record, dict):
                    raise UserError(f"{path}:{number}: holds {type(record).__name__}; must be a JSON object")
                if text:
                    yield f"{path}:{number}", record
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{number}: not JSON: {error.msg} (column {error.colno})") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"{path}:{number}: cannot be read: {one_line(error)}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read after line {number}: {one_line(error)}") from None


def _tokens(
    record: dict[str, Any], cfg: PromptConfig, tokenizer: Tokenizer, place: str
) -> tuple[list[int], int | None]:
    """Ids of a record, and the index of the answer's first; None without an answer."""
    front = [tokenizer.separator_id] if cfg.separator_first else []
    question = next((name for name in ("prompt", "question") if name in record), None)
    start = None
    if "text" in record:
        ids = front + tokenizer.encode(_text(record, "text", place))
    elif question and "answer" in record:
        prompt, answer = _text(record, question, place), _text(record, "answer", place)
        # Not `str.format`: a prompt may hold braces.
        before, after = (part.replace("{prompt}", prompt) for part in cfg.template.split("{answer}"))
        ids = front + tokenizer.encode(before + answer + after)
        start = _common_prefix(front + tokenizer.encode(before), ids)
    else:
        has = ", ".join(sorted(record)) or "none"
        raise UserError(f"{place}: needs text, or prompt (or question) and answer; it has {has}")
    if len(ids) < 2:
        raise UserError(f"{place}: is a single token; at least 2 are needed")
    return ids, start


def _text(record: dict[str, Any], name: str, place: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise UserError(f"{place}: {name} holds {type(value).__name__}, must be text")
    if not value.strip():
        raise UserError(f"{place}: {name} is empty")
    # Half of a surrogate pair, which JSON can spell, is no character: no tokenizer takes it.
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _common_prefix(a: list[int], b: list[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _padded(
    rows: list[tuple[list[int], int | None]], length: int, pad: int, shift: int
) -> tuple[Prompts, int]:
    """Prompts of ids and answer starts, cut to `length`; and how many answers were cut off."""
    width = min(length, max(len(ids) for ids, _ in rows))
    inputs = np.full((len(rows), width), pad, np.int32)
    targets = inputs.copy()
    valid, scored = np.zeros(inputs.shape, bool), np.zeros(inputs.shape, bool)
    answer = np.full(len(rows), width, np.int32)
    lost = 0
    for p, (ids, start) in enumerate(rows):
        seen, predicted = ids[:width], ids[shift : width + shift]
        inputs[p, : len(seen)], valid[p, : len(seen)] = seen, True
        targets[p, : len(predicted)], scored[p, : len(predicted)] = predicted, True
        if start is not None:
            first = max(start - shift, 0)
            answer[p] = min(first, width)
            lost += first >= width
    return Prompts(inputs, targets, scored, valid, answer), lost
