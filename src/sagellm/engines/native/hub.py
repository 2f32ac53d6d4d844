"""From a model's name to its folder: a local one, or the hub's.

Files that describe a model come first, so a model that cannot run is refused before its weights are fetched.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sagellm.core.errors import MissingExtraError, MissingWeightsError, ModelError
from sagellm.engines.native.architectures import read_config, read_spec
from sagellm.engines.native.checkpoint import CONVERT_PICKLES, INDEX_FILE, SINGLE_FILE, shard_names

DESCRIPTION = (
    "config.json",
    "generation_config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that describe a model; all are small beside its weights."""

Check = Callable[[Path], None]
"""Called with a folder that holds a model's description; raises `ModelError` for one that cannot run."""
log = logging.getLogger("sagellm.hub")
_HTTP_LOGS = ("httpx", "httpx2")
"""HTTP libraries of the hub's client; they log each request as information."""


def check_architecture(folder: Path) -> None:
    """Raises `ModelError` for a `config.json` that the native engine does not run."""
    read_spec(read_config(folder))


def model_folder(
    model: str | Path,
    revision: str | None = None,
    *,
    offline: bool = False,
    check: Check = check_architecture,
) -> Path:
    """The folder that holds `model`, a folder or a hub name such as "Qwen/Qwen3-0.6B".

    A hub model is downloaded, or taken from the cache; `revision` is a branch, tag or commit. With `offline`,
    or HF_HUB_OFFLINE in the environment, only the cache is used.

    Raises `ModelError` for a folder that does not exist or has no readable `config.json`, for a model that
    `check` refuses, whose weights are then not fetched, or where the hub does not answer and the cache does
    not hold the model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        read_config(path)  # first: of a folder that holds no model, the tokenizer is not what is missing
        return path
    name = str(model)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or path.exists():
        raise ModelError(
            f"{name} is not a model folder: give a folder with config.json, or a hub name like org/name"
        )
    return _fetch(name, revision, check, offline=offline)


def is_cached(name: str, revision: str | None = None) -> bool:
    """Whether the local cache has that hub model's config.json; weights may be missing."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return False
    try:
        return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    except HFValidationError:
        return False


def cached_models() -> list[tuple[str, Path]]:
    """Names of the hub models in the local cache, with their latest folders."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return []
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    newest = {
        repo.repo_id: max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path
        for repo in repositories
        if repo.repo_type == "model" and repo.revisions
    }
    return sorted(newest.items())


def _fetch(name: str, revision: str | None, check: Check, *, offline: bool) -> Path:
    folder = _snapshot(name, revision, DESCRIPTION, offline=offline)
    check(folder)
    weights = _weight_files(folder)
    missing = [file for file in weights if not (folder / file).exists()]
    if missing and not offline:
        log.debug("fetching %d files of weights of %s", len(missing), name)
        _snapshot(name, folder.name, ["config.json", *weights], offline=False, shows_progress=True)
        missing = [file for file in weights if not (folder / file).exists()]
    if missing:
        where = "on the hub; " + CONVERT_PICKLES.format(name)
        where = "in the local cache: fetch it without --offline" if offline else where
        raise MissingWeightsError(
            f"{name}: the weights have to be safetensors files, and {', '.join(missing[:4])} is not {where}"
        )
    return folder


def _weight_files(folder: Path) -> list[str]:
    """Weight files named by the index, or the single file."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    names = shard_names(index)
    strange = [name for name in names if Path(name).suffix != ".safetensors"]
    if strange:
        raise ModelError(f"{index} names {strange[0]!r}: weights have to be safetensors files")
    return names


def _snapshot(
    name: str, revision: str | None, files: Sequence[str], *, offline: bool, shows_progress: bool = False
) -> Path:
    """The cached folder of a model, with those of `files` that the hub has."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("fetching a model from the hub", "native") from None
    for logger in _HTTP_LOGS:
        logging.getLogger(logger).setLevel(logging.WARNING)
    try:
        with _bars(shown=shows_progress and sys.stderr.isatty()):
            found = snapshot_download(
                name, revision=revision, allow_patterns=list(files), local_files_only=offline
            )
    except Exception as error:
        # The hub's client raises its own, requests' and httpx's errors; each means the same to the user.
        said = next(iter(str(error).splitlines()), type(error).__name__)
        failed = f"fetching it from the Hugging Face hub failed ({said}). Check the name and the network"
        if offline:
            failed = f"it is not in the local cache. Without --offline, `sagellm pull {name}` fetches it"
        raise ModelError(
            f"{name!r} is no folder here, and {failed}. Give a folder instead "
            "that holds config.json and *.safetensors."
        ) from error
    return Path(found)


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Within, the hub's client shows its progress bars, or none."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
