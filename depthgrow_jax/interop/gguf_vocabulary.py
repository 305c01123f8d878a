"""The tokenizer in the metadata of a GGUF file, as a `tokenizer.json` of Hugging Face `tokenizers`.

`tokenizer.ggml.model` says which kind it is: `gpt2`, byte-level BPE whose way of splitting text is named by
`tokenizer.ggml.pre`, or `llama`, SentencePiece BPE whose merges follow from the scores of the tokens.
"""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from depthgrow_jax.errors import UserError, require_choice
from depthgrow_jax.interop.pretrained import Vocabulary

_SEPARATOR = "<|endoftext|>"
_SPACE = "▁"
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The splitting of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# tokenizer.ggml.pre -> how text is split before merging. `default` is left out: it stands for a converter
# that did not know, and llama.cpp splits it in a way of its own.
_SPLITS = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "qwen2": lambda: _split(""),
    "llama-bpe": lambda: _split("{1,3}"),
}


def read_vocabulary(metadata: dict[str, Any], where: str, vocab_size: int, context: int) -> Vocabulary | None:
    """The tokenizer of a file; None where it holds none.

    Control tokens are special, so that text that spells one is not encoded to it. `prefix` is what llama.cpp
    puts before a text; `ends` are the ids that the file names as ends of a text, a turn or a message.

    Args:
      where: the file, named in errors.
      vocab_size: rows of the embedding.
      context: written to tokenizer_config.json as the greatest length.

    Raises `UserError` naming the file and the key for a tokenizer that is not known, damaged, or larger than
    the embedding.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "no_vocab":
        return None
    fields = _Fields(metadata, where)
    require_choice(f"{where}: tokenizer.ggml.model", kind, _BUILDERS)
    if len(fields.tokens) > vocab_size:
        raise UserError(
            f"{where}: tokenizer.ggml.tokens holds {len(fields.tokens)} tokens, "
            f"the embedding has {vocab_size} rows"
        )
    backend = _BUILDERS[kind](fields)
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in fields.typed(_CONTROL)]
    )
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in fields.typed(_USER_DEFINED)])

    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or fields.split == "llama-bpe")
    prefix = fields.ids("bos") if add_bos else ()
    if add_bos:
        if not prefix:
            raise UserError(
                f"{where}: metadata key tokenizer.ggml.bos_token_id is missing (add_bos_token is true)"
            )
        bos = fields.tokens[prefix[0]]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, prefix[0])]
        )
    ends = tuple(dict.fromkeys(fields.ids("eos") + fields.ids("eot") + fields.ids("eom")))
    return Vocabulary(
        json=backend.to_str(),
        separator=fields.separator(ends),
        prefix=prefix,
        ends=ends,
        files={"tokenizer_config.json": _tokenizer_config(fields, context)},
    )


class _Fields:
    """The `tokenizer.*` keys, checked as they are read."""

    def __init__(self, metadata: dict[str, Any], where: str):
        self.metadata, self.where = metadata, where
        spelt = self._list("tokens", str)
        # llama.cpp's spelling of tokens without a text.
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(spelt)]
        self.vocabulary = {token: index for index, token in enumerate(self.tokens)}
        if len(self.vocabulary) != len(self.tokens):
            double = next(t for i, t in enumerate(self.tokens) if self.vocabulary[t] != i)
            raise UserError(f"{where}: tokenizer.ggml.tokens holds {double!r} twice")
        has_types = "tokenizer.ggml.token_type" in metadata
        self.types = (
            self._list("token_type", int, len(self.tokens)) if has_types else [_NORMAL] * len(self.tokens)
        )
        self.split = str(metadata.get("tokenizer.ggml.pre", ""))

    def _list(self, name: str, kind: type, count: int | None = None) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not values or not isinstance(values[0], kind):
            raise UserError(f"{self.where}: tokenizer.ggml.{name} is missing or no list of {kind.__name__}")
        if count is not None and len(values) != count:
            raise UserError(
                f"{self.where}: tokenizer.ggml.{name} has {len(values)} entries for {count} tokens"
            )
        return values

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._list("merges", str):
            first, space, second = merge.partition(" ")
            if not (first and space and second):
                raise UserError(f"{self.where}: tokenizer.ggml.merges holds {merge!r}; must be two tokens")
            pairs.append((first, second))
        return pairs

    def scores(self) -> list[float]:
        return self._list("scores", float, len(self.tokens))

    def typed(self, kind: int) -> list[str]:
        """Tokens of one type, by id."""
        return [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind]

    def ids(self, name: str) -> tuple[int, ...]:
        """The id that `tokenizer.ggml.NAME_token_id` gives, or none."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            return ()
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise UserError(f"{self.where}: {key}={value!r}: must be an id of 0 to {len(self.tokens) - 1}")
        return (value,)

    def separator(self, ends: Sequence[int]) -> str:
        if _SEPARATOR in self.vocabulary:
            return _SEPARATOR
        candidates = (*ends, *self.ids("bos"))
        if not candidates:
            raise UserError(f"{self.where}: metadata key tokenizer.ggml.eos_token_id is missing")
        return self.tokens[candidates[0]]


def _bpe(fields: _Fields, merges: list[tuple[str, str]], **options) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(fields.vocabulary, merges, **options))
    except (
        Exception
    ) as error:  # `tokenizers` raises a bare Exception for a merge of tokens that are not there
        raise UserError(f"{fields.where}: tokenizer.ggml.merges do not fit the tokens: {error}") from error


def _byte_level(fields: _Fields) -> tokenizers.Tokenizer:
    require_choice(f"{fields.where}: tokenizer.ggml.pre", fields.split, _SPLITS)
    # Llama 3 takes a word that is a token as it is, whatever the merges make of it.
    whole_words = fields.split == "llama-bpe"
    backend = _bpe(fields, fields.merges(), ignore_merges=whole_words)
    if fields.split == "qwen2":  # as in the tokenizers of Qwen 2 to 3; a GGUF says nothing of normalisation
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _SPLITS[fields.split]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: _Fields) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours the pair is joined whose token has the highest score."""
    scores = fields.scores()
    joined = {
        token: index
        for token, index in fields.vocabulary.items()
        if fields.types[index] in (_NORMAL, _USER_DEFINED)
    }
    merges = [
        (-scores[index], token[:cut], token[cut:])
        for token, index in joined.items()
        for cut in range(1, len(token))
        if token[:cut] in joined and token[cut:] in joined
    ]
    # Stable: the pairs of one token stay in the order of their cut.
    merges.sort(key=lambda merge: merge[0])
    unknown = fields.typed(_UNKNOWN)
    pairs = [(first, second) for _, first, second in merges]
    unk_token = unknown[0] if unknown else None
    backend = _bpe(fields, pairs, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    prefixed = fields.metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefixed else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _tokenizer_config(fields: _Fields, context: int) -> str:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if ids := fields.ids(key):
            config[f"{name}_token"] = fields.tokens[ids[0]]
    template = fields.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
