"""Starts the ranks of a divided model."""

from __future__ import annotations

from typing import Any

from sagellm.core.child_process import Inbox
from sagellm.core.config import Config, ParallelConfig
from sagellm.core.errors import ConfigError
from sagellm.core.registry import registry
from sagellm.engines.native.architectures import read_config
from sagellm.engines.native.implementations import described
from sagellm.engines.native.options import usable_device
from sagellm.engines.native.parallel.backends import AttentionRank, FirstRank, FollowingRank, LeadingRank
from sagellm.engines.native.parallel.ffn_rank import FfnRank
from sagellm.engines.native.parallel.launch import join, launch
from sagellm.engines.native.parallel.ranks import Ranks
from sagellm.engines.native.parallel.split import Split

ENTRY = "sagellm.engines.native.from_config:follow"
_OF_FFN_RANKS = (
    "model", "device", "dtype", "compute_dtype", "max_model_len", "threads", "kernels", "quantizer",
    "formats", "implementation",
)  # fmt: skip


def first_rank(config: Config, options: dict[str, Any]) -> LeadingRank:
    """The backend of the first rank, with the others started. `options` are those of `NativeBackend`.

    Raises `ConfigError` or `ModelError` for what cannot be divided, before a process is started, and
    `EngineFailedError` with the reason of a rank that fails.
    """
    parallel = config.parallel
    split = split_of(parallel)
    _check(config)
    split.check(described(read_config(options["model"]), config.model.implementation))
    located = config.model_copy(
        update={"model": config.model.model_copy(update={"name": str(options["model"])})}
    )
    given: dict[str, object] = {"config": located.model_dump(mode="json")}
    ranks = launch(split, ENTRY, given, parallel.backend, parallel.backend_options)
    try:
        if split.ffn:
            return AttentionRank(**options, ranks=ranks, micro_batch_tokens=parallel.micro_batch_tokens)
        return FirstRank(**_of_a_rank(options, split), ranks=ranks)
    except BaseException:
        ranks.close()
        raise


def following_rank(options: dict[str, Any], given: dict[str, Any], inbox: Inbox) -> None:
    """Follow the first rank until it is done. `given` is what `launch` gave, `options` are those of
    `NativeBackend`."""
    split = Split(**given["split"])
    ranks = join(split, given["store"], given["collectives"])
    rank: FfnRank | FollowingRank
    if split.ffn:
        records = options["capture"] is not None
        rank = FfnRank(**{key: options[key] for key in _OF_FFN_RANKS}, ranks=ranks, records=records)
    else:
        rank = _following(options, split, ranks)
    while (message := inbox.get()) is not None:
        rank.follow(message)


def _following(options: dict[str, Any], split: Split, ranks: Ranks) -> FollowingRank:
    options = {**_of_a_rank(options, split), "measure_prefill": False, "progress": None}
    return FollowingRank(**options, ranks=ranks)


def split_of(parallel: ParallelConfig) -> Split:
    """The part of the first rank."""
    return Split(0, parallel.tensor, parallel.pipeline, parallel.whole_experts, parallel.ffn)


def _of_a_rank(options: dict[str, Any], split: Split) -> dict[str, Any]:
    """Options of one rank. Stages of a pipeline have different windows, so their KV is in one group."""
    if split.pipeline == 1:
        return options
    return {**options, "split_kv": False, "capture": None}


def _check(config: Config) -> None:
    """Raise `ConfigError` for settings that several ranks do not go with.

    `UnknownNameError`: there are no such collectives.
    """
    parallel = config.parallel
    if parallel.tensor > 1 and parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.tensor = {parallel.tensor} with parallel.pipeline = {parallel.pipeline}: ranks share "
            "the layers or deal them, not both: set one of them to 1"
        )
    if parallel.ffn and parallel.tensor * parallel.pipeline > 1:
        raise ConfigError(
            f"parallel.ffn = {parallel.ffn} leaves attention to one rank: set parallel.tensor and "
            "parallel.pipeline to 1, or parallel.ffn to 0"
        )
    if parallel.whole_experts and max(parallel.tensor, parallel.ffn) < 2:
        raise ConfigError(
            "parallel.whole_experts deals experts to the ranks of parallel.tensor, or to those of "
            "parallel.ffn: set that to 2"
        )
    _check_collectives(parallel)
    if usable_device(config.model.device).type != "cpu":
        raise ConfigError(
            f"model.device = {config.model.device}: several ranks run on a CPU so far: set it to cpu"
        )
    if config.kv.compress_reasoning:
        raise ConfigError("kv.compress_reasoning drops KV on one rank only: leave it out with parallel.*")
    if parallel.ffn:
        return  # one rank has all KV
    if config.kv.has_tiers:
        raise ConfigError(
            "kv.host_gb, kv.disk_gb and kv.remote_url keep whole blocks, and each rank has a part of them: "
            "leave them out, or set parallel.tensor and parallel.pipeline to 1"
        )
    if config.kv.approximate_reuse:
        raise ConfigError("kv.approximate_reuse moves KV on one rank only: leave it out with parallel.*")


def _check_collectives(parallel: ParallelConfig) -> None:
    """Raise `UnknownNameError` where there are no such collectives, `ConfigError` for a wrong option."""
    name, options = parallel.backend, parallel.backend_options
    if name is None and options:
        raise ConfigError("parallel.backend_options: name the collectives that take them: parallel.backend")
    if name is None:
        return
    collectives = registry("collectives")
    taken = collectives.options(name).keys() - {"rank", "world_size", "store", "group", "clock"}
    if strangers := sorted(options.keys() - taken):
        raise ConfigError(
            f"parallel.backend_options: {name!r} has no {strangers[0]}; it takes {', '.join(sorted(taken))}"
        )
    collectives.check_values(name, options)
