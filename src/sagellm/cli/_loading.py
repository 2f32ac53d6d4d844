"""A model in memory, with a progress bar on stderr while it loads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.core.events import EventBus
    from sagellm.engines.llm import LLM


def load_llm(config: Config, events: EventBus | None = None) -> LLM:
    """The configured model, ready to answer; errors are those of `build_llm`."""
    from sagellm.engines.build import build_llm

    logging.basicConfig(level=config.log.level.upper(), format="%(levelname)s %(name)s: %(message)s")
    with loading_bar(config.model.name or "the demo model") as progress:
        return build_llm(config, events=events, progress=progress)


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with bytes done and bytes in all; shows nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"loading {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
