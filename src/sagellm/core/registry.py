"""Plug-ins by name: a plug-in is one new file, and no other file changes.

The name of a plug-in is the name of its file (or folder) in a package, which says `PLUGIN = TheClass`, or
`PLUGIN = "pkg.module:TheClass"` where importing the class is costly.
Listing names reads files and imports none; asking for one imports that file only. Files whose name starts
with `_`, and files without a `PLUGIN` line, are no plug-ins. From outside: `"pkg.module:Class"`, or an entry
point of the registry's group; a name that sageLLM itself uses cannot be replaced that way.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from sagellm.core.errors import ConfigError, UnknownNameError, nearest
from sagellm.core.protocols.collectives import CommBackendProtocol
from sagellm.core.protocols.engine import InferenceBackend
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.interconnect import DomesticCommBackend
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.protocols.lifetime import LifetimePredictor, ReusePredictor
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.protocols.quantization import WeightFormat
from sagellm.core.protocols.router import Router
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.protocols.speculative import Proposer

T = TypeVar("T")

_PLUGIN_LINE = re.compile(r"^PLUGIN\b\s*[:=]", re.MULTILINE)

KINDS: Mapping[str, tuple[str, str, type | None]] = {
    "policy": ("sagellm.kvmgr.eviction", "sagellm.policies", EvictionPolicy),
    "pass": ("sagellm.kvmgr.scheduler_ir.passes", "sagellm.passes", SchedulerPass),
    "predictor": ("sagellm.kvmgr.lifetime", "sagellm.predictors", LifetimePredictor),
    "reuse_predictor": ("sagellm.kvmgr.lifetime.reuse", "sagellm.reuse_predictors", ReusePredictor),
    "index": ("sagellm.kvmgr.prefix_cache", "sagellm.indexes", PrefixReuseIndex),
    "pool": ("sagellm.kvmgr.kv_pool", "sagellm.pools", KVPool),
    "backend": ("sagellm.engines", "sagellm.backends", InferenceBackend),
    "weight_format": ("sagellm.accel.quantization.formats", "sagellm.weight_formats", WeightFormat),
    "proposer": ("sagellm.accel.speculative", "sagellm.proposers", Proposer),
    "collectives": ("sagellm.comm.collectives", "sagellm.collectives", CommBackendProtocol),
    "interconnect": ("sagellm.comm.interconnect", "sagellm.interconnects", DomesticCommBackend),
    "router": ("sagellm.control_plane.router", "sagellm.routers", Router),
    "trace_format": ("sagellm.benchmarks.traces", "sagellm.trace_formats", None),
}
"""Every kind of plug-in: the package that holds ours, the entry point group for those of others, and the
protocol whose members a plug-in of that kind must have."""


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Finds and makes plug-ins of one kind. Keeps nothing: a file that appears is found by the next call."""

    kind: str
    package: str
    entry_point_group: str | None = None
    contract: type | None = None

    def names(self) -> list[str]:
        """Every known name, sorted: files of the package and entry points. Imports no plug-in."""
        return sorted({*self.own_names(), *self._entry_points()})

    def own_names(self) -> list[str]:
        """The names of the package's own plug-ins, sorted."""
        return sorted({name for name, path in self._files() if _is_plugin(path)})

    def get(self, name: str) -> Callable[..., T]:
        """The class (or factory) of that name; raises `UnknownNameError` with the list of names."""
        plugin = self._find(name)
        if not callable(plugin):
            kind = type(plugin).__name__
            raise UnknownNameError(
                f"{self.kind} {name!r} is a {kind}: name a class or a function that makes one"
            )
        made: Callable[..., T] = plugin
        return made

    def create(self, name: str, /, **options: Any) -> T:
        """Make the plug-in of that name. An unknown or missing option is answered with the constructor's
        parameters, and a product that lacks members of the contract with their names."""
        plugin = self.get(name)
        self._check_options(name, options)
        made = plugin(**options)
        missing = [member for member in members(self.contract) if not hasattr(made, member)]
        if self.contract is not None and missing:
            raise UnknownNameError(
                f"{self.kind} {name!r} makes a {type(made).__name__}, which has no {', '.join(missing)}: "
                f"it is no {self.contract.__name__} ({self.contract.__module__})"
            )
        return made

    def create_from(self, value: Any) -> T:
        """Make the plug-in of a setting: its name, or `name` and options."""
        options = {"name": value} if isinstance(value, str) else value
        if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
            raise ConfigError(f"{self.kind}: give a name, or a mapping of name and options, not {value!r}")
        name, options = options["name"], {key: options[key] for key in options if key != "name"}
        try:
            made = self.create(name, **options)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{self.kind} {name!r} with {options}: {error}") from error
        self.check_values(name, options)
        return made

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The parameters that `create(name, ...)` takes, in order."""
        try:
            return dict(inspect.signature(self.get(name)).parameters)
        except (ValueError, TypeError) as error:  # some of those written in C do not say
            raise UnknownNameError(f"{self.kind} {name!r} does not say which options it takes") from error

    def check_values(self, name: str, options: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for plain data of another type than the constructor declares. Files and clients
        send plain data; a wrong type would fail later, in the middle of a step."""
        plugin = self.get(name)
        hints = get_type_hints(plugin.__init__) if inspect.isclass(plugin) else {}
        for option, value in options.items():
            if option in hints and isinstance(value, _PLAIN) and not _fits(value, hints[option]):
                kind = str(getattr(hints[option], "__name__", hints[option]))
                large = isinstance(value, int | float) and abs(value) >= _TOO_LARGE
                got = "a number that is too large" if large else type(value).__name__
                raise ConfigError(f"{self.kind} {name!r}: {option} must be {kind}, got {got}")

    def _find(self, name: str) -> Any:
        if ":" in name:
            return self._from_path(name)
        if any(own == name and _is_plugin(path) for own, path in self._files()):
            plugin = importlib.import_module(f"{self.package}.{name}").PLUGIN
            return self._from_path(plugin) if isinstance(plugin, str) else plugin
        entry = self._entry_points().get(name)
        if entry is None:
            known = self.names()
            listed = f" Known: {', '.join(known) or 'none'}."
            guess = nearest(name, known).replace(listed, "")
            raise UnknownNameError(f"unknown {self.kind} {name!r}.{guess}{listed}")
        return entry.load()

    def _files(self) -> Iterator[tuple[str, Path]]:
        spec = importlib.util.find_spec(self.package)
        if spec is None:
            return
        for location in spec.submodule_search_locations or ():
            for path in (*Path(location).glob("*.py"), *Path(location).glob("*/__init__.py")):
                name = path.parent.name if path.stem == "__init__" else path.stem
                if path != Path(location, "__init__.py") and not name.startswith("_"):
                    yield name, path

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self.entry_point_group is None:
            return {}
        return {entry.name: entry for entry in entry_points(group=self.entry_point_group)}

    def _from_path(self, path: str) -> Any:
        module_name, _, attribute = path.partition(":")
        if not _can_import(module_name):
            raise UnknownNameError(
                f"{self.kind} {path!r}: there is no module {module_name!r}, in this directory neither"
            )
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            public = [name for name in vars(module) if not name.startswith("_")]
            raise UnknownNameError(
                f"{self.kind} {path!r}: {module_name} has no {attribute!r}.{nearest(attribute, public)}"
            )
        return getattr(module, attribute)

    def _check_options(self, name: str, options: Mapping[str, Any]) -> None:
        parameters = self.options(name)
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        named = [p.name for p in parameters.values() if p.kind not in _VARIADIC]
        for option in options:
            if option not in named and not takes_any:
                raise UnknownNameError(
                    f"{self.kind} {name!r} has no option {option!r}; it takes {', '.join(named) or 'none'}."
                )
        missing = [p for p in named if parameters[p].default is inspect.Parameter.empty and p not in options]
        if missing:
            raise ConfigError(
                f"{self.kind} {name!r} needs {', '.join(missing)}; it takes {', '.join(named)}."
            )


