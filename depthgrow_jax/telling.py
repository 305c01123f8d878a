"""What a command says while it works: lines, and how much of a long task is done; all to stderr."""

import sys
import time
from collections.abc import Iterator

from tqdm import tqdm

_LINE_SECONDS = 10.0


def line(text: str) -> None:
    """Tells the user something, beside what a command prints as its result."""
    print(text, file=sys.stderr, flush=True)


def watch(what: str, total: int, items: Iterator) -> Iterator:
    """Passes `items` on and shows how many are done: a bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=what, total=total, leave=False, file=sys.stderr, dynamic_ncols=True)
        return
    shown = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - shown >= _LINE_SECONDS:
            shown = time.monotonic()
            line(f"{what}: {done}/{total}")
        yield item
