"""How block tables of running requests grow in a step: one by one, or in columns for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload


class Growth(NamedTuple):
    """The block table of `row` holds `block_ids` from index `first` on. Applying it twice changes nothing."""

    row: int
    first: int
    block_ids: tuple[int, ...]


class Growths(Sequence[Growth]):
    """One block more for each of many rows, in columns, then others: a sequence of `Growth`, made of the
    columns when it is first looked at. Immutable; equal to a tuple of the same."""

    __slots__ = ("_all", "block_ids", "others", "places", "rows")

    def __init__(
        self,
        rows: Sequence[int],
        places: Sequence[int],
        block_ids: Sequence[int],
        others: Sequence[Growth] = (),
    ) -> None:
        self.rows, self.places, self.block_ids = tuple(rows), tuple(places), tuple(block_ids)
        self.others = tuple(others)
        self._all: tuple[Growth, ...] | None = None

    def _made(self) -> tuple[Growth, ...]:
        if self._all is None:
            singles = map(Growth, self.rows, self.places, zip(self.block_ids, strict=True))
            self._all = (*singles, *self.others)
        return self._all

    def __len__(self) -> int:
        return len(self.rows) + len(self.others)

    def __iter__(self) -> Iterator[Growth]:
        return iter(self._made())

    @overload
    def __getitem__(self, index: int) -> Growth: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Growth, ...]: ...
    def __getitem__(self, index: int | slice) -> Growth | tuple[Growth, ...]:
        return self._made()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | Growths) and self._made() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._made())

    def __repr__(self) -> str:
        return repr(self._made())
