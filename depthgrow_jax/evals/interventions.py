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

    Raises `UserError` for an operation that none of `run_lengths` fits, and for a length that fits none.
    """
    # Of one layer there is nothing to reverse; two runs are swapped; a network without layers is none.
    legal = {"skip": (1, steps - 1), "swap": (1, steps // 2), "reverse": (2, steps), "repeat": (1, steps)}
    found = []
    for operation in operations:
        least, most = legal[operation]
        lengths = [n for n in run_lengths or default_lengths(steps) if least <= n <= most]
        says = f"none of them fits {operation}, which takes runs of {least} to {most} of {steps} layers"
        require(bool(lengths) or not run_lengths, "eval.run_lengths", run_lengths, says)
        for length in lengths:
            span = 2 * length if operation == "swap" else length
            starts = tuple(range(steps - span + 1))
            orders = tuple(_order(operation, steps, start, length, repeats) for start in starts)
            found.append(Sweep(operation, length, starts, orders))
    unused = sorted(set(run_lengths) - {sweep.run_length for sweep in found})
    says = f"{unused} fit none of {', '.join(operations)} of {steps} layers"
    require(not unused, "eval.run_lengths", run_lengths, says)
    return found


def _order(operation: str, steps: int, start: int, length: int, repeats: int) -> tuple[int, ...]:
    if operation == "repeat":
        return repeat(steps, start, length, repeats)
    change = {"skip": programs.skip, "swap": programs.swap, "reverse": programs.reverse}[operation]
    return change(steps, start, length).order
