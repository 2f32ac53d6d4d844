"""Which instance serves a request, and what instances have cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sagellm.core.clock import Clock
from sagellm.core.protocols.router import Router
from sagellm.core.registry import registry

DEFAULT_ROUTER = "cost"


def make_router(setting: str | Mapping[str, Any], clock: Clock | None = None) -> Router:
    """A router by name, or by `name` and options.

    A name may be written with hyphens. Routers that need the time get `clock`, the machine's by default.
    Raises `UnknownNameError` or
    `ConfigError` with what is known.
    """
    options: dict[str, Any] = {"name": setting} if isinstance(setting, str) else dict(setting)
    found = registry("router")
    name = options.get("name")
    if isinstance(name, str):
        options["name"] = name if ":" in name else name.replace("-", "_")
        if clock is not None and "clock" in found.options(options["name"]):
            options["clock"] = clock
    made: Router = found.create_from(options)
    return made
