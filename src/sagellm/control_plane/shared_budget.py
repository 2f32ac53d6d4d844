"""`SharedBudget`: how generation and embedding share the steps and the memory of one instance.

A text to embed is computed like a prompt, and its KV is free when that is done. So both want the same two
things: tokens of a step, and blocks. Each has a goal for how long a request waits. Tokens are divided by how
near the oldest waiting request of each is to its goal; blocks go to the oldest request first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceDemand:
    """What waits of one service: prompt tokens that are not computed, and seconds that the oldest waits."""

    num_tokens: int = 0
    oldest_s: float = 0.0


class SharedBudget:
    """What generation and embedding may use of an instance of type LLM_EMBEDDING.

    `max_batched_tokens`: of a step. `goals_s`: (generation, embedding) until the first token, and until the
    embedding. `share` of embedding: between `floor` and 1 - `floor`; it goes a part `rate` of the way to its
    aim in a step. `static`: a share of steps and blocks that neither moves nor is lent, for comparison.
    """

    def __init__(
        self,
        max_batched_tokens: int,
        num_blocks: int,
        *,
        goals_s: tuple[float, float] = (1.0, 5.0),
        floor: float = 0.1,
        rate: float = 0.1,
        static: float | None = None,
    ) -> None:
        if not (0 < floor <= 0.5 and 0 < rate <= 1 and min(goals_s) > 0):
            raise ValueError("floor lies between 0 and 0.5, rate between 0 and 1, and goals are positive")
        if static is not None and not 0 < static < 1:
            raise ValueError(f"a static share lies between 0 and 1, not {static}")
        self.max_batched_tokens, self.num_blocks = max_batched_tokens, num_blocks
        self._goals_s, self._floor, self._rate, self._static = goals_s, floor, rate, static
        self.share = 0.5 if static is None else static
        self._credit = 0.0
        """Tokens of its share that embedding has not had: shares of small steps are less than a token."""

    def divide(self, num_decodes: int, prompts: ServiceDemand, texts: ServiceDemand) -> tuple[int, int]:
        """Tokens of prompts and of texts in the next step.

        Rows that decode come first, with a token each. Of the rest embedding has its share, and each side
        gets what the other does not use.
        """
        room = max(0, self.max_batched_tokens - num_decodes)
        if self._static is None and prompts.num_tokens and texts.num_tokens:
            self._move(prompts, texts)
        if self._static is not None:
            own = min(room, max(1, int(room * self.share)))
            return min(prompts.num_tokens, room - own), min(texts.num_tokens, own)
        self._credit = min(self._credit + room * self.share, room) if texts.num_tokens else 0.0
        text = min(texts.num_tokens, int(self._credit))
        prompt = min(prompts.num_tokens, room - text)
        self._credit -= text
        return prompt, min(texts.num_tokens, room - prompt)

    def free_blocks(self, held: int, held_by_other: int, older_need: int, *, is_text: bool) -> int:
        """Blocks that the next text (or prompt) may have.

        `held`: by its own service. `older_need`: what a request of the other service waits for that came
        before it; 0: none. Those stay free, so that large requests get their turn.
        """
        if self._static is not None:
            own = int(self.num_blocks * self.share)
            return (own if is_text else self.num_blocks - own) - held
        return self.num_blocks - held - held_by_other - older_need

    def _move(self, prompts: ServiceDemand, texts: ServiceDemand) -> None:
        prompt, text = prompts.oldest_s / self._goals_s[0], texts.oldest_s / self._goals_s[1]
        aim = text / (prompt + text) if prompt + text else 0.5
        self.share += self._rate * (min(1 - self._floor, max(self._floor, aim)) - self.share)
