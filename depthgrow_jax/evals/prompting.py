"""From items to ids: few-shot examples before an item, and where a continuation begins."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from depthgrow_jax.data.tokenizer import Tokenizer
from depthgrow_jax.errors import UserError
from depthgrow_jax.evals.items import Item, example
from depthgrow_jax.evals.trees import Request


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
        """Ids of a text that leave `room` tokens of the context, and how many were cut off at the left."""
        ids = (*self.prefix, *self.tokenizer.encode(text)) or (self.start,)
        cut = max(0, len(ids) - (self.context - room))
        return ids[cut:], cut

    def requests(self, prompt: str, continuations: Sequence[str]) -> list[Request]:
        """How likely each of `continuations` is after `prompt`, as the tokenizer reads both together.

        A continuation begins where the ids of the whole text leave those of the prompt: a token that spans
        the border belongs to it. Raises `UserError` for a continuation that adds no token, or one longer than
        the context.
        """
        alone = (*self.prefix, *self.tokenizer.encode(prompt))
        texts = self.tokenizer.encode_batch([prompt + continuation for continuation in continuations])
        return [
            self._request(alone, (*self.prefix, *ids.tolist()), continuation)
            for ids, continuation in zip(texts, continuations, strict=True)
        ]

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
