"""Every error that sageLLM raises on purpose, as one tree.

SageError
├── ConfigError            a key, value or file of the configuration
├── UnknownNameError       an unknown name or option of a plug-in
├── MissingExtraError      an optional dependency that is not installed
├── ModelError             a model folder that cannot be served
│   ├── UnsupportedModelError
│   ├── MissingWeightsError
│   └── WeightShapeError
├── RequestError           one request; carries what an HTTP layer needs
│   ├── UnsupportedParameterError
│   ├── ContextLengthError
│   └── UnknownModelError
├── CapacityError          memory: the pool, the device
├── KVDataError            bytes that are no KV block, or one of another format
├── BookkeepingError       inconsistent KV bookkeeping: a bug in the caller, never a full pool
├── EngineFailedError      the engine's state is lost, it must be built anew
├── CommError              a group of ranks that is broken: a rank died, left, or did not answer
├── KernelError            a kernel that cannot be built, or not run on these inputs
├── TaskFailedError        a task of an overlapped run
└── PlanError              a plan that the verifier refuses
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from sagellm.core.extras import install_command

if TYPE_CHECKING:
    from sagellm.core.protocols.overlap import OverlapRun

LEAST_ALIKE = 0.5
"""Share of common letters from which a name counts as misspelt."""
MOST_CHARACTERS = 100
"""Characters of an unknown name that are compared: comparing takes more than linear time."""


class SageError(Exception):
    """Base of all errors raised on purpose; the message says what would have worked."""


class ConfigError(SageError):
    """The configuration holds an unknown key or a value out of range."""


class UnknownNameError(SageError):
    """No plug-in or option of that name."""


class MissingExtraError(SageError):
    """A feature needs a package that is not installed. The message names the command that installs it."""

    def __init__(self, feature: str, extra: str, package: str = "") -> None:
        missing = f"{package}, which is" if package else "packages that are"
        super().__init__(f"{feature} needs {missing} not installed: {install_command(extra)}")


class ModelError(SageError):
    """A model cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The native engine does not run this architecture, or one of its features."""


class MissingWeightsError(ModelError):
    """A weight file or a tensor is missing."""


class WeightShapeError(ModelError):
    """A tensor does not have the shape that config.json implies."""


class RequestError(SageError):
    """A request cannot be served as sent. Attributes: `param` the offending parameter; `status` the HTTP
    status; `code` a machine-readable reason; `retry_after_s` when the same request may succeed: None: not
    known, infinite: never."""

    status = 400
    code: str | None = "invalid_value"
    retry_after_s: float | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class UnsupportedParameterError(RequestError):
    """A parameter of the API that this server does not implement."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """The prompt, or prompt and `max_tokens`, exceed the context or the KV pool.

    Clients look for the code and for words: litellm for "this model's maximum context length is" (OpenAI's),
    langchain-openai for "prompt is too long"."""

    code = "context_length_exceeded"

    def __init__(self, max_tokens: int, excess: str, param: str | None = None) -> None:
        limit = f"this model's maximum context length is {max_tokens} tokens"
        subject = "max_tokens is too large" if param == "max_tokens" else "the prompt is too long"
        super().__init__(f"{subject}: {limit}, but {excess}", param)


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class CapacityError(SageError):
    """There is less memory than needed. If a request needs KV blocks, `request_id` and `num_blocks` say which
    request and how many."""

    def __init__(self, message: str, request_id: str | None = None, num_blocks: int = 0) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.num_blocks = num_blocks


class BookkeepingError(SageError):
    """The KV books were used wrongly: double free, foreign allocation, negative count, unpinned pin."""


class KVDataError(SageError):
    """Bytes are no KV block, or one of another format."""


class EngineFailedError(SageError):
    """An error left the engine in the middle of a step. Only a new engine can continue."""


class CommError(SageError):
    """A group of ranks is broken. A rank died, left or did not answer; only a new group can go on."""


class KernelError(SageError):
    """A kernel cannot be built here or cannot run on given inputs. The plain form of the operation can."""


class TaskFailedError(SageError):
    """A task of an overlapped run raised. `task` names it, `__cause__` is its error, `run` what ran."""

    def __init__(self, message: str, task: str, run: OverlapRun) -> None:
        super().__init__(message)
        self.task = task
        self.run = run


class PlanError(SageError):
    """The verifier refuses a plan; the message names the operation."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `choices`, else a list.

    Shared words and numbers count beside letters, so that `h100` is closest to `h100-80g` and `llama3-8b` to
    `llama-3.1-8b`; of equals the first counts."""
    known = list(choices)
    name = name[:MOST_CHARACTERS].lower()
    words = _words(name)
    best, best_score = None, 0.0
    for choice in known:
        alike = SequenceMatcher(None, choice.lower(), name).ratio()
        matches = SequenceMatcher(None, _words(choice), words).get_matching_blocks()
        shared = sum(block.size for block in matches) / len(words) if words else 0.0
        if (alike >= LEAST_ALIKE or shared == 1.0) and alike + shared / 2 > best_score:
            best, best_score = choice, alike + shared / 2
    if best is not None:
        return f" Did you mean {best!r}?"
    return f" Known: {', '.join(sorted(known))}." if known else ""


def shown(value: object) -> str:
    """A value as errors repeat it, with its type."""
    return f"{repr(value)[:MOST_CHARACTERS]} ({type(value).__name__})"


def _words(name: str) -> list[str]:
    """The words and numbers of a name."""
    return re.findall(r"[^\W\d_]+|\d+", name.lower())
