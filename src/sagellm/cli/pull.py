"""`sagellm pull`: fetch a model of the hub into the local cache."""

from __future__ import annotations

from pathlib import Path

from sagellm.cli._machine import as_text
from sagellm.cli._options import Model, command
from sagellm.cli._settings import Settings
from sagellm.core.errors import RequestError


@command
def pull(*, model: Model, settings: Settings) -> None:
    """Fetch a model from the hub into the local cache.

    What describes it comes first: a model that cannot run is refused before its weights are fetched.
    """
    from sagellm.engines.build import model_source

    if model.name is None:
        raise RequestError("which model? sagellm pull ORG/NAME", "model")
    folder = model_source(settings.load(model=model.name).config)
    print(f"{model.name}: {as_text(folder_bytes(folder))} in {folder}")


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take together."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
