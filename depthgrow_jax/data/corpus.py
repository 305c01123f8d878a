"""A run's corpus: packed tokens and the batch of every step as a pure function of (seed, step)."""

import dataclasses
import hashlib
import json
import logging
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import grain
import numpy as np

from depthgrow_jax.data import tokenizer as tokenizers
from depthgrow_jax.data.config import DataConfig, components, validate
from depthgrow_jax.data.packing import Windows, packed
from depthgrow_jax.data.sources import documents
from depthgrow_jax.data.splits import digest, held_out
from depthgrow_jax.errors import UserError, require

_LOGGER = logging.getLogger(__name__)
_VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Component:
    """One source of a mixture: its share of the sequences, and its two splits."""

    name: str
    share: float
    train: Windows
    validation: Windows


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation sequences. Build one with `load`.

    Attributes:
      vocab_size: the tokenizer's largest id plus one.
      separator_id: id that follows every document.
      mask_id: id of the mask token, -1 if the tokenizer has none.
      tokenizer: `encode(str) -> list[int]`, `decode(list[int]) -> str`.
      data_hash: SHA-256 (hex) of documents, split, tokenizer, sequence length and mixture.
      stats: `documents`, `train_documents`, `validation_documents`, `train_tokens`,
        `validation_tokens`, `train_sequences`, `validation_sequences`, and `bytes` (UTF-8 bytes of
        each component by name).
      components: one per component of the mixture, at least one; shares sum to 1.
    """

    vocab_size: int
    separator_id: int
    mask_id: int
    tokenizer: tokenizers.Tokenizer
    data_hash: str
    stats: dict
    components: tuple[Component, ...]

    def train_batch(
        self, step: int, batch_size: int, seed: int, *, process_index: int = 0, process_count: int = 1
    ) -> np.ndarray:
        """int32 `[batch_size / process_count, T + 1]`: this process's rows of the batch of `step` (from 0).

        The batch is rows `step * batch_size` onwards of an infinite stream that depends on `seed`
        alone: each component is shuffled anew every epoch, each of its sequences comes once an
        epoch, and components take turns in proportion to their weights.
        """
        require(step >= 0, "step", step, "must be 0 or more")
        require(seed >= 0, "seed", seed, "must be 0 or more")
        rows = _rows(batch_size, process_index, process_count)
        stream = _stream([c.train for c in self.components], self.components, seed, epochs=None)
        return _gather(stream, (step * batch_size + row for row in rows))

    def validation_batches(
        self, batch_size: int, max_batches: int, *, process_index: int = 0, process_count: int = 1
    ) -> Iterator[np.ndarray]:
        """At most `max_batches` arrays int32 `[batch_size / process_count, T + 1]`, always the same ones.

        They sample the whole validation split in one fixed shuffled order, components in proportion
        to their weights until the first is used up; an incomplete last batch is dropped. Raises
        `UserError` if there is less than one batch.
        """
        require(max_batches >= 1, "max_batches", max_batches, "must be 1 or more")
        rows = _rows(batch_size, process_index, process_count)
        stream = self._validation_stream(batch_size)
        count = min(max_batches, len(stream) // batch_size)
        return (_gather(stream, (b * batch_size + row for row in rows)) for b in range(count))

    def check_batches(self, batch_size: int) -> None:
        """Raises `UserError` where a split holds fewer sequences than one batch takes of it."""
        require(batch_size >= 1, "batch_size", batch_size, "must be 1 or more")
        for component in self.components:
            needed = math.ceil(round(batch_size * component.share, 6))
            if len(component.train) < needed:
                raise UserError(
                    f"batch_size={batch_size}: component {component.name!r} has fewer tokens than one "
                    f"batch: {len(component.train)} training sequences of {component.train.length} tokens, "
                    f"{needed} needed"
                )
        self._validation_stream(batch_size)

    def _validation_stream(self, batch_size: int) -> grain.MapDataset[np.ndarray]:
        stream = _stream([c.validation for c in self.components], self.components, _VALIDATION_SEED, epochs=1)
        if len(stream) < batch_size:
            held = ", ".join(f"{c.name} {len(c.validation)}" for c in self.components)
            raise UserError(
                f"batch_size={batch_size}: validation has fewer tokens than one batch: {len(stream)} "
                f"sequences of {self.components[0].validation.length} tokens at the mixture's weights "
                f"({held}); "
                "lower it or raise data.validation_fraction"
            )
        return stream


def load(
    cfg: DataConfig,
    *,
    sequence_length: int,
    vocab_size: int,
    masked: bool = False,
    log: Callable[[str], None] = _LOGGER.info,
) -> Corpus:
    """Reads, splits, tokenizes and packs the documents of `cfg`.

    Args:
      cfg: what to read.
      sequence_length: T, tokens predicted per sequence.
      vocab_size: the model's vocabulary, which must hold every token id.
      masked: whether the objective needs a mask token.
      log: takes one line for each slow step.

    Raises:
      UserError: a field, file or record is wrong, an id does not fit the vocabulary, or a split is
        shorter than one sequence.
    """
    validate(cfg)
    require(sequence_length >= 1, "sequence_length", sequence_length, "must be 1 or more")
    tokenizers.check_vocabulary(cfg, vocab_size, masked)
    cache_dir = pathlib.Path(cfg.cache_dir).expanduser()
    texts = {name: documents(source, field) for name, source, field in components(cfg)}
    digests = {name: [digest(text) for text in texts[name]] for name in texts}
    validation = held_out(digests, cfg.validation_fraction)
    train_texts = [
        t for name in texts for t, d in zip(texts[name], digests[name], strict=True) if d not in validation
    ]
    tokenizer = tokenizers.build(cfg, train_texts, vocab_size, masked=masked, cache_dir=cache_dir, log=log)
    total = sum(source.weight for _, source, _ in components(cfg))
    parts = []
    for name, source, _ in components(cfg):
        windows = {}
        for split in ("train", "validation"):
            kept = [
                (t, d)
                for t, d in zip(texts[name], digests[name], strict=True)
                if (d in validation) == (split == "validation")
            ]
            tokens = packed([t for t, _ in kept], [d for _, d in kept], tokenizer, cache_dir, log)
            _check_tokens(tokens, f"{split} split of component {name!r}", sequence_length, vocab_size)
            windows[split] = Windows(tokens, sequence_length)
        parts.append(Component(name, source.weight / total, windows["train"], windows["validation"]))
    return Corpus(
        vocab_size=tokenizer.vocab_size,
        separator_id=tokenizer.separator_id,
        mask_id=tokenizer.mask_id,
        tokenizer=tokenizer,
        data_hash=_data_hash(parts, digests, validation, tokenizer, sequence_length),
        stats=_stats(parts, texts, len(train_texts)),
        components=tuple(parts),
    )


def _stream(
    splits: Sequence[Windows], parts: Sequence[Component], seed: int, epochs: int | None
) -> grain.MapDataset[np.ndarray]:
    """The sequences of `splits`, mixed by share, in the order of `seed`; `epochs=None` repeats for ever."""
    shuffled = []
    for k, split in enumerate(splits):
        # Mixed with the component's index, so that components of equal size differ in order, and
        # reduced to the 32 bits that grain takes.
        grain_seed = int(np.random.SeedSequence((seed, k)).generate_state(1)[0])
        shuffled.append(grain.MapDataset.source(split).shuffle(seed=grain_seed).repeat(epochs))
    if len(shuffled) == 1:
        return shuffled[0]
    return grain.MapDataset.mix(shuffled, weights=[part.share for part in parts])


def _gather(stream: grain.MapDataset[np.ndarray], rows: Iterable[int]) -> np.ndarray:
    return np.stack([np.asarray(stream[row]) for row in rows])


def _rows(batch_size: int, process_index: int, process_count: int) -> range:
    """Rows of the global batch that belong to one process: a contiguous, equal slice."""
    require(
        batch_size >= 1 and batch_size % process_count == 0,
        "batch_size",
        batch_size,
        f"must be a positive multiple of the {process_count} processes",
    )
    legal = f"must lie between 0 and {process_count - 1}"
    require(0 <= process_index < process_count, "process_index", process_index, legal)
    local = batch_size // process_count
    return range(process_index * local, (process_index + 1) * local)


def _check_tokens(tokens: np.ndarray, where: str, sequence_length: int, vocab_size: int) -> None:
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise UserError(f"token id {largest} in the {where} is outside the vocabulary of {vocab_size}")
    if len(tokens) <= sequence_length:
        raise UserError(
            f"sequence_length={sequence_length}: the {where} has {len(tokens)} tokens, fewer than one "
            f"sequence ({sequence_length + 1}); lower it, add documents or change data.validation_fraction"
        )


def _data_hash(
    parts: Sequence[Component],
    digests: Mapping[str, Sequence[bytes]],
    validation: set[bytes],
    tokenizer: tokenizers.Tokenizer,
    sequence_length: int,
) -> str:
    content = {
        "sequence_length": sequence_length,
        "tokenizer": [tokenizer.fingerprint, tokenizer.separator_id, tokenizer.mask_id],
        "components": [
            [part.name, part.share, [[d.hex(), d in validation] for d in digests[part.name]]]
            for part in parts
        ],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _stats(parts: Sequence[Component], texts: Mapping[str, Sequence[str]], train_documents: int) -> dict:
    count = sum(len(t) for t in texts.values())
    return {
        "documents": count,
        "train_documents": train_documents,
        "validation_documents": count - train_documents,
        "train_tokens": sum(len(p.train.tokens) for p in parts),
        "validation_tokens": sum(len(p.validation.tokens) for p in parts),
        "train_sequences": sum(len(p.train) for p in parts),
        "validation_sequences": sum(len(p.validation) for p in parts),
        "bytes": {name: sum(len(t.encode()) for t in texts[name]) for name in texts},
    }
