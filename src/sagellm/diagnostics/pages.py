"""Self-contained HTML pages, which load nothing.

They can be read from a width of 400 pixels on."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import sagellm


def render_page(template: str, **values: Any) -> str:
    """Fill a template of `templates/`. Every value is escaped."""
    return _environment().get_template(template).render(**values, sagellm_version=sagellm.__version__)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("sagellm.diagnostics"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
