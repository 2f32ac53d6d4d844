"""Blocks told in columns are what they would be one by one."""

from __future__ import annotations

from sagellm.core.plan import BlockTableDelta, BlockTableDeltas


def test_growths_in_columns_are_a_sequence_of_growth() -> None:
    other = BlockTableDelta(9, 2, (5, 6))
    growths = BlockTableDeltas([3, 1], [7, 8], [20, 21], [other])
    made = (BlockTableDelta(3, 7, (20,)), BlockTableDelta(1, 8, (21,)), other)
    assert growths == made
    assert made == growths
    assert hash(growths) == hash(made)
    assert (len(growths), growths[2], growths[:1], repr(growths)) == (3, other, made[:1], repr(made))
    assert growths == BlockTableDeltas([3, 1], [7, 8], [20, 21], [other])
    assert growths != BlockTableDeltas([3, 1], [7, 8], [20, 22], [other])
    assert growths != list(made)
