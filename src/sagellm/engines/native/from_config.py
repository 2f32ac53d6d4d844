"""From a configuration to the native engine: folder, size, tokenizer and backend."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.core.blocks import cdiv
from sagellm.core.config import Config
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.protocols.engine import Progress
from sagellm.core.registry import registry
from sagellm.engines.native import DEMO_MODEL

try:
    import torch

    from sagellm.accel.fusion.cpu import cpu_kernels
    from sagellm.accel.fusion.triton import triton_kernels
    from sagellm.accel.quantization.round_to_nearest import RoundToNearest
    from sagellm.accel.quantization.weight_format import weight_format
    from sagellm.engines.native.architectures import read_config
    from sagellm.engines.native.backend import NativeBackend
    from sagellm.engines.native.footprint import Footprint, footprint
    from sagellm.engines.native.head_files import has_draft_head
    from sagellm.engines.native.headed_backend import HeadedBackend
    from sagellm.engines.native.hub import model_folder
    from sagellm.engines.native.implementations import described
    from sagellm.engines.native.matrices import quantization_of
    from sagellm.engines.native.memory import pool_blocks
    from sagellm.engines.native.model_spec import ModelSpec
    from sagellm.engines.native.recorded_steps import cuda_capture
    from sagellm.engines.native.self_draft import SelfDraftSpec
    from sagellm.engines.native.self_drafting_backend import SelfDraftingBackend
    from sagellm.engines.native.tokenizer import Tokenizer
    from sagellm.engines.native.tokenizer_files import tokenizer_file
    from sagellm.engines.native.tokenizer_of import tokenizer_of
except ImportError as error:
    raise MissingExtraError("running a model", "native") from error

if TYPE_CHECKING:
    from sagellm.core.child_process import Inbox

log = logging.getLogger("sagellm.engine")


def native_backend(
    config: Config,
    *,
    progress: Progress | None = None,
    compute_dtype: str = "auto",
    kv_memory_bytes: int | None = None,
) -> NativeBackend:
    """The backend for the configured model, which is fetched if need be. Raises as `NativeBackend`."""
    options = _backend_options(
        config, progress=progress, compute_dtype=compute_dtype, kv_memory_bytes=kv_memory_bytes
    )
    if options["synthetic_draws"]:
        log.warning("speculative.method synthetic: ANSWERS ARE MADE-UP TOKENS, for benchmarks of speed alone")
    head, draft = draft_head_of(config), self_draft_of(config)
    if head is not None:
        return HeadedBackend(head=head, **options)
    if draft is not None:
        return SelfDraftingBackend(draft=draft, **options)
    if config.parallel.num_ranks == 1:
        return NativeBackend(**options)
    from sagellm.engines.native.parallel.start import first_rank

    return first_rank(config, options)


def follow(given: dict[str, Any], inbox: Inbox) -> None:
    """The entry of the other ranks of a divided model (`parallel/start.py`)."""
    from sagellm.engines.native.parallel.start import following_rank

    following_rank(_backend_options(Config.model_validate(given["config"])), given, inbox)


def _backend_options(
    config: Config,
    *,
    progress: Progress | None = None,
    compute_dtype: str = "auto",
    kv_memory_bytes: int | None = None,
) -> dict[str, Any]:
    """The options of `NativeBackend` for the configured model."""
    return {
        "model": model_source(config),
        "device": config.model.device,
        "compute_dtype": compute_dtype,
        "block_size": config.kv.block_size,
        "num_blocks": config.kv.num_blocks,
        "kv_memory_fraction": config.kv.memory_fraction,
        "kv_memory_bytes": kv_memory_bytes,
        "host_memory_bytes": config.kv.host_bytes,
        "measure_prefill": config.kv.has_tiers or "model" in registry("policy").options(config.kv.eviction),
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_model_len": config.model.max_model_len,
        "threads": config.engine.threads,
        "seed": config.engine.seed,
        "progress": progress,
        "cuda_kernels": triton_kernels if config.engine.kernels == "auto" else None,
        "split_kv": splits_kv(config),
        "capture": cuda_capture if config.engine.recorded_steps else None,
        "share_kv": bool(config.kv.share_pool),
        "synthetic_draws": config.speculative.method == "synthetic",
        **_held_as(config),
    }


def draft_head_of(config: Config) -> Path | None:
    """Where the configured model's draft head is; None: it runs without.

    The method `heads` asks for it (`head_files.add_head` says where it may be), and `auto` takes the one of
    the model's folder. Raises `ConfigError` for several ranks or an option that is no path.
    """
    method, num_ranks = config.speculative.method, config.parallel.num_ranks
    if method not in ("heads", "auto") or (method == "auto" and num_ranks > 1):
        return None
    if num_ranks > 1:
        raise ConfigError(
            "speculative.method heads needs the model on one rank: set parallel.* to 1, or take the "
            "method suffix"
        )
    folder = model_source(config)
    if method == "heads":
        source = config.speculative.method_options.get("model", folder)
        if not isinstance(source, str | Path):
            raise ConfigError(f"speculative.method_options: model is a file or a folder, not {source!r}")
        return Path(source)
    return folder if has_draft_head(folder, config.model.implementation) else None


def self_draft_of(config: Config) -> SelfDraftSpec | None:
    """What of the configured model is its own draft; None: it has none.

    Raises `ConfigError` for several ranks, for options that make no draft of the model, and for one that
    verifies none.
    """
    settings, held_as = config.speculative, _held_as(config)
    if settings.method != "self_draft":
        return None
    if config.parallel.num_ranks > 1:
        raise ConfigError("speculative.method self_draft needs the model on one rank: set parallel.* to 1")
    found = read_config(model_source(config))
    spec = described(found, held_as["implementation"])
    if not isinstance(spec, ModelSpec) or spec.recurrent is not None:
        what = "has recurrent layers, whose states do not go back"
        raise ConfigError(
            "speculative.method self_draft needs a native model without recurrent layers; this one "
            f"{what if isinstance(spec, ModelSpec) else 'runs through transformers'}: set speculative.method "
            f"to {'none' if spec.recurrent is not None else 'suffix'}"
        )
    quantized_by = quantization_of(found, held_as["quantizer"], held_as["formats"]).method
    return SelfDraftSpec.of(settings.method_options, spec, quantized_by)


def splits_kv(config: Config) -> bool:
    """Whether KV may be split into groups by window.

    Shares of memory and tiers need the blocks of a request whole.
    """
    kv = config.kv
    return not (kv.tenant_shares or kv.class_shares or kv.has_tiers)


def _held_as(config: Config) -> dict[str, Any]:
    """The options of `NativeBackend` that decide how it holds weights."""
    bits = {"none": None, "int8": 8, "int4": 4}[config.model.quantization]
    return {
        "dtype": config.model.dtype,
        "kernels": cpu_kernels if config.engine.kernels == "auto" else None,
        "quantizer": None if bits is None else RoundToNearest(bits),
        "formats": weight_format,
        "implementation": config.model.implementation,
    }


def model_source(config: Config) -> Path:
    """The folder of the configured model; fetches a model of the hub.

    Raises `ModelError`; if the model cannot run, before any weights are fetched.
    """
    held_as = _held_as(config)

    def check(folder: Path) -> None:
        found = read_config(folder)
        described(found, held_as["implementation"])
        quantization_of(found, held_as["quantizer"], held_as["formats"])
        tokenizer_file(folder)

    model = config.model
    return model_folder(model.name or DEMO_MODEL, model.revision, offline=model.offline, check=check)


def read_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer of the configured model, which is fetched if need be; raises `ModelError`."""
    return tokenizer_of(config, model_source(config))


