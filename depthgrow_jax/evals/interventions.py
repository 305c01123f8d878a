"""Orders that a task is run under: runs of layers skipped, swapped, reversed or repeated, at every start.

Kapl et al. 2025 (arXiv 2512.08819, figures 3, 6, 9, 10) and their follow-up (repeats at inference).
"""

from typing import NamedTuple

from depthgrow_jax.errors import require
from depthgrow_jax.probes import programs
from depthgrow_jax.probes.order import default_lengths


class Sweep(NamedTuple):
    """All starts of one operation: orders of equal length, one for each of `starts`."""

    operation: str
    run_length: int
    starts: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]


def repeat(steps: int, start: int, length: int, times: int) -> tuple[int, ...]:
    """Layers [start, start + length) run `times` more times, each time after the last."""
    run = tuple(range(start, start + length))
    return (*range(start), *run * (times + 1), *range(start + length, steps))


def sweeps(
    operations: tuple[str, ...], steps: int, run_lengths: tuple[int, ...] = (), repeats: int = 1
) -> list[Sweep]:
    """The sweeps of a network of `steps` steps; runs of one layer are not reversed.

    Args:
      run_lengths: empty for those of 1, 2, 4, 8 that the depth allows.

    Raises `UserError` for a run that is longer than the network.
    """
    lengths = run_lengths or default_lengths(steps)
    legal = f"longer than the {steps} layers of the model; legal: 1 to {steps}"
    require(max(lengths) <= steps, "eval.run_lengths", run_lengths, legal)
    found = []
    for operation in operations:
        for length in lengths:
            if operation == "reverse" and length == 1:
                continue
            span = 2 * length if operation == "swap" else length
            # A network without layers is none: skipping all of them is left out.
            starts = tuple(range(steps - span + 1)) if span < steps or operation != "skip" else ()
            if not starts:
                continue
            found.append(
                Sweep(
                    operation,
                    length,
                    starts,
                    tuple(_order(operation, steps, s, length, repeats) for s in starts),
                )
            )
    return found


def _order(operation: str, steps: int, start: int, length: int, repeats: int) -> tuple[int, ...]:
    if operation == "repeat":
        return repeat(steps, start, length, repeats)
    change = {"skip": programs.skip, "swap": programs.swap, "reverse": programs.reverse}[operation]
    return change(steps, start, length).order
