"""The options that set keys of the configuration. They win over its other layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sagellm.cli._options import OptionGroup, completing, flag, option
from sagellm.core.config import PRESETS
from sagellm.core.config_layers import KEYS, Resolved, allowed_values, describe
from sagellm.core.errors import ConfigError

FLAGS: Mapping[str, tuple[str, str]] = {
    "model.dtype": ("--dtype", "NAME"),
    "model.device": ("--device", "NAME"),
    "model.max_model_len": ("--max-model-len", "N"),
    "model.quantization": ("--quant", "BITS"),
    "model.chat_template": ("--chat-template", "FILE"),
    "kv.block_size": ("--block-size", "N"),
    "kv.num_blocks": ("--num-blocks", "N"),
    "scheduler.max_num_seqs": ("--max-num-seqs", "N"),
    "scheduler.max_batched_tokens": ("--max-batched-tokens", "N"),
    "engine.threads": ("--threads", "N"),
    "speculative.method": ("--speculative", "METHOD"),
    "speculative.reasoning_model": ("--reasoning-model", "MODEL"),
    "parallel.tensor": ("--tensor-parallel-size", "N"),
    "parallel.pipeline": ("--pipeline-parallel-size", "N"),
    "log.level": ("--log-level", "NAME"),
}
"""Keys that have an option of their own in every command; the others are reached by `--set`."""

SERVER_FLAGS: Mapping[str, tuple[str, str]] = {
    "server.host": ("--host", "ADDRESS"),
    "server.port": ("--port", "N"),
    "server.api_key": ("--api-key", "KEY"),
    "log.format": ("--log-format", "NAME"),
    "model.served_name": ("--served-name", "NAME"),
    "kv.host_gb": ("--kv-host-gb", "GIB"),
    "kv.disk_gb": ("--kv-disk-gb", "GIB"),
    "kv.dir": ("--kv-dir", "FOLDER"),
    "kv.remote_url": ("--kv-remote-url", "URL"),
}
"""Keys that only a server reads."""


@dataclass(frozen=True, slots=True)
class Settings(OptionGroup):
    """The configuration's keys on the command line, as texts; `load` checks them."""

    config_file: Path | None = None
    preset: str | None = None
    kv_preset: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        keys = completing(f"{key}=" for key in KEYS)
        return [
            option("config_file", Path, flag("--config -c FILE", _CONFIG_HELP)),
            option("preset", str, flag("NAME", _PRESET_HELP, autocompletion=completing(PRESETS))),
            option("assignments", list[str], flag("--set -s KEY=VALUE", _SET_HELP, autocompletion=keys)),
            option("offline", bool, flag("--offline", _OFFLINE_HELP)),
            *_flag_options(FLAGS),
        ]

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        named = {name: given.pop(name, None) for name in ("config_file", "preset", "kv_preset")}
        values = dict(map(_assignment, given.pop("assignments", ())))
        if given.pop("offline", False):
            values["model.offline"] = True
        keys = {_option_name(key): key for key in (*FLAGS, *SERVER_FLAGS)}
        values |= {keys[name]: text for name, text in given.items()}
        return cls(**named, values=values)

    def load(self, *, model: str | None = None, more: Mapping[str, Any] | None = None) -> Resolved:
        """The configuration with these options, and `more` values by key, over all other layers."""
        from sagellm.engines.build import load_config

        named = {} if model is None else {"model.name": model}
        values = {**self.values, **named, **(more or {})}
        return load_config(self.config_file, preset=self.preset, kv_preset=self.kv_preset, cli=values)


@dataclass(frozen=True, slots=True)
class ServerSettings(Settings):
    """`Settings` with the options that only a server reads."""

    @classmethod
    def options(cls) -> list[inspect.Parameter]:
        kv_preset = option("kv_preset", str, flag("--kv-preset NAME", _KV_PRESET_HELP))
        return [*_flag_options(SERVER_FLAGS), kv_preset, *Settings.options()]


_CONFIG_HELP = "YAML file with keys and values (also SAGELLM_CONFIG)."
_OFFLINE_HELP = "Take hub models from the local cache only (also HF_HUB_OFFLINE=1)."
_STRATEGIES = [name for name, keys in PRESETS.items() if keys.get("scheduler.strategy") == name]
_OTHERS = [name for name in PRESETS if name not in _STRATEGIES]
_PRESET_HELP = f"One of {', '.join(_OTHERS)}; or with the strategy of its name: {', '.join(_STRATEGIES)}."
_KV_PRESET_HELP = "Keys of the KV cache for a kind of use; `sagellm config presets` lists them."
_SET_HELP = "Set any key of the configuration; may be repeated."


def _flag_options(flags: Mapping[str, tuple[str, str]]) -> list[inspect.Parameter]:
    made = []
    for key, (name, metavar) in flags.items():
        values = completing(allowed_values(key))
        declared = flag(f"{name} {metavar}", f"{key}: {describe(key)}.", autocompletion=values)
        made.append(option(_option_name(key), str, declared))
    return made


def _option_name(key: str) -> str:
    return key.replace(".", "_")


def _assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text!r}: write KEY=VALUE, for example --set kv.block_size=32")
    return key.strip(), value.strip()
