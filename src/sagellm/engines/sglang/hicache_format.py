"""Settings of our HiCache storage, and what makes two pages mean the same KV.

SGLang names a page by a hash of its tokens, all before them, the LoRA adapter and the cache salt. All else is
in the `BlockFormat` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.version import __version__ as sglang_version

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError, ModelError, nearest
from sagellm.core.protocols.kv_tiers import BlockFormat
from sagellm.engines.build_kv import make_policy
from sagellm.engines.native.checkpoint import Checkpoint
from sagellm.engines.native.hub import model_folder
from sagellm.engines.native.model_fingerprint import model_fingerprint

FORMAT_VERSION = 1
CODECS = ("raw", "zstd")
_OF_SGLANG = (
    "backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size", "file_storage_path",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)  # fmt: skip
_ARGUMENTS = ("dtype", "kv_cache_dtype", "quantization", "json_model_override_args")
"""Of a server: they change KV beside the weights."""
_ARGUMENTS_OF_DRAFT = (
    "speculative_algorithm", "speculative_draft_load_format", "speculative_draft_model_quantization",
)  # fmt: skip
OF_DRAFT = (PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA)
"""Pools with the KV of a draft model."""
_SHARDED_ALWAYS = (PoolName.MAMBA, PoolName.DRAFT, PoolName.DRAFT_SWA)
"""Pools that differ from rank to rank, also where the KV of an MLA model does not."""


@dataclass(frozen=True, slots=True)
class HiCacheSettings:
    """Keys of `--hicache-storage-backend-extra-config`, beside SGLang's own.

    Either `dir` and `disk_gb` (GiB, for each rank), or `remote_url`, with `remote_gb` as the most that a rank
    puts there in a day. `weights_id` stands for the weights where their files cannot be read.
    """

    dir: str = ""
    disk_gb: float = 0.0
    policy: str = "adaptive"
    options: dict[str, Any] = field(default_factory=dict)
    codec: str = "raw"
    remote_url: str = field(default="", repr=False)
    remote_gb: float = 64.0
    weights_id: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> HiCacheSettings:
        """Raises `ConfigError` for what is unknown, missing or out of range."""
        known = list(cls.__dataclass_fields__)
        own = {name: value for name, value in given.items() if name not in _OF_SGLANG}
        for name, value in own.items():
            if name not in known:
                raise _wrong(f"no setting {name!r}.{nearest(name, known)}")
            _check_type(name, value, cls.__dataclass_fields__[name].type)
        made = cls(**own)
        if bool(made.dir) == bool(made.remote_url):
            raise _wrong('give either "dir" and "disk_gb", or "remote_url"')
        if made.dir and not made.disk_gb > 0:
            raise _wrong(f'"disk_gb" must be above 0 GiB, got {made.disk_gb!r}')
        if not made.remote_gb > 0:
            raise _wrong(f'"remote_gb" must be above 0 GiB, got {made.remote_gb!r}')
        if made.codec not in CODECS:
            raise _wrong(f'"codec" must be {" or ".join(CODECS)}, got {made.codec!r}')
        if taken := sorted({"capacity", "clock", "seed", "model"} & made.options.keys()):
            raise _wrong(f'"options": {", ".join(taken)} is given by the storage: leave it out')
        make_policy(made.policy, capacity=1, clock=MonotonicClock(), **made.options)
        return made


def _check_type(name: str, value: Any, annotation: Any) -> None:
    kinds: dict[str, tuple[tuple[type, ...], str]] = {
        "str": ((str,), "a text"),
        "float": ((int, float), "a number"),
        "dict[str, Any]": ((dict,), "a mapping"),
    }
    types, described = kinds[annotation]
    if not isinstance(value, types) or isinstance(value, bool):
        raise _wrong(f'"{name}" must be {described}, got {value!r}')


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"sageLLM's HiCache storage: {what}")


def identity_of_model(weights_id: str, args: Any) -> tuple[Any, ...]:
    """What stands for the weights, tokenizer and adapters of a server.

    `args`: of SGLang; None if there are none. Raises `ConfigError` where they cannot be
    told from others and there is no `weights_id`.
    """
    of_files = f"id {weights_id}" if weights_id else _told_apart(_files_of, args)
    return of_files, [str(getattr(args, name, None)) for name in _ARGUMENTS]


def identity_of_draft(weights_id: str, args: Any) -> tuple[Any, ...]:
    """What stands for the draft model of a server, beside its target. Raises as `identity_of_model`."""
    if args is None:
        return ()
    resolved = resolving_view(args)
    of_files = "" if weights_id else _told_apart(_files_of_draft, resolved)
    return of_files, [str(getattr(resolved, name, None)) for name in _ARGUMENTS_OF_DRAFT]


def _told_apart(files_of: Callable[[Any], str], args: Any) -> str:
    try:
        return files_of(args)
    except (ModelError, OSError) as error:
        raise _wrong(
            f'this model cannot be told from others ({error}). Give "weights_id", a text of your own, '
            "and change it with the weights, the tokenizer, the adapters or the draft model"
        ) from error


def _files_of(args: Any) -> str:
    if args is None or args.load_format == "dummy":
        raise ModelError("its weights have no files")
    folder = model_folder(args.model_path, args.revision, offline=True, check=lambda folder: None)
    others = [args.tokenizer_path, *(adapter.lora_path for adapter in args.lora_paths or ())]
    contents = [_content(Path(path)) for path in others if path and path != args.model_path]
    return f"{model_fingerprint(folder, Checkpoint(folder), str(args.dtype))} {contents}"


def _files_of_draft(args: Any) -> str:
    path = args.speculative_draft_model_path
    if not path or path == args.model_path:
        return ""
    revision = args.speculative_draft_model_revision
    return str(_content(model_folder(path, revision, offline=True, check=lambda folder: None)))


def _content(folder: Path) -> list[tuple[str, str]]:
    """Names of the files of a folder, and digests of their bytes."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder here")
    found = []
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        with path.open("rb") as file:
            found.append((path.name, file_digest(file, "sha256").hexdigest()))
    return found


def format_of_pages(
    name: str, pool: Any, config: HiCacheStorageConfig, model: tuple[Any, ...]
) -> BlockFormat:
    """Of the pages of one host pool.

    Raises `ConfigError` for a pool whose pages cannot be copied as bytes.
    """
    try:
        page, flat = pool.get_data_page(0, flat=False), pool.get_dummy_flat_data_page()
    except (NotImplementedError, ValueError, AttributeError, TypeError) as error:
        raise _wrong(f"the host pool {name} ({type(pool).__name__}) gives no pages: {error}") from error
    if page is None or not page.nbytes or page.nbytes != flat.nbytes:
        raise _wrong(f"the host pool {name} ({type(pool).__name__}) has no KV of its own")
    is_same_on_ranks = config.is_mla_model and name not in _SHARDED_ALWAYS
    text = repr((
        FORMAT_VERSION, sglang_version, model, config.model_name, str(name),
        type(pool).__name__, pool.layout, str(pool.dtype), pool.page_size, str(page.dtype), tuple(page.shape),
        pool.start_layer, pool.end_layer, config.is_mla_model,
        None if is_same_on_ranks else (config.tp_rank, config.tp_size),
        (config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size),
        (config.dcp_rank, config.dcp_size),
    ))  # fmt: skip
    return BlockFormat(blake2b(text.encode(), digest_size=16).digest(), page.nbytes)
