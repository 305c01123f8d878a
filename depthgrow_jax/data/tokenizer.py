"""Tokenizers: byte-level BPE trained on the run's own text, raw bytes, or a `tokenizer.json`.

Text can never become a special token: `tokenizers` is told to encode the spelling of a special
token like any other text, and the separator and mask of a `tokenizer.json` are marked special
first. Only packing writes the separator and only the masked objective writes the mask.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers

from depthgrow_jax.data.cache import cached_bytes
from depthgrow_jax.data.config import DataConfig
from depthgrow_jax.data.readers import one_line, resolve
from depthgrow_jax.errors import UserError, require

NO_MASK = -1
BYTES_VOCAB_SIZE = 258
MIN_BPE_VOCAB_SIZE = 258  # 256 bytes, the separator and the mask token


class Tokenizer(Protocol):
    """What packing, evaluation and generation need of a tokenizer.

    `vocab_size` is the largest id plus one; `mask_id` is -1 where there is no mask token;
    `fingerprint` changes whenever any text could be encoded otherwise.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def separator_id(self) -> int: ...

    @property
    def mask_id(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def to_json(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class BytesTokenizer:
    """UTF-8 bytes: byte b is id b, the separator 256, the mask token 257."""

    separator: str
    mask_token: str
    vocab_size: int = BYTES_VOCAB_SIZE
    separator_id: int = 256
    mask_id: int = 257
    fingerprint: str = "bytes"

    def encode(self, text: str) -> list[int]:
        """Ids `[n]` of the UTF-8 bytes of `text`."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array `[n]` per text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` `[n]`, special tokens spelt out; bytes that are not UTF-8 become U+FFFD.

        Ids from 258 on, which a larger embedding has, spell nothing.
        """
        spelling = {self.separator_id: self.separator.encode(), self.mask_id: self.mask_token.encode()}
        spelling |= {byte: bytes([byte]) for byte in range(256)}
        return b"".join(spelling.get(int(i), b"") for i in ids).decode(errors="replace")

    def to_json(self) -> str:
        """A `tokenizer.json` of the same ids: a byte-level BPE without merges. Texts follow the separator."""
        spelt = {token: i for i, token in enumerate(_byte_spellings())}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(spelt, []))
        _byte_level(backend)
        backend.add_special_tokens([self.separator, self.mask_token])
        return _after_separator(backend, self.separator, self.separator_id)


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer:
    """A `tokenizers.Tokenizer` that encodes documents as plain text."""

    backend: tokenizers.Tokenizer
    vocab_size: int
    separator_id: int
    mask_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids `[n]` of `text`, with no special token added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer array `[n]` per text."""
        encoded = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(e.ids, np.int32) for e in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` `[n]`, special tokens spelt out."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """The `tokenizer.json`, in which texts follow the separator, as documents did in training."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        separator = backend.id_to_token(self.separator_id)
        assert separator is not None
        return _after_separator(backend, separator, self.separator_id)


def _byte_level(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()


def _byte_spellings() -> list[str]:
    """How byte-level tokenizers spell bytes: those that print as themselves, the others from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def _after_separator(backend: tokenizers.Tokenizer, separator: str, separator_id: int) -> str:
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{separator} $A", pair=f"{separator} $A $B", special_tokens=[(separator, separator_id)]
    )
    return backend.to_str()


def check_vocabulary(cfg: DataConfig, vocab_size: int, masked: bool) -> None:
    """Refuses a tokenizer that cannot suit a model of `vocab_size` ids, before any document is read.

    Raises `UserError` naming the field, the largest id and the model's vocabulary.
    """
    if cfg.tokenizer == "bpe":
        size = cfg.bpe_vocab_size or vocab_size
        where = "data.bpe_vocab_size" if cfg.bpe_vocab_size else "model vocabulary"
        require(size >= MIN_BPE_VOCAB_SIZE, where, size, f"a bpe needs at least {MIN_BPE_VOCAB_SIZE} ids")
        _require_fits(cfg.tokenizer, size, vocab_size)
    elif cfg.tokenizer == "bytes":
        _require_fits(cfg.tokenizer, BYTES_VOCAB_SIZE, vocab_size)
    else:
        _require_fits(cfg.tokenizer, load_json(cfg, masked).vocab_size, vocab_size)


def build(
    cfg: DataConfig,
    train_documents: Sequence[str],
    vocab_size: int,
    *,
    masked: bool,
    cache_dir: pathlib.Path,
    log: Callable[[str], None],
) -> Tokenizer:
    """The tokenizer of `cfg`; a `bpe` is trained on `train_documents` alone, or read from `cache_dir`."""
    if cfg.tokenizer == "bytes":
        return BytesTokenizer(cfg.separator, cfg.mask_token)
    if cfg.tokenizer != "bpe":
        return load_json(cfg, masked)
    size = cfg.bpe_vocab_size or vocab_size
    path = cache_dir / f"bpe-{_training_key(cfg, train_documents, size)}.json"

    def train() -> bytes:
        log(f"training a byte-level BPE of {size} ids on {len(train_documents)} documents")
        return train_bpe(train_documents, size, (cfg.separator, cfg.mask_token)).to_str().encode()

    return _subword(cached_bytes(path, train, log).decode(), separator_id=0, mask_id=1)


def train_bpe(texts: Iterable[str], vocab_size: int, specials: Sequence[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids; `specials` take ids 0, 1, ... in order."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    _byte_level(backend)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def load_json(cfg: DataConfig, masked: bool) -> SubwordTokenizer:
    """Reads the `tokenizer.json` at `cfg.tokenizer`.

    Raises `UserError` if it cannot be read or has no separator, or, with `masked`, no mask token.
    """
    path = resolve(cfg.tokenizer)
    field = f"data.tokenizer={cfg.tokenizer!r}"
    if not path.is_file():
        raise UserError(f"{field}: no such file; must be bpe, bytes or the path of a tokenizer.json")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizers.Tokenizer.from_str(json.dumps(description)).get_vocab()
    except Exception as e:  # `tokenizers` raises a bare Exception for a malformed description
        raise UserError(f"{field}: not a readable tokenizer.json: {one_line(e)}") from e
    if cfg.separator not in vocabulary:
        raise UserError(f"data.separator={cfg.separator!r}: must be in the vocabulary of {cfg.tokenizer}")
    if masked and cfg.mask_token not in vocabulary:
        raise UserError(f"data.mask_token={cfg.mask_token!r}: must be in the vocabulary of {cfg.tokenizer}")
    _mark_special(description, (cfg.separator, cfg.mask_token))
    return _subword(
        json.dumps(description), vocabulary[cfg.separator], vocabulary.get(cfg.mask_token, NO_MASK)
    )


def _mark_special(description: dict[str, Any], names: Sequence[str]) -> None:
    for token in description.get("added_tokens") or []:
        if token["content"] in names:
            token["special"] = True


def _subword(description: str, separator_id: int, mask_id: int) -> SubwordTokenizer:
    backend = tokenizers.Tokenizer.from_str(description)
    backend.encode_special_tokens = True
    backend.no_padding()
    backend.no_truncation()
    size = max(backend.get_vocab().values()) + 1
    fingerprint = hashlib.sha256(description.encode()).hexdigest()
    return SubwordTokenizer(backend, size, separator_id, mask_id, fingerprint)


def _training_key(cfg: DataConfig, texts: Sequence[str], size: int) -> str:
    key = hashlib.sha256(json.dumps([tokenizers.__version__, size, cfg.separator, cfg.mask_token]).encode())
    for text in texts:
        key.update(hashlib.sha256(text.encode()).digest())
    return key.hexdigest()[:32]


def _require_fits(name: str, size: int, vocab_size: int) -> None:
    if size > vocab_size:
        raise UserError(
            f"data.tokenizer={name!r}: largest token id {size - 1} is outside the model's vocabulary "
            f"of {vocab_size} (ids 0 to {vocab_size - 1})"
        )
