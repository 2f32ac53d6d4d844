"""`sagellm pull` and `sagellm models`: fill the local cache of models, and list it."""

from __future__ import annotations

from pathlib import Path

from sagellm.benchmarks.reporting import Table, print_tables
from sagellm.cli._loading import as_text
from sagellm.cli._options import Model, command
from sagellm.cli._settings import Settings
from sagellm.core.errors import RequestError, SageError
from sagellm.engines.native import DEMO_MODEL, DEMO_NAME


@command
def pull(*, model: Model, settings: Settings) -> None:
    """Fetch a model from the hub into the local cache.

    Its configuration comes first: a model that cannot run is refused before its weights are fetched.
    """
    from sagellm.engines.native.from_config import model_source

    if model.name is None:
        raise RequestError("which model? sagellm pull ORG/NAME", "model")
    folder = model_source(settings.load(model=model.name).config)
    print(f"{model.name}: {as_text(folder_bytes(folder))} in {folder}")


@command
def models(*, settings: Settings) -> None:
    """List the models in the local cache: name, size, whether it runs.

    The demo model comes with sageLLM; the others are those of the Hugging Face cache (HF_HOME, HF_HUB_CACHE).
    """
    from sagellm.engines.native.from_config import model_footprint
    from sagellm.engines.native.hub import cached_models

    rows = []
    for name, folder in [(DEMO_NAME, DEMO_MODEL), *cached_models()]:
        try:
            size = model_footprint(settings.load(model=str(folder)).config)
            state = f"yes, {size.num_parameters / 1e6:,.1f} M parameters"
        except SageError as error:
            state = f"no: {str(error).replace(f'{folder} ', '')}"
        rows.append((name, as_text(folder_bytes(folder)), state))
    print_tables([Table("models in the local cache", ("name", "size", "runs"), rows, num_names=3)])


def folder_bytes(folder: Path) -> int:
    """The size of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
