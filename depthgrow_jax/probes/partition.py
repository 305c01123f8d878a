"""Cutting a network into blocks of layers, given what exchanging adjacent runs of layers does. Numpy.

K steps, m layers of a run at most, R versions (resamples, shuffles). A pair of adjacent runs [i, j), [j, k)
has its value in arrays `[..., m, m, K - 1]` at [left length j - i - 1, right length k - j - 1, border j - 1];
NaN where the pair does not fit into the network. A class is all pairs of the same two lengths.
"""

from typing import NamedTuple

import numpy as np

# Smaller classes say nothing about which of their places is special.
LEAST_PLACES = 3
TREND_DEGREE = 4
Pair = tuple[int, int, int]


class Partition(NamedTuple):
    """The best partitions of R arrays of gains.

    Attributes:
      worth: `[R]`, the sum of gains over adjacent blocks; 0 if no partition has a positive one.
      num_blocks: `[R]`, 0 then.
      border: bool `[R, K - 1]`, where a block ends or begins, the first and last one's outer ends included.
    """

    worth: np.ndarray
    num_blocks: np.ndarray
    border: np.ndarray


def pairs(steps: int, longest: int) -> list[Pair]:
    """The m^2 (K - m) triples (i, j, k) with runs of 1 to m = min(longest, K // 2) layers, by class."""
    most = min(longest, steps // 2)
    return [
        (j - left, j, j + right)
        for left in range(1, most + 1)
        for right in range(1, most + 1)
        for j in range(left, steps - right + 1)
    ]


def place(values: np.ndarray, found: list[Pair], steps: int) -> np.ndarray:
    """`[..., len(found)]` to `[..., m, m, K - 1]`."""
    most = max((j - i for i, j, _ in found), default=0)
    placed = np.full((*values.shape[:-1], most, most, steps - 1), np.nan)
    for number, (i, j, k) in enumerate(found):
        placed[..., j - i - 1, k - j - 1, j - 1] = values[..., number]
    return placed


def residuals(values: np.ndarray, found: list[Pair], steps: int) -> np.ndarray:
    """`[..., len(found)]` less the mean of its class and a trend over depth that all classes share.

    Least squares of the values on the classes and the powers 1..4 of the middle of the pair, (i + k) / K - 1.
    Classes of fewer than 3 places take no part and get 0.
    """
    ends = np.asarray(found, int).reshape(-1, 3)
    labels = (ends[:, 1] - ends[:, 0]) * steps + ends[:, 2] - ends[:, 1]
    classes, index, places = np.unique(labels, return_inverse=True, return_counts=True)
    enough = places[index] >= LEAST_PLACES
    middle = ((ends[:, 0] + ends[:, 2]) / steps - 1)[:, None]
    design = np.concatenate(
        [index[:, None] == np.arange(len(classes))[None], middle ** np.arange(1, TREND_DEGREE + 1)[None]],
        axis=1,
    )[enough]
    left = np.zeros_like(values, dtype=np.float64)
    if enough.any():
        basis, size, _ = np.linalg.svd(design, full_matrices=False)
        basis = basis[:, size > 1e-9 * size[0]]
        kept = values[..., enough]
        left[..., enough] = kept - kept @ basis @ basis.T
    return left


def best_partition(gain: np.ndarray) -> Partition:
    """The partition with the largest sum of gains, exactly, by dynamic programming.

    The state is the last block, [j, j + b): its best chain is the block alone (0), or the best chain that
    ends in a block [j - a, j) plus the gain of the pair. m^2 K steps, all R arrays at once.

    Args:
      gain: `[R, m, m, K - 1]`.
    """
    rows, most, _, places = gain.shape
    steps = places + 1
    chain = np.full((rows, steps + 1, most + 1), -np.inf)  # last block [j, j + b)
    before = np.zeros((rows, steps + 1, most + 1), int)  # length of the block before it; 0 for none
    for j in range(steps):
        for b in range(1, min(most, steps - j) + 1):
            longer = [chain[:, j - a, a] + gain[:, a - 1, b - 1, j - 1] for a in range(1, min(most, j) + 1)]
            options = np.stack([np.zeros(rows), *longer])
            before[:, j, b], chain[:, j, b] = options.argmax(axis=0), options.max(axis=0)

    flat = chain.reshape(rows, -1)
    worth = np.maximum(flat.max(axis=1), 0.0)
    border, num_blocks = np.zeros((rows, steps + 1), bool), np.zeros(rows, int)
    for row in np.flatnonzero(worth > 0):
        j, b = np.unravel_index(flat[row].argmax(), chain.shape[1:])
        border[row, j + b] = True
        while b > 0:
            border[row, j] = True
            num_blocks[row] += 1
            b = before[row, j, b]
            j = j - b
    return Partition(worth, num_blocks, border[:, 1:-1])


def shuffled(gain: np.ndarray, shuffles: int, seed: int) -> np.ndarray:
    """`[shuffles, m, m, K - 1]`: the gains `[m, m, K - 1]` of every class, at its places in random order."""
    rng = np.random.default_rng(seed)
    tiled = np.tile(gain, (shuffles, 1, 1, 1))
    for left, right in np.ndindex(gain.shape[:2]):
        there = ~np.isnan(gain[left, right])
        tiled[:, left, right, there] = rng.permuted(tiled[:, left, right, there], axis=1)
    return tiled


def alignment(gain: np.ndarray) -> np.ndarray:
    """Mean gain of pairs of two runs of b layers by the border modulo b.

    `[R, m, m, K - 1]` to `[R, block size m, offset m]`; NaN where there is no such pair.
    """
    rows, most, _, places = gain.shape
    found = np.full((rows, most, most), np.nan)
    border = np.arange(1, places + 1)
    for size in range(1, most + 1):
        of_size = gain[:, size - 1, size - 1]
        for offset in range(size):
            chosen = (size <= border) & (border <= places + 1 - size) & (border % size == offset)
            if chosen.any():
                found[:, size - 1, offset] = of_size[:, chosen].mean(axis=1)
    return found


def share_at_multiples(border: np.ndarray, size: int) -> np.ndarray:
    """`[R, K - 1]` borders to their share at multiples of `size`, of those versions that have borders."""
    some = border[border.any(axis=1)]
    return some[:, size - 1 :: size].sum(axis=1) / some.sum(axis=1)
