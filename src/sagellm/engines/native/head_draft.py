"""`HeadDraft`: what a draft head proposes for a row.

Its tokens are drawn from logits, one by one or all at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.engines.native.rows import BatchRow, BatchRows
from sagellm.engines.native.sampler import NO_TOKEN, Draw, RowSampler, sample

MOST_TOKENS = 16
"""Proposed for a row at most."""
KEEPING_WEIGHT = 0.1
HiddenRows: TypeAlias = Any
"""Hidden states by row: on a CPU numpy's, whose operators take a few us and not 20 to 80, else torch's."""
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_rows(matrix: torch.Tensor) -> HiddenRows:
    """The rows of a matrix, to be copied.

    On a CPU as whole numbers, since numpy has no bfloat16.
    """
    return matrix.view(_WHOLE[matrix.element_size()]).numpy() if matrix.is_cpu else matrix


class HeldRow(Protocol):
    """What a drafter has of a row."""

    @property
    def request_id(self) -> str: ...


Row = TypeVar("Row", bound=HeldRow)


class HeldRows(Generic[Row]):
    """Owns what a drafter has of its backend's rows.

    It knows how long keeping that takes, and may rest.
    """

    def __init__(self) -> None:
        self._held: dict[int, Row] = {}
        self._row_of: dict[str, int] = {}
        self.rests = False
        self.keeping_s = 0.0

    @property
    def is_ready(self) -> bool:
        return bool(self._held)

    def rest(self) -> None:
        """Requests that join meanwhile get no proposals.

        Of a head with KV, that of their tokens is not written, so others that share their prefix get worse
        ones.
        """
        self.rests = True
        self._held.clear()
        self._row_of.clear()

    def wake(self) -> None:
        self.rests = False

    def keeping_took(self, seconds: float) -> None:
        """A step's hidden states were taken in. A step that was delayed counts little."""
        bounded = min(seconds, 2 * self.keeping_s) if self.keeping_s else seconds
        self.keeping_s += KEEPING_WEIGHT * (bounded - self.keeping_s) if self.keeping_s else seconds

    def check(self) -> None:
        """Raise `BookkeepingError` where rows and requests do not name each other."""
        rows = {held.request_id: row for row, held in self._held.items()}
        if rows != self._row_of:
            raise BookkeepingError(f"a draft head has rows {rows} and finds {self._row_of}")

    def _drop(self, row: int) -> None:
        held = self._held.pop(row, None)
        if held is not None:
            del self._row_of[held.request_id]


@dataclass(slots=True)
class HeadDraft:
    """A row in one call, and what was drawn for it.

    That is at most `most` tokens.
    """

    index: int
    row: int
    own: BatchRow
    most: int
    table: array[int] = field(default_factory=lambda: array("i"))
    """Blocks of its KV, of a head that has any."""
    token_ids: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    has_ended: bool = False

    @classmethod
    def of(
        cls, index: int, row: int, asked: Asked, num_computed: int, rows: BatchRows, most: int
    ) -> HeadDraft | None:
        """None unless the row has the request's last token.

        `num_computed`: of its tokens, up to that of the last known hidden state.
        """
        own, length = rows.row(row), len(asked.tokens)
        is_known = num_computed == length - 1 and len(own.tokens) == length
        if not is_known or own.tokens[-1] != asked.tokens[-1] or most < 1:
            return None
        return cls(index, row, own, most)

    @property
    def is_greedy(self) -> bool:
        """Whether the greatest logit is drawn: its probability is the chance."""
        sampler = self.own.sampler
        return sampler.is_plain and sampler.params.greedy

    @property
    def takes_greatest(self) -> bool:
        """As `is_greedy`, and no budget of reasoning forces tokens."""
        return self.is_greedy and self.own.sampler.reasoning is None

    @property
    def num_left(self) -> int:
        """Tokens that may still be drawn."""
        return self.most - len(self.token_ids)

    def sampler(self) -> RowSampler:
        return self.own.sampler.after(self.token_ids)

    def take(self, token_id: int, chance: float, least: float) -> None:
        """The head has drawn a token. A greedy proposal ends before a token with less than `least`."""
        if token_id == NO_TOKEN or (self.is_greedy and not chance >= least):  # it may be NaN
            self.has_ended = True
            return
        self.token_ids.append(token_id)
        self.chances.append(chance)
        self.has_ended = not self.num_left

    def proposal(self) -> Proposal:
        return Proposal(tuple(self.token_ids), acceptance=tuple(self.chances) if self.is_greedy else ())


def draw_each(drafts: Sequence[HeadDraft], logits: torch.Tensor, least: float, draw: Draw | None) -> None:
    """Draw one token of each draft from its row of `logits`."""
    if logits.is_cpu and all(draft.takes_greatest for draft in drafts):
        token_ids, chances = _greatest(logits.numpy())
    else:
        chances = (logits.amax(-1) - logits.logsumexp(-1)).exp().tolist()
        token_ids = sample(logits, [draft.sampler() for draft in drafts], draw).token_ids
    for draft, token_id, chance in zip(drafts, token_ids, chances, strict=True):
        draft.take(token_id, chance, least)


def draw_all(
    drafts: Sequence[HeadDraft], logits: torch.Tensor, firsts: Sequence[int], least: float, draw: Draw | None
) -> None:
    """Draw all tokens of each draft from logits that were computed at once.

    Those of a draft begin at row `firsts[i]`, one for each of its `most` tokens.
    """
    if logits.is_cpu and all(draft.takes_greatest for draft in drafts):
        token_ids, chances = _greatest(logits.numpy())
        for draft, first in zip(drafts, firsts, strict=True):
            for place in range(first, first + draft.most):
                if draft.has_ended:
                    break
                draft.take(token_ids[place], chances[place], least)
        return
    going = list(zip(drafts, firsts, strict=True))
    while going:
        places = [first + len(draft.token_ids) for draft, first in going]
        draw_each([draft for draft, _ in going], logits[places], least, draw)
        going = [(draft, first) for draft, first in going if not draft.has_ended]


def _greatest(logits: npt.NDArray[np.floating[Any]]) -> tuple[list[int], list[float]]:
    """The token with the greatest of each row's logits, and its probability.

    That is NaN if there is no greatest.
    """
    token_ids = logits.argmax(-1)
    best = logits[np.arange(len(logits)), token_ids]
    chances: list[float] = (1 / np.exp(logits - best[:, None]).sum(-1)).tolist()
    return token_ids.tolist(), chances
