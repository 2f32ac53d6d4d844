"""`sagellm version`."""

from __future__ import annotations

import platform

from sagellm import __version__


def version() -> None:
    """Print the versions of sageLLM and Python."""
    print(f"sagellm {__version__} (Python {platform.python_version()})")
