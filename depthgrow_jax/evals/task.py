"""What a task is: a few declarative lines over a reader of items."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

from depthgrow_jax.evals.items import Item


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      name: on the command line and in results.
      read: (file or None, seed) -> items, in their order. Generated tasks ignore the file, files the seed.
      path: of the file, relative to the directory of evaluation data; empty for a generated task.
      source: where the data come from and where to get them (one line; shown where the file is missing).
      licence: of the data.
      shots: few-shot examples before each item, by default.
      shots_read: items that examples are taken from (a training split), as `read`; None takes them from the
        task itself: never the item that is asked.
      shots_path: the file of `shots_read`.
      separator: stands between examples, and between the last one and the item.
      metric: `accuracy` (Choice; length-normalised accuracy comes along), `last_word` (Completion: accuracy
        and perplexity), `exact`, `f1` or `drop_f1` (Question).
      extract: Question: the answer in a generated text, None where there is none.
      normalise: Question: what is done to an extracted and to a gold answer before they are compared.
      stops: Question: texts that end a generation.
      max_tokens: Question: new tokens at most.
    """

    name: str
    read: Callable[[pathlib.Path | None, int], Sequence[Item]]
    path: str = ""
    source: str = "generated"
    licence: str = "none"
    shots: int = 0
    shots_read: Callable[[pathlib.Path | None, int], Sequence[Item]] | None = None
    shots_path: str = ""
    separator: str = "\n\n"
    metric: str = "accuracy"
    extract: Callable[[str], str | None] = str.strip
    normalise: Callable[[str], str] = str.strip
    stops: tuple[str, ...] = ("\n\n",)
    max_tokens: int = 64