def model_footprint(config: Config) -> Footprint:
    """The memory that the configured model needs. Loads nothing, and refuses what `build_llm` refuses."""
    model = config.model
    size = footprint(
        model_source(config),
        device=model.device,
        max_model_len=model.max_model_len,
        split_kv=splits_kv(config),
        head=draft_head_of(config),
        draft=self_draft_of(config),
        **_held_as(config),
    )
    read_tokenizer(config)
    return size


def weight_bytes_of_ranks(config: Config) -> list[int]:
    """Bytes of the weights of each rank, the first one first, with `parallel.ffn`. Loads nothing."""
    from sagellm.engines.native.parallel.start import split_of

    first, model = split_of(config.parallel), config.model
    parts = (
        footprint(
            model_source(config),
            device=model.device,
            max_model_len=model.max_model_len,
            split=first.with_rank(rank),
            **_held_as(config),
        )
        for rank in range(first.num_ranks)
    )
    return [part.weight_bytes for part in parts]


def num_pool_blocks(config: Config, size: Footprint, device: str, free_bytes: int) -> int:
    """Blocks of the pool. `free_bytes` are those before a model of that size is loaded.

    Raises `CapacityError` where the backend does.
    """
    states = config.scheduler.max_num_seqs * size.state_bytes
    kv, where, draft = config.kv, torch.device(device), self_draft_of(config)
    taken, per_token = size.weight_bytes + size.draft_weight_bytes + states, size.kv_bytes_per_token
    if draft is None or draft.num_blocks is None:
        per_token += size.draft_kv_bytes_per_token
    else:
        taken += draft.num_blocks * kv.block_size * size.draft_kv_bytes_per_token
    left, bytes_per_block = max(0, free_bytes - taken), per_token * kv.block_size
    most = config.scheduler.max_num_seqs * cdiv(size.max_model_len, kv.block_size)
    return pool_blocks(
        where, kv.num_blocks, most, bytes_per_block, None, kv.memory_fraction, kv.host_bytes, left
    )
