"""The configuration file: YAML, read within limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sagellm.core.config_layers import Layer
from sagellm.core.errors import ConfigError
from sagellm.core.files import read_text

MAX_BYTES = 256 << 10
KV_PRESETS_FILE = Path(__file__).with_name("kv_runtime_presets.yaml")
_MAX_VALUES = 10_000


def read_config_file(path: Path) -> Layer:
    """A YAML file as a layer; raises `ConfigError` naming the file."""
    try:
        values = yaml.load(read_text(path, MAX_BYTES), Loader=_StrictLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(values).__name__}")
    return Layer(str(path), values or {})


@dataclass(frozen=True, slots=True)
class KVPreset:
    """Keys of the configuration for a kind of use, and what that is."""

    meaning: str
    keys: Mapping[str, Any]


def kv_presets() -> dict[str, KVPreset]:
    """The presets that come with sageLLM, by name."""
    entries = read_config_file(KV_PRESETS_FILE).values
    return {name: KVPreset(entry["meaning"], entry["keys"]) for name, entry in entries.items()}


def kv_preset_layer(name: str) -> Layer:
    """A preset as a layer. Raises `ConfigError` for an unknown name."""
    presets = kv_presets()
    if name not in presets:
        raise ConfigError(f"unknown KV preset {name!r}. Known: {', '.join(presets)}")
    return Layer(f"KV preset {name}", presets[name].keys)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that also refuses duplicate keys and exploding aliases. YAML forbids the same key twice
    in a mapping, and PyYAML accepts it. Aliases can make a small file large."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > _MAX_VALUES:
            raise yaml.YAMLError(f"its aliases make more than {_MAX_VALUES} values of it")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT002 - as PyYAML declares it
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                problem = f"{key.value!r} is given twice, in line {lines[key.value]} and in line {line}"
                raise yaml.constructor.ConstructorError(problem=problem)
            lines[str(key.value)] = line
        return super().construct_mapping(node, deep=deep)


def _expanded_size(node: yaml.Node, known: dict[int, float]) -> float:
    """Values below a node, aliases expanded; infinite for a node that contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf
        below = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_expanded_size(child, known) for child in below)
    return known[id(node)]