def _can_import(module_name: str) -> bool:
    """Whether there is such a module. Searches the working directory last; if the module is there, the
    directory stays on the path."""
    folder = str(Path.cwd())
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.append(folder)
    try:
        found = importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):
        found = False
    if added and not found:
        sys.path.remove(folder)
    return found


def _is_plugin(path: Path) -> bool:
    return _PLUGIN_LINE.search(path.read_text(encoding="utf-8")) is not None


def _fits(value: Any, hint: Any) -> bool:
    """Whether plain data has the annotated type; false for objects of other classes."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in inner)
    if isinstance(value, dict):
        fits, parts = origin in (dict, Mapping), list(value.values())
    elif isinstance(value, list):
        fits, parts = origin in (list, Sequence, Iterable), value
    elif origin is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    else:
        return hint is Any or (origin is type(value) and (origin is not int or abs(value) < _TOO_LARGE))
    return hint is Any or (fits and all(_fits(part, item_hint) for part in parts for item_hint in inner[-1:]))


_PLAIN = (int, float, str, list, dict, NoneType)
_TOO_LARGE = 2**63
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def members(contract: type | None) -> list[str]:
    """The public names that a protocol and its bases require, `__call__` included, sorted."""
    protocols = [cls for cls in inspect.getmro(contract) if "_is_protocol" in vars(cls)] if contract else []
    names = {name for cls in protocols for name in (*vars(cls), *vars(cls).get("__annotations__", {}))}
    return sorted(name for name in names if name == "__call__" or not name.startswith("_"))


def registry(kind: str) -> Registry[Any]:
    """The registry of one of `KINDS`."""
    if kind not in KINDS:
        raise UnknownNameError(f"unknown kind of plug-in {kind!r}.{nearest(kind, KINDS)}")
    return Registry(kind, *KINDS[kind])
