"""Requests that share a context are one tree: its trunk is read once, every continuation is a branch of it.

    tokens    c c c c c  x x  y y y      trunk c, branches x and y, the last token of each is never read
    position  0 1 2 3 4  5 6  5 6 7      each branch goes on from the trunk
    branch    0 0 0 0 0  1 1  2 2 2      a token sees the trunk, and its own branch up to itself

Trees of one call that begin alike (few-shot examples) share that beginning as well: it is a prefix, read once
for all of them. Everything here is host work, in numpy and tuples.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from depthgrow_jax.model.generation import bucket

# A shorter beginning is not worth a pass of its own.
_LEAST_PREFIX, _LEAST_TREES = 32, 4
_MOST_TARGETS = 128
PADDING = -1


class Request(NamedTuple):
    """How likely is `continuation` after `context`? Ids, at least one each; `cut` are missing at the left."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = 0


class Tree(NamedTuple):
    """A trunk and its branches; `wanted[i]` are the requests that branch i answers."""

    trunk: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...]
    wanted: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Tokens that are read."""
        return len(self.trunk) + sum(len(branch) - 1 for branch in self.branches)

    @property
    def targets(self) -> int:
        """Tokens that are predicted."""
        return sum(map(len, self.branches))


class Rows(NamedTuple):
    """Trees, padded: B rows, T tokens, C targets; in numpy, or on the devices.

    Attributes:
      tokens, position, branch: int32 `[B, T]`; branch 0 is the trunk, -1 padding.
      place: int32 `[B, C]`, the token from which a target is predicted.
      target: int32 `[B, C]` ids; -1 padding.
    """

    tokens: Any
    position: Any
    branch: Any
    place: Any
    target: Any


class Batch(NamedTuple):
    """Trees behind a common prefix (ids, maybe none), and their rows; `linear`: no row reads two branches."""

    prefix: tuple[int, ...]
    trees: list[Tree]
    rows: Rows
    linear: bool


def trees_of(requests: Sequence[Request]) -> list[Tree]:
    """A tree for each context, several where it has many branches; equal requests share a branch."""
    contexts: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for index, request in enumerate(requests):
        contexts.setdefault(request.context, {}).setdefault(request.continuation, []).append(index)
    trees = []
    for context, branches in contexts.items():
        # Attention compares all tokens of a tree: far more branches than trunk cost more than another trunk.
        most, chosen = max(_MOST_TARGETS, 2 * len(context)), []
        for branch, wanted in branches.items():
            if chosen and sum(len(b) for b, _ in chosen) + len(branch) > most:
                trees.append(_tree(context, chosen))
                chosen = []
            chosen.append((branch, wanted))
        trees.append(_tree(context, chosen))
    return trees


def _tree(trunk: tuple[int, ...], branches: Sequence[tuple[tuple[int, ...], list[int]]]) -> Tree:
    return Tree(trunk, tuple(b for b, _ in branches), tuple(tuple(wanted) for _, wanted in branches))


def batches(requests: Sequence[Request], batch_tokens: int, multiple: int = 1) -> Iterator[Batch]:
    """All requests in batches of about `batch_tokens` tokens, the longest first.

    The rows of a batch are a multiple of `multiple`.
    """
    for prefix, trees in _behind_prefixes(trees_of(requests)):
        rest = collections.deque(sorted(trees, key=lambda tree: -tree.size))
        # Few trees do not fill a large batch with padding; in powers of two: few shapes, few compilations.
        most = 2 ** (len(trees) - 1).bit_length()
        while rest:
            length = bucket(rest[0].size)
            count = max(1, -(-min(batch_tokens // length, most) // multiple)) * multiple
            chosen = [rest.popleft() for _ in range(min(count, len(rest)))]
            yield Batch(
                prefix,
                chosen,
                _rows(chosen, length, count, len(prefix)),
                # A branch of one token is predicted, not read.
                all(sum(len(branch) > 1 for branch in tree.branches) <= 1 for tree in chosen),
            )


def _behind_prefixes(trees: list[Tree]) -> Iterator[tuple[tuple[int, ...], list[Tree]]]:
    """Trees by the beginning that they share, which is taken off their trunks."""
    families: dict[tuple[int, ...], list[Tree]] = {}
    for tree in trees:
        families.setdefault(tree.trunk[:_LEAST_PREFIX], []).append(tree)
    alone: list[Tree] = []
    for beginning, family in families.items():
        if len(beginning) < _LEAST_PREFIX or len(family) < _LEAST_TREES:
            alone += family
            continue
        shared = _common([tree.trunk for tree in family])
        # A trunk keeps a token: the first targets are predicted from it.
        shared = min(shared, min(len(tree.trunk) for tree in family) - 1)
        if shared < _LEAST_PREFIX:
            alone += family
        else:
            yield family[0].trunk[:shared], [tree._replace(trunk=tree.trunk[shared:]) for tree in family]
    if alone:
        yield (), alone


def _common(sequences: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest common beginning: that of the smallest and the largest."""
    low, high = min(sequences), max(sequences)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


def _rows(trees: Sequence[Tree], length: int, count: int, start: int) -> Rows:
    """`count` rows of `length` tokens; those beyond the trees repeat the first tree and predict nothing."""
    targets = bucket(max(tree.targets for tree in trees))
    shape = (count, length)
    rows = Rows(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.full(shape, PADDING, np.int32),
        np.zeros((count, targets), np.int32),
        np.full((count, targets), PADDING, np.int32),
    )
    rows.branch[:, 0] = 0  # a row sees at least one token
    for row, tree in enumerate(trees):
        trunk = len(tree.trunk)
        rows.tokens[row, :trunk] = tree.trunk
        rows.position[row, :trunk] = np.arange(start, start + trunk)
        rows.branch[row, :trunk] = 0
        at, seen = trunk, 0
        for number, branch in enumerate(tree.branches, 1):
            read = len(branch) - 1
            rows.tokens[row, at : at + read] = branch[:-1]
            rows.position[row, at : at + read] = np.arange(start + trunk, start + trunk + read)
            rows.branch[row, at : at + read] = number
            rows.target[row, seen : seen + len(branch)] = branch
            rows.place[row, seen] = trunk - 1
            rows.place[row, seen + 1 : seen + len(branch)] = np.arange(at, at + read)
            at, seen = at + read, seen + len(branch)
    return rows
