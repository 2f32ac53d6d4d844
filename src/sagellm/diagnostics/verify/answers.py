"""Answers of a server, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NUM_TOP = 5
"""Likeliest tokens asked per position: what OpenAI allows."""

UNDECODABLE = "�"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A generated token, its log-probability in nats, and the likeliest tokens there by text."""

    token: str
    logprob: float
    top: Mapping[str, float]

    @property
    def margin(self) -> float | None:
        """Nats between the two likeliest tokens; None if the server named fewer."""
        best = sorted(self.top.values(), reverse=True)[:2]
        return best[0] - best[1] if len(best) == 2 else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered to one request.

    `scores` is empty without log-probabilities. `cached_tokens` is None where the server does not tell,
    `seconds` is the time of the whole request. `retried`: this request or one beside it was sent again, since
    the server was busy; so its own first try may be what it hit.
    """

    text: str
    scores: tuple[TokenScore, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    seconds: float
    retried: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first generated token in which two answers differ.

    `margin` is the gap between the two likeliest tokens in the reference, in nats: below the noise of the
    logits a divergence means nothing.
    """

    position: int
    reference: str
    other: str
    margin: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two answers are apart.

    `size` is the largest difference of a log-probability, in nats, over positions up to the first diverging
    token, that one included: until there both have the same context. Without log-probabilities it is 1 where
    the texts differ, else 0. `num_tokens` were compared, 1 without log-probabilities.
    """

    size: float
    divergence: Divergence | None = None
    num_tokens: int = 1


def compare(reference: Answer, other: Answer) -> Difference:
    """The difference of two answers to the same prompt."""
    if not reference.scores or not other.scores:
        return _compare_texts(reference.text, other.text)
    size = 0.0
    for position, (mine, theirs) in enumerate(zip(reference.scores, other.scores, strict=False)):
        size = max(size, score_distance(mine, theirs))
        if mine.token != theirs.token:
            split = Divergence(position, mine.token, theirs.token, mine.margin)
            return Difference(size, split, position + 1)
    return Difference(size, None, min(len(reference.scores), len(other.scores)))


def _compare_texts(reference: str, other: str) -> Difference:
    if reference == other:
        return Difference(0.0)
    at = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), 0)
    return Difference(1.0, Divergence(at, reference[at : at + 20], other[at : at + 20], None))


def score_distance(left: TokenScore, right: TokenScore) -> float:
    """The largest difference of a token's log-probability at one place.

    In nats; infinite for NaN.     A token that only one of them lists has at most the other's lowest log-
    probability there, which gives a lower bound.
    """
    if left.token == right.token and not left.top and not right.top:
        return _gap(left.logprob, right.logprob)
    known = {left.token: left.logprob, **left.top}, {right.token: right.logprob, **right.top}
    lowest = tuple(_least_listed(side) for side in (left, right))
    largest = 0.0
    for token in known[0].keys() | known[1].keys():
        mine, theirs = known[0].get(token), known[1].get(token)
        if mine is not None and theirs is not None:
            largest = max(largest, _gap(mine, theirs))
        elif mine is not None:
            largest = max(largest, mine - lowest[1])
        elif theirs is not None:
            largest = max(largest, theirs - lowest[0])
    return largest


def _least_listed(score: TokenScore) -> float:
    """The log-probability of the last of the likeliest tokens.

    No token that is not listed has more.
    Some servers list the chosen token beside the likeliest ones, which says nothing about others.
    """
    likeliest = sorted(score.top.values(), reverse=True)[:NUM_TOP]
    return likeliest[-1] if likeliest else math.inf


def _gap(a: float, b: float) -> float:
    gap = 0.0 if a == b else abs(a - b)
    return math.inf if math.isnan(gap) else gap


def read_scores(choice: Mapping[str, Any]) -> tuple[TokenScore, ...]:
    """The scores of a choice of /v1/completions or /v1/chat/completions; empty if it has none.

    Raises `ValueError`, `TypeError` or `KeyError` for a form that is neither.
    """
    logprobs = choice.get("logprobs")
    if not logprobs:
        return ()
    if logprobs.get("content") is not None:
        return tuple(_chat_score(entry) for entry in logprobs["content"])
    tokens, chosen = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not tokens or chosen is None:
        return ()
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenScore(text_of(token), _number(logprob), _unambiguous((top or {}).items()))
        for token, logprob, top in zip(tokens, chosen, tops, strict=True)
    )


def _chat_score(entry: Mapping[str, Any]) -> TokenScore:
    top = [(likely["token"], likely["logprob"]) for likely in entry.get("top_logprobs") or ()]
    return TokenScore(text_of(entry["token"]), _number(entry["logprob"]), _unambiguous(top))


def _unambiguous(top: Any) -> dict[str, float]:
    """The likeliest tokens by text, or nothing where texts stand for several tokens.

    Bytes of an incomplete character all have the same text, so a dictionary keeps one of them at random.
    """
    pairs = [(text_of(token), _number(logprob)) for token, logprob in top]
    named = {token: logprob for token, logprob in pairs if UNDECODABLE not in token}
    return named if len(named) == len(pairs) >= NUM_TOP else {}


def text_of(value: Any) -> str:
    """The value as text that UTF-8 can write.

    Halves of surrogate pairs, which JSON allows, are escaped.
    """
    return str(value).encode(errors="backslashreplace").decode()


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
