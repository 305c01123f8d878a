"""Source maps: which layer of the old stack each layer of the new stack is copied from.

Sources: MIDAS, Saunshi et al. 2024 (arXiv 2409.19044); LIDAS, Kapl et al. 2025 (arXiv 2512.08819, section
3.1, read with half-open bounds: docs/method.md says why); `last`, gradual stacking as the baseline of
MIDAS; `stack`, Gong et al. 2019 and G_stack, Du et al. 2024 (arXiv 2405.15319).
"""

from collections.abc import Callable
from typing import NamedTuple

from depthgrow_jax.errors import UserError


class SourceMap(NamedTuple):
    """One growth event.

    Attributes:
      source: layer i of the new stack is a copy of layer `source[i]` of the old one.
      new: True for the inserted copies. It matters only to what treats them apart: `identity` and
        `random` initialisation, `zero` optimizer state, the gate.
    """

    source: tuple[int, ...]
    new: tuple[bool, ...]

    @property
    def depth(self) -> int:
        """Depth after the event."""
        return len(self.source)


def _insert(depth: int, low: int, high: int) -> SourceMap:
    """Copies layers `low..high-1` and inserts the copies right after them."""
    source = (*range(high), *range(low, depth))
    return SourceMap(source, tuple(high <= i < 2 * high - low for i in range(len(source))))


def midas(depth: int, block_size: int) -> SourceMap:
    """Copies the middle block, m_b = ceil(n/2) - 1 of n = depth / block_size blocks."""
    blocks = depth // block_size
    low = ((blocks + 1) // 2 - 1) * block_size
    return _insert(depth, low, low + block_size)


def lidas(depth: int, block_size: int) -> SourceMap:
    """Copies the `block_size` layers around the exact centre, across a block border when n is even."""
    low = (depth + 1) // 2 - (block_size + 1) // 2
    return _insert(depth, low, low + block_size)


def last(depth: int, block_size: int) -> SourceMap:
    """Copies the top block to the top (gradual stacking)."""
    return _insert(depth, depth - block_size, depth)


def interleave(depth: int, block_size: int) -> SourceMap:
    """Copies each layer of the middle block (MIDAS') next to itself, so that it keeps its neighbours."""
    blocks = depth // block_size
    low = ((blocks + 1) // 2 - 1) * block_size
    middle = [i for layer in range(low, low + block_size) for i in (layer, layer)]
    source = (*range(low), *middle, *range(low + block_size, depth))
    return explicit(source)


def stack(depth: int, factor: int) -> SourceMap:
    """Repeats the whole stack `factor` times."""
    return SourceMap(tuple(range(depth)) * factor, tuple(i >= depth for i in range(depth * factor)))


def explicit(source: tuple[int, ...]) -> SourceMap:
    """Any source vector; every occurrence of a layer after its first counts as new."""
    return SourceMap(tuple(source), tuple(layer in source[:i] for i, layer in enumerate(source)))


# Operators that add `block_size` layers at an event, by name.
BLOCK_OPERATORS: dict[str, Callable[[int, int], SourceMap]] = {
    "midas": midas,
    "lidas": lidas,
    "last": last,
    "interleave": interleave,
}
# These count blocks from layer 0; the others are defined for any depth of at least one block.
WHOLE_BLOCKS = ("midas", "interleave")
OPERATORS = (*BLOCK_OPERATORS, "stack", "explicit")


def block_events(operator: str, start: int, final: int, block_size: int) -> list[SourceMap]:
    """Source maps from depth `start` to `final` by a block operator.

    Raises `UserError` listing the legal depths if `final` cannot be reached.
    """
    if operator in WHOLE_BLOCKS and start % block_size:
        raise UserError(
            f"growth.start_depth={start}: must be a multiple of growth.block_size={block_size} for {operator}"
        )
    if start < block_size:
        raise UserError(f"growth.start_depth={start}: must be at least growth.block_size={block_size}")
    if final < start or (final - start) % block_size:
        below = max(0, (final - start) // block_size - 3)
        legal = ", ".join(str(start + block_size * k) for k in range(below, below + 8)) + ", ..."
        raise UserError(
            f"depth={final}: {operator} from depth {start} with growth.block_size={block_size} "
            f"cannot reach it; legal depths: {legal}"
        )
    return [BLOCK_OPERATORS[operator](depth, block_size) for depth in range(start, final, block_size)]


def stack_events(start: int, final: int, factor: int) -> list[SourceMap]:
    """Source maps from depth `start` to `final` by stacking; raises `UserError` like `block_events`."""
    depths = [start]
    while depths[-1] < final:
        depths.append(depths[-1] * factor)
    if depths[-1] != final:
        raise UserError(
            f"depth={final}: stack from depth {start} with growth.stack_factor={factor} cannot reach it; "
            f"legal depths: {', '.join(map(str, depths))}, ..."
        )
    return [stack(depth, factor) for depth in depths[:-1]]


def explicit_events(sources: tuple[tuple[int, ...], ...], start: int, final: int) -> list[SourceMap]:
    """Checked source maps of the config; raises `UserError` naming the first illegal one."""
    depth = start
    for event, source in enumerate(sources):
        field = f"growth.sources[{event}]={tuple(source)!r}"
        bad = [i for i in source if not isinstance(i, int) or not 0 <= i < depth]
        if bad:
            raise UserError(
                f"{field}: {bad[0]!r} is not a layer of the depth-{depth} stack; legal: 0..{depth - 1}"
            )
        if len(source) <= depth:
            raise UserError(f"{field}: an event must add layers; legal: more than {depth} entries")
        depth = len(source)
    if depth != final:
        raise UserError(f"depth={final}: growth.sources end at depth {depth}; legal depths: {depth}")
    return [explicit(source) for source in sources]
