"""The text-level door to an engine: `LLM`, and what it answers with."""

from sagellm.engines.llm.completion import Choice, Completion, TextDelta, TokenText, Usage
from sagellm.engines.llm.llm import LLM, MAX_SESSION_ID_CHARS, Hints, Prompt
from sagellm.engines.llm.stop_strings import StopStrings

__all__ = [
    "LLM",
    "MAX_SESSION_ID_CHARS",
    "Choice",
    "Completion",
    "Hints",
    "Prompt",
    "StopStrings",
    "TextDelta",
    "TokenText",
    "Usage",
]
