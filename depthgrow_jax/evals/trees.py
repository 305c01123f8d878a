"""Requests that share a context are one tree: its trunk is read once, every continuation is a branch of it.

    tokens    c c c c c  x x  y y y      trunk c, branches x and y, the last token of each is never read
    position  0 1 2 3 4  5 6  5 6 7      each branch goes on from the trunk
    branch    0 0 0 0 0  1 1  2 2 2      a token sees the trunk, and its own branch up to itself

Trees of one call that begin alike (few-shot examples) share that beginning as well: it is a prefix, read once
for all of them. Everything here is host work, in numpy and tuples.
"""

import bisect
import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

# Tokens that a shared beginning must save: it takes a pass of its own, shapes to compile, and a batch that is
# not full.
_PREFIX_COST = 1024
# Padding, in tokens, that another length must save: it is another shape to compile.
_SHAPE_COST = 4096
# Where trees that begin alike may part.
_PARTINGS = (8, 32, 128, 512)
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
    def sources(self) -> int:
        """Tokens that something is predicted from: the trunk's last, and all that branches read."""
        return self.size - len(self.trunk) + 1

    @property
    def targets(self) -> int:
        """Tokens that are predicted."""
        return sum(map(len, self.branches))


class Rows(NamedTuple):
    """Trees, padded: B rows, T tokens, S sources, C targets; in numpy, or on the devices.

    Attributes:
      tokens, position, branch: int32 `[B, T]`; branch 0 is the trunk, -1 padding.
      place: int32 `[B, S]`, the tokens that something is predicted from.
      source: int32 `[B, C]`, from which of these a target is predicted: the first tokens of all branches
        from the same one.
      target: int32 `[B, C]` ids; -1 padding.
    """

    tokens: Any
    position: Any
    branch: Any
    place: Any
    source: Any
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
    for prefix, trees in _behind_prefixes(trees_of(requests)) if requests else ():
        rest = collections.deque(sorted(trees, key=lambda tree: -tree.size))
        lengths = _lengths([tree.size for tree in trees])
        # Few trees do not fill a large batch with padding; in powers of two: few shapes, few compilations.
        most = 2 ** (len(trees) - 1).bit_length()
        predicted: dict[int, tuple[int, int]] = {}
        while rest:
            length = lengths[bisect.bisect_left(lengths, rest[0].size)]
            count = max(1, -(-min(batch_tokens // length, most) // multiple)) * multiple
            # The same for all batches of a length: others would be other shapes.
            if length not in predicted:
                predicted[length] = max(t.sources for t in rest), max(t.targets for t in rest)
            chosen = [rest.popleft() for _ in range(min(count, len(rest)))]
            yield Batch(
                prefix,
                chosen,
                _rows(chosen, count, length, *predicted[length], start=len(prefix)),
                # A branch of one token is predicted, not read.
                all(sum(len(branch) > 1 for branch in tree.branches) <= 1 for tree in chosen),
            )


def _lengths(sizes: Sequence[int]) -> list[int]:
    """Lengths that trees are padded to, ascending: few, where few tokens are to be read."""
    rounded = sorted(map(_rounded, sizes), reverse=True)
    kept = rounded[:1]
    for index, length in enumerate(rounded):
        # What this length saves the trees from here on.
        if (len(rounded) - index) * (kept[-1] - length) > _SHAPE_COST:
            kept.append(length)
    return kept[::-1]


def _rounded(size: int) -> int:
    """The next of 4, 8, ..., 64, 72, ..., 128, 144, ...: eight in every doubling, from 32 on."""
    step = max(4, 2 ** (size - 1).bit_length() // 16)
    return -(-size // step) * step


def _behind_prefixes(trees: list[Tree]) -> Iterator[tuple[tuple[int, ...], list[Tree]]]:
    """Trees by the beginning that they share, which is taken off their trunks."""
    alone: list[Tree] = []
    for shared, family in _families(trees, _PARTINGS)[1]:
        if shared:
            yield family[0].trunk[:shared], [tree._replace(trunk=tree.trunk[shared:]) for tree in family]
        else:
            alone += family
    if alone:
        yield (), alone


def _families(trees: list[Tree], partings: Sequence[int]) -> tuple[int, list[tuple[int, list[Tree]]]]:
    """Tokens saved, and (tokens shared, trees) of each family, parted where that saves the most."""
    # A trunk keeps a token: the first targets are predicted from it.
    shared = min(_common([tree.trunk for tree in trees]), min(len(tree.trunk) for tree in trees) - 1)
    saved = shared * (len(trees) - 1) - _PREFIX_COST
    one = (saved, [(shared, trees)]) if saved > 0 else (0, [(0, trees)])
    if not partings or len(trees) == 1:
        return one
    alike: dict[tuple[int, ...], list[Tree]] = {}
    for tree in trees:
        alike.setdefault(tree.trunk[: partings[0]], []).append(tree)
    parts = [_families(family, partings[1:]) for family in alike.values()]
    apart = sum(saved for saved, _ in parts), [family for _, families in parts for family in families]
    return max(one, apart, key=lambda found: found[0])


def _common(sequences: Sequence[tuple[int, ...]]) -> int:
    """Length of the longest common beginning: that of the smallest and the largest."""
    low, high = min(sequences), max(sequences)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


def _rows(trees: Sequence[Tree], count: int, length: int, sources: int, targets: int, start: int) -> Rows:
    """`count` rows of `length` tokens, the first from `start` on; those beyond the trees predict nothing.

    `sources` and `targets` are the most that a tree has.
    """
    # A head for one token a row, the usual choices, is much less work than one for a few.
    places = (count, 1 if sources == 1 else _rounded(sources))
    wanted = (count, _rounded(targets))
    rows = Rows(
        np.zeros((count, length), np.int32),
        np.zeros((count, length), np.int32),
        np.full((count, length), PADDING, np.int32),
        np.zeros(places, np.int32),
        np.zeros(wanted, np.int32),
        np.full(wanted, PADDING, np.int32),
    )
    rows.branch[:, 0] = 0  # a row sees at least one token
    for row, tree in enumerate(trees):
        trunk = len(tree.trunk)
        rows.tokens[row, :trunk] = tree.trunk
        rows.position[row, :trunk] = np.arange(start, start + trunk)
        rows.branch[row, :trunk] = 0
        rows.place[row, : tree.sources] = np.arange(trunk - 1, trunk - 1 + tree.sources)
        at, seen = trunk, 0
        for number, branch in enumerate(tree.branches, 1):
            read = len(branch) - 1
            rows.tokens[row, at : at + read] = branch[:-1]
            rows.position[row, at : at + read] = np.arange(start + trunk, start + trunk + read)
            rows.branch[row, at : at + read] = number
            rows.target[row, seen : seen + len(branch)] = branch
            first = at - trunk + 1
            rows.source[row, seen + 1 : seen + len(branch)] = np.arange(first, first + read)
            at, seen = at + read, seen + len(branch)
    return rows
