"""From a model's name to a folder: a folder is itself, anything else is fetched from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from sagellm.core.errors import MissingExtraError, ModelError

WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def model_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder that holds `model`; a hub name such as "Qwen/Qwen3-0.6B" is downloaded, or taken from the
    cache; `revision` is a branch, tag or commit there.

    Raises `ModelError` for a folder that does not exist, or where the hub does not answer and nothing is
    cached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    name = str(model)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise ModelError(
            f"{name} is not a model folder: give a folder with config.json, or a hub name like org/name"
        )
    return _fetch(name, revision)


def _fetch(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("fetching a model from the hub", "native") from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED_FILES)))
    except Exception as error:
        # The hub's client raises its own, requests' and httpx's errors; each means the same to the user.
        raise ModelError(
            f"{name!r} is no folder here, and fetching it from the Hugging Face hub failed "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}). "
            "Give a folder that holds config.json and *.safetensors, or check the name and the network."
        ) from error
