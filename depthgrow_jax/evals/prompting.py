"""From items to ids: few-shot examples before an item, and where a continuation begins."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from depthgrow_jax.data.tokenizer import Tokenizer
from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.items import Item, example
from depthgrow_jax.evals.trees import Request

# Texts of one call of the tokenizer, which works on all cores.
_ENCODED_AT_ONCE = 512


class Encoder(NamedTuple):
    """A model's way of reading texts.

    Attributes:
      tokenizer: its tokenizer.
      prefix: ids that stand before every text; often none.
      start: the id from which the first token of a text without prefix and prompt is predicted.
      context: the longest sequence, in tokens; longer texts lose their beginning.
    """

    tokenizer: Tokenizer
    prefix: tuple[int, ...]
    start: int
    context: int

    def prompt(self, text: str, room: int = 0) -> tuple[tuple[int, ...], int]:
        """Ids of a text that leave `room` tokens of the context, and how many were cut off at the left.

        Raises `UserError` where `room` is all of the context.
        """
        if room >= self.context:
            raise UserError(
                f"an answer of up to {room} tokens fills the context of {self.context} (a run's is its "
                "train.sequence_length): leave the task out, or ask a network of a longer context"
            )
        ids = (*self.prefix, *self.tokenizer.encode(text)) or (self.start,)
        cut = max(0, len(ids) - (self.context - room))
        return ids[cut:], cut

    def requests(self, pairs: Sequence[tuple[str, str]]) -> Iterator[Request]:
        """How likely the second text of each pair is after the first, as the tokenizer reads both together.

        A continuation begins where the ids of the whole text leave those of the prompt: a token that spans
        the border belongs to it. Raises `UserError`, in the place of its request, for a continuation that
        adds no token, or one longer than the context.
        """
        for start in range(0, len(pairs), _ENCODED_AT_ONCE):
            some = pairs[start : start + _ENCODED_AT_ONCE]
            texts = list(dict.fromkeys(text for prompt, rest in some for text in (prompt, prompt + rest)))
            encoded = self.tokenizer.encode_batch(texts)
            ids = {text: (*self.prefix, *of.tolist()) for text, of in zip(texts, encoded, strict=True)}
            for prompt, continuation in some:
                yield self._request(ids[prompt], ids[prompt + continuation], continuation)

    def _request(self, alone: tuple[int, ...], whole: tuple[int, ...], continuation: str) -> Request:
        pairs = enumerate(zip(whole, alone, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(whole), len(alone)))
        context, rest = whole[:start] or (self.start,), whole[start:]
        if not rest:
            raise UserError(f"continuation {continuation!r}: adds no token to its prompt")
        # The last token of a continuation is predicted and not read.
        room = self.context - (len(rest) - 1)
        if room < 1:
            raise UserError(
                f"continuation of {len(rest)} tokens: does not fit into the {self.context} of the context"
            )
        return Request(context[-room:], rest, cut=max(0, len(context) - room))


def few_shot(
    items: Sequence[Item], pool: Sequence[Item] | None, shots: int, separator: str, seed: int
) -> list[str]:
    """What stands before each item: the same `shots` examples of `pool`, and never the item itself.

    Args:
      pool: items that examples are drawn from by `seed`; None takes them from `items`, where an item that is
        drawn is replaced by another one when it is itself asked.

    Raises `UserError` if there are too few.
    """
    if not shots:
        return [""] * len(items)
    source = items if pool is None else pool
    needed = shots if pool is not None else shots + 1
    if len(source) < needed:
        most = len(source) - (needed - shots)
        raise UserError(
            f"eval.shots={shots}: there are {len(source)} items to take examples from; legal: 0 to {most}"
        )
    drawn = np.random.default_rng(seed).choice(len(source), needed, replace=False).tolist()
    texts = {index: example(source[index]) for index in drawn}

    def before(asked: int | None) -> str:
        chosen = [index for index in drawn if index != asked][:shots]
        return "".join(texts[index] + separator for index in chosen)

    usual = before(None)
    return [before(i) if pool is None and i in texts else usual for i in range(len(items))]
