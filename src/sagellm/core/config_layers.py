"""Resolves layers into a `Config`.

Defaults < preset < file < environment < command line. A layer maps keys to values, nested (`{"kv":
{"block_size": 32}}`) or dotted (`{"kv.block_size": 32}`). A key that does not exist is an error that names
the nearest key and the layer.
"""

from __future__ import annotations

import json
import logging
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sagellm.core.config import PRESETS, SECRET_KEYS, Config
from sagellm.core.errors import ConfigError, nearest

ENV_PREFIX = "SAGELLM_"
RESERVED_ENV = frozenset(
    {
        "SAGELLM_TRACES",
        "SAGELLM_CONFIG",
        "SAGELLM_PRESET",
        "SAGELLM_PEER_SCRIPT",
        "SAGELLM_PEER_VLLM",
        "SAGELLM_PEER_SERVERS",
    }
)
"""Variables with our prefix that are no configuration keys."""

_SERVICE_NAME = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$"
)
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
_NONE_TEXTS = ("", "none", "null")
DEFAULT_ORIGIN = "default"
COMMAND_LINE = "command line"

log = logging.getLogger("sagellm.config")


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one place. Errors and `config show --origin` print `name`, or the key's own `origins`."""

    name: str
    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, key: str) -> str:
        return self.origins.get(key, self.name)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration, and for every dotted key the layer that it came from."""

    config: Config
    origins: Mapping[str, str]


_FIELDS: dict[str, FieldInfo] = {
    f"{section}.{name}": info for section, keys in Config() for name, info in type(keys).model_fields.items()
}
KEYS: tuple[str, ...] = tuple(_FIELDS)
"""Every dotted key, in order of declaration."""
REMOVED = {
    "kv.swap_space_gb": "set kv.host_gb, whose host memory also holds the KV of preempted requests",
}
"""Keys of earlier versions, and what to do now."""


def describe(key: str) -> str:
    """What a key means, in one line."""
    return _FIELDS[key].description or ""


def allowed_values(key: str) -> tuple[str, ...]:
    """The words that a key accepts, if it accepts only some; otherwise none."""
    kind = _FIELDS[key].annotation
    return get_args(kind) if get_origin(kind) is Literal else ()


def env_name(key: str) -> str:
    """`kv.block_size` -> `SAGELLM_KV_BLOCK_SIZE`."""
    return ENV_PREFIX + key.replace(".", "_").upper()


def preset_layer(name: str) -> Layer:
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}.{nearest(name, PRESETS)}")
    return Layer(f"preset {name}", PRESETS[name])


def env_layer(environ: Mapping[str, str]) -> Layer:
    """The `SAGELLM_*` variables of `environ`. A variable that names no key is logged as a warning and
    ignored; variables that Kubernetes sets for its Services are ignored silently."""
    by_name, removed = {env_name(key): key for key in KEYS}, {env_name(key): REMOVED[key] for key in REMOVED}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV or _is_of_kubernetes(name, environ):
            continue
        if name in removed:
            raise ConfigError(f"environment variable {name} names no key any more: {removed[name]}")
        if name not in by_name:
            end = name.removeprefix(ENV_PREFIX.rstrip("_"))
            same_end = [variable for variable in by_name if variable.endswith(end)]
            guess = nearest(name, same_end or [*by_name, *RESERVED_ENV])
            log.warning("unknown environment variable %s is ignored.%s", name, guess)
            continue
        values[by_name[name]] = parse_text(by_name[name], text)
    return Layer("environment", values, {key: f"environment {env_name(key)}" for key in values})


def _is_of_kubernetes(name: str, environ: Mapping[str, str]) -> bool:
    """Whether Kubernetes set the variable for a Service.

    A Service `sagellm` sets SAGELLM_SERVICE_HOST, SAGELLM_PORT=tcp://... and SAGELLM_PORT_8000_TCP_ADDR. A
    Service `sagellm-server` also sets SAGELLM_SERVER_PORT=tcp://..., otherwise the port to listen on."""
    if _SERVICE_NAME.search(name):
        return True
    service, _, last = name.rpartition("_")
    if last != "PORT" or not _SERVICE_URL.match(environ[name]):
        return False
    return name not in map(env_name, KEYS) or f"{service}_SERVICE_HOST" in environ


