"""`OfferQueue`: offers that were not answered yet."""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.comm.kv_transfer.incoming import Key, Path, Waiting


class OfferQueue:
    """Keeps offers in the order in which they came. Finds them by link and by path."""

    def __init__(self) -> None:
        self._waiting: dict[Key, Waiting] = {}
        self._of_link: dict[int, dict[Key, Waiting]] = {}
        self._heads: dict[Path, dict[Key, Waiting]] = {}
        """Those of a part of the heads, by path."""

    def __len__(self) -> int:
        return len(self._waiting)

    def get(self, key: Key) -> Waiting | None:
        return self._waiting.get(key)

    def first(self) -> Waiting | None:
        """The one that has waited longest."""
        return next(iter(self._waiting.values()), None)

    def of_link(self, link: int) -> Sequence[Waiting]:
        return list(self._of_link.get(link, {}).values())

    def num_of_link(self, link: int) -> int:
        return len(self._of_link.get(link, {}))

    def heads_of(self, path: Path) -> Sequence[Waiting]:
        """Of ranks that offer their heads of this path."""
        return list(self._heads.get(path, {}).values())

    def add(self, waiting: Waiting) -> None:
        """Add one whose key is not there."""
        for found in self._groups(waiting):
            found[waiting.key] = waiting

    def remove(self, key: Key) -> Waiting | None:
        waiting = self._waiting.get(key)
        if waiting is None:
            return None
        for found in self._groups(waiting):
            del found[key]
        if not self._of_link[waiting.link]:
            del self._of_link[waiting.link]
        if waiting.path in self._heads and not self._heads[waiting.path]:
            del self._heads[waiting.path]
        return waiting

    def clear(self) -> None:
        self._waiting.clear()
        self._of_link.clear()
        self._heads.clear()

    def _groups(self, waiting: Waiting) -> list[dict[Key, Waiting]]:
        """The dictionaries in which it is."""
        groups = [self._waiting, self._of_link.setdefault(waiting.link, {})]
        return [*groups, self._heads.setdefault(waiting.path, {})] if waiting.agreed.is_partial else groups
