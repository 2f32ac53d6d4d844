"""The options for reasoning that costs less, beside the budgets among the sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sagellm.cli._options import OptionGroup, flag
from sagellm.core.protocols.cot import EarlyExit, SpeculativeReasoning

if TYPE_CHECKING:
    from sagellm.core.types import SamplingParams
    from sagellm.engines.llm import RequestOptions


@dataclass(frozen=True, slots=True)
class Reasoning(OptionGroup):
    """What of `RequestOptions` makes reasoning shorter or cheaper, with the other fields' defaults."""

    early_exit: float | None = flag("X", "Close the reasoning once a probe answers with this confidence.")
    speculative_reasoning: float | None = flag(
        "X", "Keep lines of speculative.reasoning_model that the model scores X or more, of 9."
    )

    def for_request(self, params: SamplingParams) -> RequestOptions:
        """The options of a request. Raises `RequestError`."""
        from sagellm.engines.llm import RequestOptions

        leave, drafted = self.early_exit, self.speculative_reasoning
        return RequestOptions(
            params,
            early_exit=None if leave is None else EarlyExit(leave),
            speculative_reasoning=None if drafted is None else SpeculativeReasoning(drafted),
        )
