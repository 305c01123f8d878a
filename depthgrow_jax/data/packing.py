"""Documents into one array of token ids, and that array into training sequences."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tokenizers

from depthgrow_jax.data.cache import cached_array
from depthgrow_jax.data.tokenizer import Tokenizer

_CHUNK_CHARACTERS = 1 << 22  # bounds the memory that encoded documents take before they are packed


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Sequences of `length + 1` tokens: inputs are the first `length`, targets the last.

    Sequence i is `tokens[i * length : (i + 1) * length + 1]`: neighbours share one token, so every
    token but the first is predicted once. What is left at the end is dropped.

    Attributes:
      tokens: ids `[n]`.
      length: T, tokens predicted per sequence.
    """

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 `[T + 1]`."""
        start = int(index) * self.length
        return np.array(self.tokens[start : start + self.length + 1], np.int32)


def pack(documents: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """Ids `[n]` of all documents in order, each followed by the separator.

    uint16 where the vocabulary fits, else int32.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    separator = np.array([tokenizer.separator_id], dtype)
    parts = []
    for chunk in _chunks(documents):
        for ids in tokenizer.encode_batch(chunk):
            parts += [ids.astype(dtype), separator]
    return np.concatenate(parts)


def packed(
    documents: Sequence[str],
    digests: Sequence[bytes],
    tokenizer: Tokenizer,
    cache_dir: pathlib.Path,
    log: Callable[[str], None],
) -> np.ndarray:
    """`pack`, memory-mapped from `cache_dir`; `digests` are those of `documents`, in the same order."""
    # The same tokenizer may encode otherwise in another version of the library.
    made_by = (tokenizers.__version__, tokenizer.fingerprint, tokenizer.separator_id, tokenizer.vocab_size)
    key = hashlib.sha256(repr(made_by).encode())
    for digest in digests:
        key.update(digest)

    def build() -> np.ndarray:
        log(f"encoding {len(documents)} documents")
        return pack(documents, tokenizer)

    return cached_array(cache_dir / f"tokens-{key.hexdigest()[:32]}.npy", build, log)


def _chunks(documents: Sequence[str]) -> Iterator[list[str]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document)
        if size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
