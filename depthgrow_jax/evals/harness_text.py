"""Texts and ids as a tokenizer of `transformers` would have them, for scores that equal the harness's own.

Elsewhere in this project text never becomes a special token; here the spelling of one is that token.
"""

import json
from collections.abc import Sequence

import tokenizers

from depthgrow_jax.errors import require
from depthgrow_jax.interop import Vocabulary


class HarnessText:
    """Reads and writes ids.

    Attributes:
      end: ends a text: the `eos_token` of the tokenizer's settings, else the first of `Vocabulary.ends`.
      prefix: stands for an empty context: the beginning-of-sequence token where there is one, else `end`.
      end_text, prefix_text: how they are spelt.
    """

    def __init__(self, vocabulary: Vocabulary, add_bos: bool | None = None):
        """`add_bos`: whether texts follow the beginning-of-sequence token; None: as the tokenizer has it.

        Raises `UserError` for a token that is to be added and does not exist.
        """
        require(add_bos in (True, False, None), "add_bos_token", add_bos, "must be True or False")
        self._backend = tokenizers.Tokenizer.from_str(vocabulary.json)
        self._backend.no_padding()
        self._backend.no_truncation()
        settings = json.loads(vocabulary.files.get("tokenizer_config.json", "{}"))
        bos = self._named(settings.get("bos_token"), vocabulary.prefix)
        end = self._named(settings.get("eos_token"), vocabulary.ends)
        if end is None:
            end = self._backend.token_to_id(vocabulary.separator)
            assert end is not None, "the separator is in the vocabulary"
        self.end, self.prefix = end, end if bos is None else bos
        self.end_text, self.prefix_text = (
            self._backend.decode([i], skip_special_tokens=False) for i in (self.end, self.prefix)
        )
        self._special = add_bos is not False
        if add_bos:
            require(bos is not None, "add_bos_token", True, "the tokenizer has no such token")
            self._backend.post_processor = tokenizers.processors.TemplateProcessing(
                single=[self.prefix_text, "$A"], special_tokens=[(self.prefix_text, self.prefix)]
            )

    def _named(self, value: str | dict | None, otherwise: Sequence[int]) -> int | None:
        """The id of a token that is named by its spelling, or by an object; else the first of the others."""
        token = value["content"] if isinstance(value, dict) else value
        found = None if token is None else self._backend.token_to_id(token)
        return next(iter(otherwise), None) if found is None else found

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Ids of a text.

        Args:
          special: whether the tokenizer may put something before it; None: unless `prefix_text` is there.
        """
        if special is None:
            special = self._special and not text.startswith(self.prefix_text)
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._backend.decode(list(ids), skip_special_tokens=True)
