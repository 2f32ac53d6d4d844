"""Plug-ins by name: a plug-in is one new file, and no other file changes.

The name of a plug-in is the name of its file (or folder) in a package, which says `PLUGIN = TheClass`.
Listing names reads files and imports none; asking for one imports that file only. Files whose name starts
with `_`, and files without a `PLUGIN` line, are no plug-ins. From outside: `"pkg.module:Class"`, or an entry
point of the registry's group; a name that sageLLM itself uses cannot be replaced that way.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from sagellm.core.errors import ConfigError, UnknownNameError, nearest

T = TypeVar("T")

_PLUGIN_LINE = re.compile(r"^PLUGIN\b\s*[:=]", re.MULTILINE)

KINDS: Mapping[str, tuple[str, str]] = {
    "policy": ("sagellm.kvmgr.eviction", "sagellm.policies"),
    "pass": ("sagellm.kvmgr.scheduler_ir.passes", "sagellm.passes"),
    "predictor": ("sagellm.kvmgr.lifetime", "sagellm.predictors"),
    "index": ("sagellm.kvmgr.prefix_cache", "sagellm.indexes"),
    "pool": ("sagellm.kvmgr.kv_pool", "sagellm.pools"),
    "backend": ("sagellm.engines", "sagellm.backends"),
    "interconnect": ("sagellm.comm.interconnect", "sagellm.interconnects"),
    "trace_format": ("sagellm.benchmarks.traces", "sagellm.trace_formats"),
}
"""Every kind of plug-in: the package that holds ours, and the entry point group for those of others."""


class Registry(Generic[T]):
    """Finds and makes plug-ins of one kind. Keeps nothing: a file that appears is found by the next call."""

    def __init__(self, kind: str, package: str, entry_point_group: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self.entry_point_group = entry_point_group

    def names(self) -> list[str]:
        """Every known name, sorted: files of the package and entry points. Imports no plug-in."""
        return sorted({*self._own_names(), *self._entry_points()})

    def get(self, name: str) -> Callable[..., T]:
        """The class (or factory) of that name; raises `UnknownNameError` with the list of names."""
        if ":" in name:
            return self._from_path(name)
        if name in self._own_names():
            return self._plugin_of(f"{self.package}.{name}")
        entry = self._entry_points().get(name)
        if entry is None:
            raise UnknownNameError(self._unknown(name))
        plugin: Callable[..., T] = entry.load()
        return plugin

    def create(self, name: str, **options: Any) -> T:
        """Make one; an option that it does not take, or a missing one, is answered with its parameters."""
        plugin = self.get(name)
        self._check_options(name, plugin, options)
        return plugin(**options)

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The parameters that `create(name, ...)` takes, in order."""
        return dict(inspect.signature(self.get(name)).parameters)

    def _own_names(self) -> set[str]:
        return {name for name, path in self._files() if _PLUGIN_LINE.search(path.read_text(encoding="utf-8"))}

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

    def _plugin_of(self, module: str) -> Callable[..., T]:
        plugin: Callable[..., T] = importlib.import_module(module).PLUGIN
        return plugin

    def _from_path(self, path: str) -> Callable[..., T]:
        module_name, _, attribute = path.partition(":")
        try:
            found = importlib.util.find_spec(module_name)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UnknownNameError(f"{self.kind} {path!r}: there is no module {module_name!r} to import")
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute):
            public = [name for name in vars(module) if not name.startswith("_")]
            raise UnknownNameError(
                f"{self.kind} {path!r}: {module_name} has no {attribute!r}.{nearest(attribute, public)}"
            )
        plugin: Callable[..., T] = getattr(module, attribute)
        return plugin

    def _unknown(self, name: str) -> str:
        known = self.names()
        listed = f" Known: {', '.join(known) or 'none'}."
        guess = nearest(name, known)
        return f"unknown {self.kind} {name!r}.{guess if guess != listed else ''}{listed}"

    def _check_options(self, name: str, plugin: Callable[..., T], options: Mapping[str, Any]) -> None:
        parameters = inspect.signature(plugin).parameters
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


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def registry(kind: str) -> Registry[Any]:
    """The registry of one of `KINDS`."""
    if kind not in KINDS:
        raise UnknownNameError(f"unknown kind of plug-in {kind!r}.{nearest(kind, KINDS)}")
    package, group = KINDS[kind]
    return Registry(kind, package, group)
