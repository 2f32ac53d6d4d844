"""Deltas in columns equal the same deltas one by one."""

from __future__ import annotations

from sagellm.core.plan import BlockTableDelta, BlockTableDeltas


def test_deltas_in_columns_equal_single_deltas() -> None:
    other = BlockTableDelta(9, 2, (5, 6))
    deltas = BlockTableDeltas([3, 1], [7, 8], [20, 21], [other])
    made = (BlockTableDelta(3, 7, (20,)), BlockTableDelta(1, 8, (21,)), other)
    assert deltas == made
    assert made == deltas
    assert hash(deltas) == hash(made)
    assert (len(deltas), deltas[2], deltas[:1], repr(deltas)) == (3, other, made[:1], repr(made))
    assert deltas == BlockTableDeltas([3, 1], [7, 8], [20, 21], [other])
    assert deltas != BlockTableDeltas([3, 1], [7, 8], [20, 22], [other])
    assert deltas != list(made)
