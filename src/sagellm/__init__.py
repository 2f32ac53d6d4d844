"""sageLLM: a modular LLM inference engine.

Every part can be used, tested and measured alone.

    import sagellm

    llm = sagellm.load()  # the demo model; or sagellm.load("folder/of/a/model")
    print(llm.chat([{"role": "user", "content": "12 + 30 ="}]).text)

Importing this package loads neither torch nor numpy: a name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.core.errors import SageError
    from sagellm.core.types import SamplingParams
    from sagellm.engines.build import load
    from sagellm.engines.llm import LLM

__version__ = "0.1.0"

__all__ = ["LLM", "Config", "SageError", "SamplingParams", "__version__", "load"]

_HOMES = {
    "LLM": "sagellm.engines.llm",
    "Config": "sagellm.core.config",
    "SageError": "sagellm.core.errors",
    "SamplingParams": "sagellm.core.types",
    "load": "sagellm.engines.build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sagellm' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
