"""The text-level door to an engine: `LLM`, and what it answers with."""

from sagellm.engines.llm.completion import Choice, Completion, TextDelta, TokenText, Usage
from sagellm.engines.llm.llm import LLM, Prompt
from sagellm.engines.llm.stop_strings import StopStrings

__all__ = ["LLM", "Choice", "Completion", "Prompt", "StopStrings", "TextDelta", "TokenText", "Usage"]
