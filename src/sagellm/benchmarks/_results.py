"""What every result comes with: what it was measured on, and how it is written."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import sagellm
from sagellm.benchmarks._tables import Table, print_tables
from sagellm.core.cores import usable_cores
from sagellm.core.errors import ConfigError

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Environment:
    """Machine, software and day of a measurement. `commit` is None outside a git checkout; `clean` says
    whether the package was as committed."""

    date: str
    cpu: str
    cores: int
    system: str
    python: str
    sagellm: str
    commit: str | None
    clean: bool


def environment(date: datetime) -> Environment:
    """This machine, on that day."""
    commit, clean = _checkout(Path(sagellm.__file__).parent)
    return Environment(
        date=date.isoformat(timespec="seconds"),
        cpu=cpu_model(CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""),
        cores=usable_cores(),
        system=platform.system(),
        python=platform.python_version(),
        sagellm=sagellm.__version__,
        commit=commit,
        clean=clean,
    )


def cpu_model(cpuinfo: str) -> str:
    """The model name in the kernel's list of processors, or what the platform calls it."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _checkout(package: Path) -> tuple[str | None, bool]:
    """The commit that `package` is of, and whether nothing in it was changed since.

    An installed package may lie in a folder that belongs to another checkout, which does not track it.
    """
    tracked = _git(package, "ls-files", "--error-unmatch", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD") if tracked else None
    return commit, commit is not None and _git(package, "status", "--porcelain", "--", ".") == ""


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def figure(value: float) -> str:
    """Three significant digits or more: 0.123, 1.23, 12.3, 123, 12,345."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def check_writable(path: Path) -> None:
    """Raise `ConfigError` now rather than after a long measurement."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: name a file in a folder that exists")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write the values, in their order; raises `ConfigError` naming the file."""
    try:
        path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def show(
    tables: Iterable[Table], values: Mapping[str, Any], out: Path | None, *, markdown: bool = False
) -> None:
    """Write the values to `out`, if it is given, then print the tables; raises as `write_json` does."""
    if out is not None:
        write_json(out, values)
    print_tables(tables, markdown=markdown)
