"""Import it where tests run commands in this process: Typer makes its commands once, not for each call.

Making all of them takes Typer a tenth of a second.
"""

from __future__ import annotations

from functools import cache

from typer import testing
from typer.main import get_command

vars(testing)["_get_command"] = cache(get_command)
