"""Source maps are the papers': every event of every published run, copied layers and where they land.

The tables: MIDAS, arXiv 2409.19044, eqs 1-2; LIDAS, arXiv 2512.08819, section 3.1, read half-open.
"""

import pytest

from depthgrow_jax.errors import UserError
from depthgrow_jax.growth import GrowthConfig, SourceMap, plan_stages
from depthgrow_jax.growth.source import BLOCK_OPERATORS, explicit, interleave, last, lidas, midas, stack

# (operator, block size): for each event, the first and last layer copied; the copies follow the last one.
PUBLISHED = {
    ("midas", 4): [(0, 3), (0, 3), (4, 7), (4, 7), (8, 11), (8, 11), (12, 15)],
    ("lidas", 4): [(0, 3), (2, 5), (4, 7), (6, 9), (8, 11), (10, 13), (12, 15)],
    ("midas", 3): [(0, 2), (0, 2), (3, 5), (3, 5), (6, 8), (6, 8), (9, 11)],
    ("lidas", 3): [(0, 2), (1, 3), (3, 5), (4, 6), (6, 8), (7, 9), (9, 11)],
    ("midas", 8): [(0, 7), (0, 7), (8, 15)],
    ("lidas", 8): [(0, 7), (4, 11), (8, 15)],
}


@pytest.mark.parametrize(("operator", "block_size"), PUBLISHED)
@pytest.mark.parametrize("final", [24, 32])
def test_every_event_of_the_published_runs(operator, block_size, final):
    if final % block_size:
        final = 24
    cfg = GrowthConfig(operator=operator, block_size=block_size)
    events = [stage.event for stage in plan_stages(cfg, final, 200_000)[1:]]
    assert len(events) == final // block_size - 1
    rows = PUBLISHED[operator, block_size][: len(events)]
    for number, (event, (first, end)) in enumerate(zip(events, rows, strict=True), start=1):
        old, copied, at = list(range(number * block_size)), list(range(first, end + 1)), end + 1
        assert list(event.source) == old[:at] + copied + old[at:]
        new = [False] * at + [True] * block_size + [False] * (len(old) - at)
        assert list(event.new) == new
        assert event.depth == (number + 1) * block_size


def test_the_first_event_where_they_differ_layer_by_layer():
    assert midas(8, 4).source == (0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7)
    assert lidas(8, 4).source == (0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7)
    assert midas(8, 4).new == (False,) * 4 + (True,) * 4 + (False,) * 4
    assert lidas(8, 4).new == (False,) * 6 + (True,) * 4 + (False,) * 2


@pytest.mark.parametrize("block_size", range(1, 13))
def test_lidas_is_midas_for_odd_numbers_of_blocks_and_only_then(block_size):
    for blocks in range(1, 20):
        depth = blocks * block_size
        same = midas(depth, block_size) == lidas(depth, block_size)
        # A block of one layer has no border to cross but still a centre: ceil(L/2) - 1 for both.
        assert same == (blocks % 2 == 1 or block_size == 1), (block_size, blocks)


@pytest.mark.parametrize("operator", ["midas", "lidas", "last"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 8])
def test_position_modulo_block_size_is_a_lineage(operator, block_size):
    """Final layer i descends from layer i mod b of the first stage, through any number of events."""
    ancestor = list(range(block_size))
    for blocks in range(1, 12):
        event = BLOCK_OPERATORS[operator](blocks * block_size, block_size)
        ancestor = [ancestor[i] for i in event.source]
        assert ancestor == [i % block_size for i in range(event.depth)]


@pytest.mark.parametrize("operator", ["midas", "lidas", "last", "interleave"])
def test_every_event_keeps_each_old_layer_once_in_order_and_adds_one_block(operator):
    for block_size in range(1, 9):
        for blocks in range(1, 10):
            depth = blocks * block_size
            event = BLOCK_OPERATORS[operator](depth, block_size)
            kept = [s for s, new in zip(event.source, event.new, strict=True) if not new]
            assert kept == list(range(depth))
            assert sum(event.new) == block_size


def test_other_operators_by_hand():
    F, T = False, True
    assert last(6, 2) == SourceMap((0, 1, 2, 3, 4, 5, 4, 5), (F,) * 6 + (T, T))
    assert stack(3, 2) == SourceMap((0, 1, 2, 0, 1, 2), (F, F, F, T, T, T))
    assert stack(2, 3) == SourceMap((0, 1, 0, 1, 0, 1), (F, F, T, T, T, T))
    # The middle block of 0-1 | 2-3 | 4-5 is 2-3.
    assert interleave(6, 2) == SourceMap((0, 1, 2, 2, 3, 3, 4, 5), (F, F, F, T, F, T, F, F))
    assert explicit((1, 0, 1, 1)) == SourceMap((1, 0, 1, 1), (F, F, T, T))


def test_stack_multiplies_the_depth_at_every_event():
    cfg = GrowthConfig(operator="stack", start_depth=3, stack_factor=2)
    assert [stage.depth for stage in plan_stages(cfg, 24, 100)] == [3, 6, 12, 24]


def test_explicit_sources_make_the_events():
    cfg = GrowthConfig(operator="explicit", sources=((0, 1, 0), (0, 1, 2, 2)))
    stages = plan_stages(cfg, 4, 100)
    assert [stage.depth for stage in stages] == [2, 3, 4]
    assert [stage.event.source for stage in stages[1:]] == [(0, 1, 0), (0, 1, 2, 2)]


@pytest.mark.parametrize(
    ("changes", "depth", "expected"),
    [
        ({"sources": ()}, 4, "growth.sources=()"),
        ({"sources": ((0, 1, 2),), "start_depth": 2}, 3, "growth.sources[0]=(0, 1, 2): 2 is not a layer of"),
        ({"sources": ((0, 1, -1),)}, 3, "growth.sources[0]=(0, 1, -1): -1 is not a layer of the depth-2"),
        ({"sources": ((0, 1, 2),)}, 3, "growth.sources[0]=(0, 1, 2): an event must add layers"),
        ({"sources": ((0, 0), (0, 1, 2))}, 3, "growth.sources[1]=(0, 1, 2): 2 is not a layer of the depth-2"),
        ({"sources": ((0, 0, 0),)}, 5, "depth=5: growth.sources end at depth 3; legal depths: 3"),
    ],
)
def test_illegal_explicit_sources_are_named(changes, depth, expected):
    with pytest.raises(UserError) as caught:
        plan_stages(GrowthConfig(operator="explicit", **changes), depth, 100)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)
