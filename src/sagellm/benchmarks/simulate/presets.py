"""A preset's name becomes a configuration: the one place that knows where presets come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sagellm.core.config import PRESETS, Config
from sagellm.core.config_layers import Layer, given_layer, preset_layer, resolve
from sagellm.core.errors import UnknownNameError, nearest

SIZES: Mapping[str, Any] = {"scheduler.max_num_seqs": 1024, "scheduler.max_batched_tokens": 8192}
"""Below every preset, so that those which do not speak of sizes are compared at the same ones."""


def preset_names() -> Sequence[str]:
    """Every name that `preset_config` takes."""
    return list(PRESETS)


def preset_config(name: str, settings: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a preset: `SIZES` below it, `settings` (dotted keys) above it.

    The environment and configuration files do not count: a simulation is what its manifest says. Raises
    `UnknownNameError` with the names that there are, `ConfigError` for a setting that is none.
    """
    if name not in preset_names():
        known = ", ".join(preset_names())
        raise UnknownNameError(f"unknown preset {name!r}.{nearest(name, preset_names())} There are: {known}.")
    layers = [Layer("simulation", SIZES), preset_layer(name), given_layer(settings or {}, "settings")]
    return resolve(layers).config
