"""The keys of a section of the configuration as a table in Markdown.

    <!-- table of: keys of fleet.groups.NAME -->

The words in capitals stand for a name that the user chooses; items of a list have the path of the list.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sagellm.core.config import Config

PREFIX = "keys of "


def table(path: str) -> str:
    """The table of a dotted path. Raises `ValueError` for a path that is no section."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, info in _section(path).model_fields.items():
        meaning = (info.description or "").replace("|", "\\|")
        lines.append(f"| {name} | {_default(info)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _section(path: str) -> type[BaseModel]:
    kind: Any = Config
    for part in path.split("."):
        found = _model(kind)
        kind = found.model_fields[part].annotation if found is not None and kind is found else found
    found = _model(kind)
    if found is None:
        raise ValueError(f"{path} is no section of the configuration")
    return found


def _model(kind: Any) -> type[BaseModel] | None:
    """A section, or that of a mapping's or list's values; None: there is none."""
    kinds = (kind, *get_args(kind))
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(needed)"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Enum):
        return str(value.value)
    if value in (None, "", (), {}):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
