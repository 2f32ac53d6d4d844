"""`sagellm config`: what the configuration is, and where each value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from sagellm.cli._options import MODEL, App, command, flag
from sagellm.cli._settings import ServerSettings
from sagellm.core.config import PRESETS, SECRET_KEYS
from sagellm.core.config_layers import describe

app = App(help="Look at the configuration.")


@app.callback()
def _group() -> None:
    """Look at the configuration."""


@command
def show(
    model: str | None = MODEL,
    *,
    origin: bool = flag("--origin", "Also the layer that each value comes from.", False),
    meaning: bool = flag("--meaning", "Also what each key means.", False),
    settings: ServerSettings,
) -> None:
    """Print every key with its value. Later layers win: default, presets, file, environment, command line."""
    resolved = settings.load(model=model)
    values = resolved.config.flat()
    rows = [
        [key, _shown(key, values[key]), *([layer] if origin else ()), *([describe(key)] if meaning else ())]
        for key, layer in resolved.origins.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@command
def presets() -> None:
    """List the presets of --preset, then those of --kv-preset."""
    from sagellm.engines.config_file import kv_presets

    for name, keys in PRESETS.items():
        _print_preset("--preset", name, keys)
    for name, preset in kv_presets().items():
        _print_preset("--kv-preset", name, preset.keys, preset.meaning)


def _print_preset(option: str, name: str, keys: Mapping[str, Any], meaning: str = "") -> None:
    print(f"{option} {name}{f': {meaning}' if meaning else ''}")
    for key, value in keys.items():
        print(f"    {key} = {_shown(key, value)}")


def _shown(key: str, value: Any) -> str:
    if value is None or value == ():
        return "none"
    if key in SECRET_KEYS and value:
        return "********"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)


app.add(show, presets)
