"""What a user may choose of our policies and passes inside another engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests.hosted_passes import open_passes
from sagellm.engines.guests.request_hints import HINT_KINDS

MODES = ("shadow", "on")


@dataclass(frozen=True, slots=True)
class GuestSettings:
    """`hints`: which kinds of `HINT_KINDS` are heeded.

    `report_s`: seconds between two lines in the log, 0 for none.
    """

    mode: str = "shadow"
    policy: str = "adaptive"
    options: dict[str, Any] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    report_s: float = 300.0

    @classmethod
    def of(cls, given: dict[str, Any]) -> GuestSettings:
        """Raises `ConfigError` for what is not known.

        `hints` is a list of kinds, or `all`.
        """
        unknown = sorted(given.keys() - {"mode", "policy", "options", "hints", "report_s"})
        if unknown:
            raise ConfigError(
                f"no setting {', '.join(unknown)} of sageLLM; use mode, policy, options, hints, report_s"
            )
        made = cls(**given | {"hints": _kinds(given.get("hints", ()))})
        if made.mode not in MODES:
            raise ConfigError(f"mode {made.mode!r}: use {' or '.join(MODES)}")
        if not isinstance(given.get("report_s", 0), int | float) or made.report_s < 0:
            raise ConfigError(f"report_s must be a number of seconds, got {made.report_s!r}")
        _check_policy(made.policy, made.options)
        return made


def _kinds(given: Any) -> tuple[str, ...]:
    """The kinds that a setting names, in the order of `HINT_KINDS`."""
    if given == "all":
        return HINT_KINDS
    is_list = isinstance(given, Iterable) and not isinstance(given, str)
    if not is_list or any(kind not in HINT_KINDS for kind in given):
        raise ConfigError(f"hints must be 'all' or a list of {', '.join(HINT_KINDS)}; got {given!r}")
    return tuple(kind for kind in HINT_KINDS if kind in given)


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """`options`: of passes, by their names."""

    strategy: str = "priority"
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: dict[str, Any]) -> SchedulingSettings:
        """Raises `SageError` for what is not known."""
        if unknown := sorted(given.keys() - {"strategy", "options"}):
            raise ConfigError(
                f"no setting {', '.join(unknown)} of sageLLM's scheduler; use strategy, options"
            )
        made = cls(**given)
        open_passes(made.strategy, made.options)
        return made


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """KV below the host's device.

    `host_gb` of host memory and `disk_gb` in the folder `dir`, in GiB, for all ranks of a model together;
    `policy` and its `options` decide what each of them evicts.
    """

    host_gb: float = 0.0
    disk_gb: float = 0.0
    dir: str = ""
    policy: str = "adaptive"
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: dict[str, Any]) -> StoreSettings:
        """Raises `ConfigError` for what is not known, and for a store of no size."""
        if unknown := sorted(given.keys() - {"host_gb", "disk_gb", "dir", "policy", "options"}):
            raise ConfigError(
                f"no setting {', '.join(unknown)} of the store; use host_gb, disk_gb, dir, policy, options"
            )
        for name in ("host_gb", "disk_gb"):
            size = given.get(name, 0)
            if type(size) not in {int, float} or not 0 <= size < math.inf:
                raise ConfigError(f"{name} must be a number of GiB, got {size!r}")
        if not isinstance(given.get("dir", ""), str):
            raise ConfigError(f"dir must be the name of a folder, got {given['dir']!r}")
        made = cls(**given | {"dir": _expanded(given.get("dir", ""))})
        if not made.host_gb and not made.disk_gb:
            raise ConfigError("a store needs memory: set host_gb, or disk_gb and dir")
        if bool(made.dir) != bool(made.disk_gb):
            raise ConfigError("disk_gb and dir belong together: a size in GiB, and the folder for it")
        _check_policy(made.policy, made.options)
        return made


def _expanded(folder: str) -> str:
    """A folder with `~` as the home folder. Raises `ConfigError` for that of an unknown user."""
    try:
        return str(Path(folder).expanduser()) if folder else ""
    except RuntimeError as error:
        raise ConfigError(f"dir {folder}: there is no such user, write the whole path") from error


def _check_policy(policy: str, options: Any) -> None:
    """Raises `SageError` for a policy or an option that does not exist."""
    if not isinstance(options, dict):
        raise ConfigError(f"options must be a mapping, got {options!r}")
    if taken := sorted({"capacity", "clock", "seed", "model"} & options.keys()):
        raise ConfigError(f"options: {', '.join(taken)} is given by the host's cache: leave it out")
    make_policy(policy, capacity=1, clock=MonotonicClock(), **options)
