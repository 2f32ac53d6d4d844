"""Text in, text out: `LLM`, the options of a request, its answers."""

from sagellm.engines.llm.completion import (
    Choice,
    Completion,
    Consensus,
    DraftedSteps,
    ReasoningExit,
    TextDelta,
    TokenText,
    Usage,
)
from sagellm.engines.llm.llm import LLM, Prompt
from sagellm.engines.llm.options import MAX_SESSION_ID_CHARS, Hints, RequestOptions
from sagellm.engines.llm.text_stream import StopStrings

__all__ = [
    "LLM",
    "MAX_SESSION_ID_CHARS",
    "Choice",
    "Completion",
    "Consensus",
    "DraftedSteps",
    "Hints",
    "Prompt",
    "ReasoningExit",
    "RequestOptions",
    "StopStrings",
    "TextDelta",
    "TokenText",
    "Usage",
]
