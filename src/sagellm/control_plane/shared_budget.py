"""`SharedBudget`: how generation and embedding share the steps and the memory of one instance.

An embedding is computed like a prompt, and its KV is free when it is done. So both want the same two things:
tokens of a step, and blocks. Each has a goal for how long a request waits; the one that is nearer to its goal
gets more.
"""

from __future__ import annotations

from dataclasses import dataclass

from sagellm.core.errors import BookkeepingError


@dataclass(frozen=True, slots=True)
class ServiceDemand:
    """What waits of one service: prompt tokens that are not computed, and seconds that the oldest waits."""

    num_tokens: int = 0
    oldest_s: float = 0.0


class SharedBudget:
    """The share of embedding in an instance of type LLM_EMBEDDING. It moves with demand.

    `max_batched_tokens`: of a step. `goals_s`: (generation, embedding) until the first token, and until the
    embedding. `floor`: the least share of either while it has work. `rate`: how far the share moves towards
    its aim in one step. `static`: a share that does not move, for comparison; it is not lent.
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
            raise ValueError("floor lies between 0 and 0.5, rate between 0 and 1, goals are positive")
        self.max_batched_tokens, self.num_blocks = max_batched_tokens, num_blocks
        self._goals_s, self._floor, self._rate, self._static = goals_s, floor, rate, static
        self.share = 0.5 if static is None else static

    def divide(self, num_decodes: int, prompts: ServiceDemand, texts: ServiceDemand) -> tuple[int, int]:
        """Tokens of prompts and of texts in the next step.

        Rows that decode come first, one token each. Of the rest, embedding may have its share; what one side
        does not use the other gets.
        """
        room = max(0, self.max_batched_tokens - num_decodes)
        if self._static is not None:
            text = min(texts.num_tokens, int(room * self._static))
            return min(prompts.num_tokens, room - int(room * self._static)), text
        self._move(prompts, texts)
        text = min(texts.num_tokens, round(room * self.share))
        prompt = min(prompts.num_tokens, room - text)
        return prompt, min(texts.num_tokens, room - prompt)

    def text_blocks(self, num_generation: int) -> int:
        """Blocks that texts may hold, while generation holds `num_generation`: their share, or all that is
        free beyond what generation is sure of."""
        self._check_blocks(num_generation)
        if self._static is not None:
            return int(self.num_blocks * self._static)
        free = self.num_blocks - num_generation
        return min(free, max(int(self.num_blocks * self.share), free - int(self.num_blocks * self._floor)))

    def generation_blocks(self, num_texts: int) -> int:
        """Blocks that generation may hold, while texts hold `num_texts`. Texts keep the least share free."""
        self._check_blocks(num_texts)
        if self._static is not None:
            return self.num_blocks - int(self.num_blocks * self._static)
        return self.num_blocks - max(num_texts, int(self.num_blocks * self._floor))

    def _move(self, prompts: ServiceDemand, texts: ServiceDemand) -> None:
        if not prompts.num_tokens or not texts.num_tokens:
            return  # the other side gets all that is left
        urgency = [
            demand.oldest_s / goal_s for demand, goal_s in zip((prompts, texts), self._goals_s, strict=True)
        ]
        aim = urgency[1] / sum(urgency) if sum(urgency) else 0.5
        aim = min(1 - self._floor, max(self._floor, aim))
        self.share += self._rate * (aim - self.share)

    def _check_blocks(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= self.num_blocks:
            raise BookkeepingError(f"{num_blocks} blocks are held of {self.num_blocks}")
