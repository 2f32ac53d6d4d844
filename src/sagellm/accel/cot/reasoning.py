"""`ReasoningTracker`: which tokens of a sequence are reasoning, and how budgets end it.

A reasoning model writes its reasoning between a start and an end marker, each one token (`<think>`,
`</think>`). A hard budget forces the end marker; a soft one raises its logit with each token, so that
reasoning ends where the model finds that least unlikely, such as behind a line. What a budget does depends on
the tokens so far and on nothing else. So reasoning ends with the same token whether the sequence is
preempted, computed in chains of proposed tokens, or goes on at another instance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sagellm.core.types import SamplingParams


@dataclass(slots=True)
class ReasoningTracker:
    """Follows one sequence, token by token.

    `is_inside`: the start marker has come, the end marker has not. `num_tokens` counts the tokens between
    markers, without them, of all reasoning in the answer. `budget`: how many there may be; None: any number.
    `soft_budget`: how many there are before each further one adds `slope` to the logit of the end marker.
    """

    start_id: int
    end_id: int
    budget: int | None = None
    is_inside: bool = False
    num_tokens: int = 0
    soft_budget: int | None = None
    slope: float = 0.1

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        outputs: Sequence[int],
        eos_token_ids: Collection[int],
    ) -> ReasoningTracker | None:
        """Of a request that has drawn `outputs`; None if its reasoning has no budget."""
        if not params.has_reasoning_budget:
            return None
        tracker = cls.behind(prompt, params.reasoning_token_ids, eos_token_ids, params.max_reasoning_tokens)
        tracker.soft_budget = params.soft_reasoning_tokens
        if params.soft_reasoning_slope is not None:
            tracker.slope = params.soft_reasoning_slope
        tracker.extend(outputs)
        return tracker

    @classmethod
    def behind(
        cls,
        prompt: Sequence[int],
        marker_ids: Sequence[int],
        eos_token_ids: Collection[int],
        budget: int | None = None,
    ) -> ReasoningTracker:
        """At the end of a prompt, whose own reasoning does not count.

        It is inside where the prompt opens reasoning in its last turn, as the templates of some models do:
        behind the last start marker come no end marker and no end of a turn.
        """
        start_id, end_id = marker_ids
        places = _places(prompt, (start_id, end_id, *eos_token_ids))
        return cls(start_id, end_id, budget, bool(places) and prompt[places[-1]] == start_id)

    @property
    def forced_id(self) -> int | None:
        """The token that must come next, whatever the model draws; None: any."""
        is_spent = self.is_inside and self.budget is not None and self.num_tokens >= self.budget
        return self.end_id if is_spent else None

    @property
    def end_bias(self) -> float:
        """What is added to the logit of the end marker for the next draw."""
        if not self.is_inside or self.soft_budget is None or self.num_tokens < self.soft_budget:
            return 0.0
        return self.slope * (self.num_tokens - self.soft_budget + 1)

    def push(self, token_id: int) -> None:
        """Take in the next token of the answer."""
        if not self.is_inside:
            self.is_inside = token_id == self.start_id
        elif token_id == self.end_id:
            self.is_inside = False
        else:
            self.num_tokens += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """As `push` for each of them. Looks at markers alone: a draft model joins its rows in each step."""
        places = _places(token_ids, (self.start_id, self.end_id))
        for before, place in pairwise((-1, *places)):
            self.num_tokens += self.is_inside * (place - before - 1)
            self.push(token_ids[place])
        self.num_tokens += self.is_inside * (len(token_ids) - 1 - (places[-1] if places else -1))


def _places(token_ids: Sequence[int], wanted: Collection[int]) -> list[int]:
    """The positions of the wanted tokens."""
    ids = np.asarray(token_ids)
    found = np.zeros(len(ids), dtype=bool)
    for token_id in wanted:
        found |= ids == token_id
    return np.flatnonzero(found).tolist()
