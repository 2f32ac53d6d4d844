"""Which code runs a model: ours, or that of transformers through the bridge."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core.errors import UnsupportedModelError
from sagellm.core.extras import install_command
from sagellm.engines.native.architectures import is_native, native_families, read_config, read_spec

if TYPE_CHECKING:
    from sagellm.engines.native.bridge.description import BridgedSpec
    from sagellm.engines.native.model_spec import ModelSpec


def described(config: Mapping[str, Any], implementation: str = "auto") -> ModelSpec | BridgedSpec:
    """The model of a parsed config.json, as `implementation` says: auto, native or transformers.

    "auto" is native where the architecture is, else the bridge. Raises `UnsupportedModelError` with the
    reason, and what would run.
    """
    if implementation == "native" or (implementation == "auto" and is_native(config)):
        return read_spec(config)
    try:
        return _bridged(config)
    except UnsupportedModelError as error:
        if implementation == "transformers":
            raise
        raise UnsupportedModelError(f"{error}; {native_families()}") from error


def check_config(folder: Path, implementation: str = "auto") -> None:
    """Raises `ModelError` for a folder whose config.json describes no model that runs."""
    described(read_config(folder), implementation)


def _bridged(config: Mapping[str, Any]) -> BridgedSpec:
    if find_spec("transformers") is None:
        names = ", ".join(map(str, config.get("architectures") or [config.get("model_type")]))
        raise UnsupportedModelError(
            f"{names} runs through transformers at most, which is not installed: "
            f"{install_command('transformers')}"
        )
    from sagellm.engines.native.bridge.description import describe

    return describe(config)
