"""Stop strings across token borders: text that could become one is held back until that is decided."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text, given in pieces, at the stop string that is complete first.

    The outcome depends on the text alone, not on how it is cut into pieces: among matches the one that ends
    first wins, then the longest. `include` keeps the stop string in the output.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """What may be shown now. After a match everything is dropped."""
        if self.matched is not None or not piece:
            return ""
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            end, self.matched = match
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        keep = len(text) - self._num_undecided(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """The text has ended: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and stop string of the earliest complete match."""
        found = ((text.find(stop) + len(stop), stop) for stop in self._stops if stop in text)
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _num_undecided(self, text: str) -> int:
        """Length of the longest tail of `text` with which some stop string begins."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
