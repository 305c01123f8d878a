"""The tokenizer in a directory of Hugging Face transformers."""

import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from depthgrow_jax.errors import UserError
from depthgrow_jax.interop.hf_fields import Fields, read_object
from depthgrow_jax.interop.pretrained import Vocabulary

TOKENIZER = "tokenizer.json"
_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"
_OBJECTS = (_SETTINGS, "special_tokens_map.json", _GENERATION)
_TEMPLATE = "chat_template.jinja"
_SEPARATOR = "<|endoftext|>"


def read_vocabulary(directory: pathlib.Path, config: Mapping[str, Any], vocab_size: int) -> Vocabulary | None:
    """The vocabulary in `directory`; None if it has no `tokenizer.json`.

    Args:
      config: the model's `config.json`, for the ids in it.
      vocab_size: rows of the embedding, which may be more than there are tokens.

    `ends` are `eos_token_id` of `generation_config.json`, else of `config.json`, else the `eos_token` of
    `tokenizer_config.json`. The separator is `<|endoftext|>` where there is one, else the first end that has
    a spelling, else the beginning-of-sequence token.

    Raises `UserError` naming a file that is malformed, or has ids beyond `vocab_size`.
    """
    path = directory / TOKENIZER
    if not path.is_file():
        return None
    text, backend = _read_tokenizer(path)
    ids = backend.get_vocab()
    last = max(ids.values(), default=-1)
    if not 0 <= last < vocab_size:
        raise UserError(
            f"{path}: largest token id {last} is outside the embedding of vocab_size={vocab_size} rows"
        )
    objects = {name: read_object(directory / name) for name in _OBJECTS if (directory / name).is_file()}
    settings = Fields(objects.get(_SETTINGS, {}), str(directory / _SETTINGS))
    ends: tuple[int, ...] = ()
    for name, values in ((_GENERATION, objects.get(_GENERATION, {})), ("config.json", config)):
        ends = ends or _ids(Fields(values, str(directory / name)), "eos_token_id", vocab_size)
    if not ends:
        ends = _spelt(settings, "eos_token", ids)
    begins = _ids(Fields(config, str(directory / "config.json")), "bos_token_id", vocab_size)
    candidates = [backend.id_to_token(i) for i in (*ends, *begins, *_spelt(settings, "bos_token", ids))]
    separators = [_SEPARATOR] * (_SEPARATOR in ids) + [token for token in candidates if token is not None]
    if not separators:
        raise UserError(
            f"{directory / _SETTINGS}: names no eos_token or bos_token; one must stand between documents "
            f"where the vocabulary has no {_SEPARATOR}"
        )
    names = (*objects, *([_TEMPLATE] if (directory / _TEMPLATE).is_file() else []))
    files = {name: _read_text(directory / name) for name in names}
    return Vocabulary(text, separators[0], _prefix(backend), ends, files)


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _read_tokenizer(path: pathlib.Path) -> tuple[str, tokenizers.Tokenizer]:
    text = _read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises a bare Exception for a malformed description
        raise UserError(f"{path}: not a readable {TOKENIZER}: {' '.join(str(error).split())}") from error
    # Padding would look like a prefix.
    backend.no_padding()
    backend.no_truncation()
    return text, backend


def _prefix(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Ids that the post-processor puts before a text. The mask tells them from the text's own."""
    encoding = backend.encode("a", add_special_tokens=True)
    added = encoding.special_tokens_mask
    return tuple(encoding.ids[: added.index(0) if 0 in added else len(added)])


def _ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """A field that holds null, an id or a list of ids."""
    value = fields.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    legal = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids)
    fields.require(legal, name, f"must be null, or ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _spelt(fields: Fields, name: str, ids: Mapping[str, int]) -> tuple[int, ...]:
    """The id of a token that is named by its spelling, or by an object that holds it as `content`."""
    value = fields.get(name)
    spelling = value.get("content") if isinstance(value, dict) else value
    if spelling is None:
        return ()
    known = isinstance(spelling, str) and spelling in ids
    fields.require(known, name, f"must be a token of {TOKENIZER}")
    return (ids[spelling],)
