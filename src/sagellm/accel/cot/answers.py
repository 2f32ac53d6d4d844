"""`answer_of`: what a text answers, in a form that equal answers share."""

from __future__ import annotations

import re

BOX = "\\boxed{"
_BRACES = re.compile(r"\\boxed\{|[{}]")
_NUMBER = re.compile(
    r"(?:(?<![\w.])[-\u2212])?(?<![\w.])"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?|\.[0-9]+)"
)
DECORATION = " \t.:;!?*_`\"'$"
_BEFORE_NUMBER = DECORATION.replace(".", "")
"""A point in front of a number is a part of it."""


def answer_of(text: str, reasoning_end: str = "") -> str | None:
    """The answer that a text gives; None if it is empty. Takes time in proportion to its length.

    The text behind the last `reasoning_end` counts, where that occurs. Of it the answer is the content of the
    last `\\boxed{...}`; without one, the last number, as a decimal or a fraction; without one, the last line
    that is not empty, whatever its case, spaces and surrounding punctuation.
    """
    if reasoning_end:
        text = text.rpartition(reasoning_end)[2]
    boxed = _last_box(text)
    if boxed is not None:
        number = _NUMBER.fullmatch(boxed.strip().lstrip(_BEFORE_NUMBER).rstrip(DECORATION))
        return _plain_text(boxed) if number is None else _plain_number(number[0])
    numbers = _NUMBER.findall(text)
    if numbers:
        return _plain_number(numbers[-1])
    lines = (_plain_text(line) for line in reversed(text.splitlines()))
    return next((line for line in lines if line), None)


def _last_box(text: str) -> str | None:
    """The content of the last box that is closed and not empty. Braces within it are balanced."""
    opened: list[tuple[int, bool]] = []
    boxes: list[tuple[int, int]] = []
    for brace in _BRACES.finditer(text):
        if brace[0] != "}":
            opened.append((brace.end(), brace[0] == BOX))
        elif opened:
            start, is_box = opened.pop()
            if is_box:
                boxes.append((start, brace.start()))
    contents = (text[start:end] for start, end in sorted(boxes, reverse=True))
    return next((content for content in contents if _plain_text(content)), None)


def _plain_number(number: str) -> str:
    """Without separators of thousands, leading zeros, and zeros that end a decimal."""
    digits = number.lstrip("-\u2212").replace(",", "")
    whole, _, decimals = digits.partition(".")
    plain = digits
    if "/" not in digits:
        decimals = decimals.rstrip("0")
        plain = (whole.lstrip("0") or "0") + (f".{decimals}" if decimals else "")
    is_negative = number[0] in "-\u2212" and plain != "0"
    return f"-{plain}" if is_negative else plain


def _plain_text(text: str) -> str:
    return " ".join(text.split()).strip(DECORATION).casefold()
