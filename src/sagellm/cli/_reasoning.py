"""A model's reasoning, the text between <think> and </think>, dimmed on a terminal."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class DimmedReasoning:
    """Adds escape sequences to a text that comes in pieces. What may be the beginning of a tag is held back
    until the next piece.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str) -> str:
        """What can be shown of the text so far, and was not shown before."""
        text, shown = self._held + text, ""
        while True:
            tag = CLOSE if self._inside else OPEN
            before, found, after = text.partition(tag)
            if not found:
                break
            shown += f"{before}{tag}{PLAIN}" if self._inside else f"{before}{DIM}{tag}"
            self._inside = not self._inside
            text = after
        keep = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
        self._held = text[len(text) - keep :]
        return shown + text[: len(text) - keep]

    def finish(self) -> str:
        """The rest; a new text begins."""
        rest = self._held + (PLAIN if self._inside else "")
        self._held, self._inside = "", False
        return rest