def given_layer(values: Mapping[str, Any], where: str = COMMAND_LINE) -> Layer:
    """Settings from code or the command line, by dotted key. Texts are parsed like environment variables."""
    read = {
        key: parse_text(key, value) if isinstance(value, str) else value
        for key, value in flatten(values, where).items()
    }
    return Layer(where, read)


def parse_text(key: str, text: str) -> Any:
    """The value that a text stands for.

    `none` is None where the key allows it; commas separate the items of a list. Numbers and booleans stay
    text, which pydantic reads and checks. A secret is always the text itself."""
    try:
        text.encode()
    except UnicodeEncodeError:  # surrogate halves: Python's form of bytes that are not UTF-8
        raise ConfigError(f"{key}: {text!a} is not UTF-8 text") from None
    kind = _FIELDS[key].annotation
    is_none = text.strip().lower() in _NONE_TEXTS
    if get_origin(kind) is dict:
        try:
            return {} if is_none else json.loads(text)
        except ValueError as error:
            raise ConfigError(f'{key}: a mapping is given as JSON, as in {{"name": ...}}: {error}') from None
    if key in SECRET_KEYS:
        return text
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if is_none and type(None) in kinds:
        return None
    if any(get_origin(kind) is tuple for kind in kinds):
        return () if is_none else tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def flatten(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The dotted keys of a nested or dotted mapping. Raises `ConfigError` for unknown keys, and for a key
    that is given in both forms."""
    flat: dict[str, Any] = {}
    for key, value in _walk(values, where):
        if key in REMOVED:
            raise ConfigError(f"{key} in {where} is no longer a key: {REMOVED[key]}")
        if key not in _FIELDS:
            raise ConfigError(f"unknown key {key!r} in {where}.{nearest(key, KEYS)}")
        if key in flat:
            raise ConfigError(f"{key} is given twice in {where}, nested and dotted: keep one")
        is_empty = value is None or (isinstance(value, str) and not value.strip())
        if key in SECRET_KEYS and is_empty:  # it comes from an unset variable
            raise ConfigError(f"{key} in {where} is empty: give it a value, or leave it out to have none")
        flat[key] = value
    return flat


def _walk(values: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys. Also those of an unknown section, so that the error can name the nearest."""
    for name, value in values.items():
        is_section = name in Config.model_fields
        if isinstance(value, Mapping) and (is_section or (value and name not in _FIELDS)):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif not is_section:
            yield str(name), value
        elif value is not None:  # an empty section of a YAML file reads as none
            keys = ", ".join(key for key in KEYS if key.startswith(f"{name}."))
            raise ConfigError(f"{name!r} in {where} is a section, not a value; its keys are {keys}")


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Merge layers, the later over the earlier, over the defaults. Raises `ConfigError` naming key, value and
    layer."""
    merged: dict[str, dict[str, Any]] = {}
    origins = dict.fromkeys(KEYS, DEFAULT_ORIGIN)
    for layer in layers:
        for key, value in flatten(layer.values, layer.name).items():
            section, _, name = key.partition(".")
            merged.setdefault(section, {})[name] = value
            origins[key] = layer.origin(key)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None
    return Resolved(config, origins)


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"][:2])
        if problem["type"] == "extra_forbidden" and key in origins:
            lines.append(_unknown(problem["loc"], origins[key]))
            continue
        message = re.sub(r" or instance of \w+", "", problem["msg"].removeprefix("Value error, "))
        if key in origins:
            within = "".join(f"[{part!r}]" for part in problem["loc"][2:])
            shown = "..." if key in SECRET_KEYS else repr(problem["input"])
            lines.append(f"{key}{within} = {shown} ({origins[key]}): {message} [{describe(key)}]")
        else:
            lines.append(f"{key}: {message}")
    return "; ".join(lines)


def _unknown(path: Sequence[str | int], origin: str) -> str:
    """What is wrong with a key inside a value, such as a group."""
    kind: Any = Config
    for part in path[:-1]:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(part)].annotation
        else:
            inner = (each for each in get_args(kind) if isinstance(each, type))
            kind = next((each for each in inner if issubclass(each, BaseModel)), None)
    named, name = ".".join(map(str, path)), str(path[-1])
    known = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    if "settings" in known and (name in KEYS or name in Config.model_fields):
        return f"{named} in {origin}: keys of the configuration stand in {named.removesuffix(name)}settings"
    return f"unknown key {named!r} in {origin}.{nearest(name, known)}"
