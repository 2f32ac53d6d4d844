"""The OpenAI-compatible HTTP server.

`create_app` makes the application and `serve` runs it. `bind` makes the socket for `serve` beforehand, where
the address should be checked before a model is loaded. A name is imported when it is first used: processes of
a fleet that serve no HTTP import no FastAPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sagellm.serving.app import create_app
    from sagellm.serving.server import SageServer, bind, serve

__all__ = ["SageServer", "bind", "create_app", "serve"]

_HOMES = {"create_app": "app", "SageServer": "server", "bind": "server", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sagellm.serving' has no attribute {name!r}")
    return getattr(import_module(f"sagellm.serving.{_HOMES[name]}"), name)
