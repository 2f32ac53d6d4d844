"""From a configuration to the KV manager: index, policy, pool, shares, tiers, token copies.

It also says which settings a model's KV does not allow. Part of `build.py`, where the modules are joined; it
holds no logic.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import ConfigError, UnsupportedModelError
from sagellm.core.events import EventBus, TierEvents
from sagellm.core.features import DROPPED_BLOCKS
from sagellm.core.protocols.engine import EngineCore, InferenceBackend, TokenCopies
from sagellm.core.protocols.eviction import CostBenefitModel, EvictionPolicy
from sagellm.core.protocols.kv_pool import KVPool
from sagellm.core.protocols.kv_tiers import BlockBytes, BlockFormat, BlockStorage, KVTiers
from sagellm.core.protocols.kv_transfer import BlockLayout
from sagellm.core.protocols.prefix_cache import PrefixReuseIndex
from sagellm.core.registry import registry
from sagellm.core.types import TOKEN_BYTES, CapabilityDescriptor, KVGroup, Namespace, Tokens
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.eviction.checkpoints.retention import CheckpointRetention
from sagellm.kvmgr.kv_pool.free_list import FreeListPool
from sagellm.kvmgr.kv_pool.quota import QuotaManager
from sagellm.kvmgr.kv_pool.tiers.admission import AdmissionFilter
from sagellm.kvmgr.kv_pool.tiers.arrivals import PrefixArrivals
from sagellm.kvmgr.kv_pool.tiers.disk_folder import check_kv_folder, kv_folder
from sagellm.kvmgr.kv_pool.tiers.disk_slab import slot_bytes
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator, Migrator
from sagellm.kvmgr.kv_pool.tiers.remote import RemoteOptions, RemoteStore
from sagellm.kvmgr.kv_pool.tiers.remote_storage import RemoteStorage
from sagellm.kvmgr.kv_pool.tiers.remote_tier import RemoteTier
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier
from sagellm.kvmgr.manager import CheckpointConfig, KVCacheManager
from sagellm.kvmgr.prefix_cache.attribution import MissAttribution
from sagellm.kvmgr.prefix_cache.fingerprint import block_hash, chain
from sagellm.kvmgr.prefix_cache.metrics import PrefixReuseMetrics

log = logging.getLogger("sagellm.engine")
MAX_REMOTE_BLOCKS = 1 << 18
"""Blocks of a shared store that an instance remembers, so that it does not put them again."""
DEFAULT_REUSE_PREDICTOR = "reuse_table"
TierSource: TypeAlias = Callable[[PrefixReuseIndex, KVPool], KVTiers]
"""Makes the tiers below a device, around its prefix index and its pool."""


def kv_config_of(config: KVConfig, capability: CapabilityDescriptor) -> KVConfig:
    """The configuration for this model. One line says what of a model with recurrent states is reused."""
    schema = capability.kv_schema
    if schema is None or not schema.state_bytes or not config.prefix_caching:
        return config
    if config.tenant_shares or config.class_shares:
        log.warning("no prefix is reused: recurrent states do not go with shares of the pool")
        return config.model_copy(update={"prefix_caching": False})
    fewest = schema.state_pages + 2 * schema.num_groups  # a block that is reused and one that is computed
    if capability.num_blocks < fewest:
        log.warning(
            "no prefix is reused: a checkpoint of recurrent state takes %d blocks, there are %d; "
            "kv.num_blocks of %d or more would do",
            schema.state_pages,
            capability.num_blocks,
            fewest,
        )
        return config.model_copy(update={"prefix_caching": False})
    log.info(
        "a prefix is reused from %d tokens on, where there is a checkpoint of its recurrent state, in "
        "prompts of up to %d tokens; a checkpoint takes %d of %d blocks",
        schema.block_size,
        (capability.num_blocks - schema.state_pages) // schema.num_groups * schema.block_size,
        schema.state_pages,
        capability.num_blocks,
    )
    return config


def build_kv(
    config: KVConfig,
    num_blocks: int,
    *,
    window: int | None = None,
    groups: Sequence[KVGroup] = (),
    state_pages: int = 0,
    max_chunk: int = 1,
    tiers: TierSource | None = None,
    prefill_token_s: float = 0.0,
    cost_model: CostBenefitModel | None = None,
    clock: Clock | None = None,
    events: EventBus | None = None,
) -> KVCacheManager:
    """Pool, quota, eviction policy and prefix index, joined by a manager.

    `cost_model` is for policies that weigh the cost of computing KV again; `state_pages` are the blocks of a
    checkpoint, for a model with recurrent states; `tiers` makes the memory below the device, around the index
    and the pool. `KVCacheManager` describes the other arguments.
    """
    clock, events = clock or MonotonicClock(), events or EventBus()
    cost_model = cost_model or PrefillCostModel(config.block_size)
    _check_given(config.eviction_options)
    quota, capacity = _quota(config, num_blocks), num_blocks // max(1, len(groups))
    takes_arrivals = config.prefix_caching and window is None and not groups and not state_pages
    sizes = {"total_blocks": num_blocks, "block_size": config.block_size}
    pool = registry("pool").create(config.pool, **sizes, clock=clock, quota=quota)
    index = _index(config, capacity, clock, cost_model, events)
    return KVCacheManager(
        index,
        pool,
        prefix_caching=config.prefix_caching,
        index_as_computed=config.index_as_computed,
        quota=quota,
        window=window,
        groups=groups,
        max_chunk=max_chunk,
        checkpoints=_checkpoints(config, state_pages),
        sharing_groups=config.group_of,
        max_pinned_share=config.max_pinned_share,
        tiers=None if tiers is None else tiers(index, pool),
        free_watermark=config.free_watermark if config.write_policy == "write_back" else None,
        arrivals=PrefixArrivals(index, pool) if takes_arrivals else None,
        prefill_token_s=prefill_token_s,
        metrics=PrefixReuseMetrics(
            {*config.tenant_shares, *itertools.chain(*config.sharing_groups.values())}
        ),
        misses=MissAttribution(events, clock) if config.miss_attribution else None,
        clock=clock,
    )


def _quota(config: KVConfig, num_blocks: int) -> QuotaManager | None:
    """The configured shares of a pool or a tier of so many blocks."""
    if not (config.tenant_shares or config.class_shares):
        return None
    tenants, classes = (
        {name: (share.guaranteed, share.ceiling) for name, share in shares.items()}
        for shares in (config.tenant_shares, config.class_shares)
    )
    return QuotaManager.from_fractions(num_blocks, tenants, classes)


def _index(
    config: KVConfig,
    capacity: int,
    clock: Clock,
    cost_model: CostBenefitModel,
    events: EventBus | None = None,
) -> PrefixReuseIndex:
    """An empty prefix index for so many blocks, with the configured eviction policy."""
    made: PrefixReuseIndex = registry("index").create(
        config.index,
        block_size=config.block_size,
        policy_factory=lambda: make_policy(
            config.eviction, capacity=capacity, clock=clock, model=cost_model, **config.eviction_options
        ),
        events=events or EventBus(),
        clock=clock,
    )
    return made


def build_tiers(
    config: KVConfig,
    backend: InferenceBackend,
    clock: Clock | None = None,
    events: EventBus | None = None,
) -> TierSource | None:
    """What makes the configured tiers below the device; None where none is configured.

    Their block events go to `events`. Raises `ConfigError` for a model or backend whose KV cannot be held
    there, and for a folder that cannot be used.
    """
    if not config.has_tiers:
        return None
    capability = backend.capability()
    schema, clock = capability.kv_schema, clock or MonotonicClock()
    source, simulated = getattr(backend, "kv_bytes", None), getattr(backend, "simulated_tiers", None)
    if schema is None or not (source or simulated):
        raise _no_tiers("this backend does not give its KV blocks as bytes")
    is_windowed = bool(schema.groups) or capability.sliding_window is not None
    check_tiers(config, is_windowed=is_windowed, has_states=schema.state_bytes > 0)
    costs, hashes = prefill_costs(capability), partial(hashes_of, config.block_size)
    storages: Mapping[Tier, BlockStorage]
    migrator: Migrator
    if source is None:
        assert simulated is not None
        block_bytes = schema.bytes_per_block
        storages, migrator = simulated(_simulated_slots(config, block_bytes), hashes)
    else:
        data: BlockBytes = source()
        block_bytes = data.bytes_per_block
        storages = _storages(config, BlockFormat.of(schema, block_bytes), backend, clock)
        most, filters = config.max_save_gb_per_s, {}
        if Tier.NVME in storages and config.disk_min_uses > 1:
            filters[Tier.NVME] = AdmissionFilter(storages[Tier.NVME].num_slots, config.disk_min_uses)
        migrator = KVMigrator(
            data, storages, hashes, block_size=config.block_size,
            max_bytes_per_s=most and most * 1e9, filters=filters,
        )  # fmt: skip

    def made(index: PrefixReuseIndex, pool: KVPool) -> KVTiers:
        tiers: list[KVTier] = []
        for name, storage in storages.items():
            own = None if events is None else TierEvents(events, name)
            quota = _quota(config, storage.num_slots)
            books = (
                _index(config, storage.num_slots, clock, costs, own),
                FreeListPool(storage.num_slots, config.block_size, quota=quota),
            )
            if isinstance(storage, RemoteStorage):
                assert isinstance(migrator, KVMigrator)
                tiers.append(RemoteTier(*books, storage, hashes, clock, migrator.wake, quota))
            else:
                tiers.append(KVTier(name, *books, storage, quota))
            if num_blocks := tiers[-1].recover(block_hash):
                log.info("the tier %s has %d blocks from before", name, num_blocks)
        arrivals, hot = PrefixArrivals(index, pool), config.load_hot
        return HierarchyManager(index, arrivals, tiers, migrator, costs, block_bytes, load_hot=hot)

    return made


def _storages(
    config: KVConfig, block_format: BlockFormat, backend: InferenceBackend, clock: Clock
) -> dict[Tier, BlockStorage]:
    """The configured ones, the nearest first."""
    check_kv_folder(config)
    made: dict[Tier, BlockStorage] = {}
    block_bytes, codec = block_format.bytes_per_block, None
    if config.codec != "raw" and (config.disk_gb or config.remote_url):
        from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS

        dtype = backend.get_kv_schema().dtype
        codec = CODECS.create(config.codec, dtype=dtype, layout=block_layout(backend))
    if config.host_gb:
        made[Tier.DRAM] = HostStorage(_slots(config.host_gb, block_bytes, "host_gb"), block_format)
    if config.disk_gb:
        from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage

        folder = kv_folder(config)
        assert folder is not None
        num_slots = _slots(config.disk_gb, slot_bytes(block_bytes), "disk_gb")
        made[Tier.NVME] = DiskStorage(folder, num_slots, block_format, codec=codec)
    if options := remote_options(config):
        num_slots = min(_slots(config.remote_gb, block_bytes, "remote_gb"), MAX_REMOTE_BLOCKS)
        store = RemoteStore(options, block_format, codec, clock=clock)
        made[Tier.REMOTE] = RemoteStorage(store, num_slots)
    return made


def _simulated_slots(config: KVConfig, block_bytes: int) -> dict[Tier, int]:
    """Slots of each configured tier, the nearest first. Raises `ConfigError` for what is not simulated."""
    if config.remote_url or config.codec != "raw" or config.disk_min_uses > 1 or config.max_save_gb_per_s:
        keys = "kv.remote_url, kv.codec, kv.disk_min_uses and kv.max_save_gb_per_s"
        raise ConfigError(f"{keys} are not simulated: leave them out")
    sizes = (
        (Tier.DRAM, config.host_gb, "host_gb"),
        (Tier.NVME, config.disk_gb, "disk_gb"),
    )
    return {tier: _slots(size, block_bytes, key) for tier, size, key in sizes if size}


def remote_options(config: KVConfig) -> RemoteOptions | None:
    """Of the configured shared store; None without one.

    Raises `ConfigError` for a wrong URL, and `MissingExtraError` without the package `redis`.
    """
    if config.remote_url is None:
        return None
    num_bytes = int(config.remote_gb * 2**30)
    return RemoteOptions(config.remote_url, config.remote_ttl_s, max_failures=1, max_put_bytes=num_bytes)


def block_layout(
    backend: InferenceBackend, *, first_head: int = 0, total_heads: int = 0
) -> BlockLayout | None:
    """Where numbers lie in a block; None where that cannot be named.

    A rank of tensor parallelism has the KV heads from `first_head` on, of `total_heads`.
    """
    axes, schema = getattr(backend, "block_axes", str)(), backend.get_kv_schema()
    if not axes:
        return None
    return BlockLayout(
        axes, schema.num_layers, total_heads or schema.num_kv_heads, schema.head_dim, schema.block_size,
        schema.dtype, first_head, schema.num_kv_heads,
    )  # fmt: skip


def hashes_of(block_size: int, path: bytes, namespace: Namespace) -> list[bytes]:
    """The chained hash of each whole block of a path."""
    return chain(path, block_size * TOKEN_BYTES, namespace)


def _slots(gigabytes: float, bytes_per_block: int, key: str) -> int:
    """Blocks that fit."""
    num_slots = int(gigabytes * 2**30) // bytes_per_block
    if not num_slots:
        raise ConfigError(f"kv.{key}: {gigabytes:g} GiB hold no block of {bytes_per_block:,} bytes")
    return num_slots


def check_tiers(config: KVConfig, *, is_windowed: bool, has_states: bool) -> None:
    """Raise `ConfigError` where the tiers cannot be used with such a model.

    Also for a wrong URL of the shared store.
    """
    if not config.has_tiers:
        return
    if not config.prefix_caching:
        raise _no_tiers("without kv.prefix_caching there is nothing to keep")
    if is_windowed:
        raise _no_tiers(
            "layers of this model have sliding windows, whose blocks are not kept below the device"
        )
    if has_states:
        raise _no_tiers("recurrent states of this model are not kept below the device")
    remote_options(config)


def _no_tiers(reason: str) -> ConfigError:
    return ConfigError(f"kv.host_gb, kv.disk_gb and kv.remote_url: {reason}; leave them out")


def _checkpoints(config: KVConfig, state_pages: int) -> CheckpointConfig | None:
    if not state_pages or not config.prefix_caching:
        return None
    interval = max(1, config.checkpoint_interval // config.block_size)

    def keys_of(tokens: Tokens, num_blocks: int, namespace: Namespace) -> list[int]:
        size = config.block_size * TOKEN_BYTES
        data = bytes(tokens.slice(0, num_blocks * config.block_size))
        return [int.from_bytes(digest[:8], "little") for digest in chain(data, size, namespace)]

    return CheckpointConfig(state_pages, interval, CheckpointRetention, keys_of)


def make_policy(
    name: str,
    /,
    *,
    capacity: int,
    clock: Clock,
    seed: int = 0,
    model: CostBenefitModel | None = None,
    **options: Any,
) -> EvictionPolicy:
    """An eviction policy by name.

    Its constructor gets what it asks for by parameter name: `capacity` (blocks of the pool), `clock`, `seed`,
    `model` (what computing KV again costs), `predictor` (of reuse: an object, or the name or mapping that the
    options give).
    """
    policies = registry("policy")
    asked = policies.options(name)
    offered = {"capacity": capacity, "clock": clock, "seed": seed, "model": model}
    if "predictor" in asked:
        wanted = options.pop("predictor", DEFAULT_REUSE_PREDICTOR)
        if not hasattr(wanted, "predict"):
            wanted = registry("reuse_predictor").create_from(wanted)
        offered["predictor"] = wanted
    given = {key: value for key, value in offered.items() if key in asked} | options
    try:
        made: EvictionPolicy = policies.create(name, **given)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ConfigError(f"eviction policy {name!r} with {options}: {error}") from error
    policies.check_values(name, options)
    return made


def _check_given(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options of a policy that the engine itself gives."""
    given = sorted({"capacity", "clock", "seed", "model"} & options.keys())
    if given:
        raise ConfigError(f"kv.eviction_options: {', '.join(given)} is given by the engine: leave it out")


def replace_policy(engine: EngineCore, name: str, /, **options: Any) -> None:
    """Replace the eviction policy of a live engine, by name; cached blocks stay.

    Raises `UnknownNameError` or `ConfigError` before anything changes.
    """
    capability, clock = engine.capability(), engine.clock
    capacity, model = capability.num_blocks, prefill_costs(capability)
    _check_given(options)
    make_policy(name, capacity=capacity, clock=clock, model=model, **options)
    engine.set_policy(lambda: make_policy(name, capacity=capacity, clock=clock, model=model, **options))


def prefill_costs(capability: CapabilityDescriptor) -> PrefillCostModel:
    """The cost of computing KV again with a backend.

    Measured, or of the magnitude of `PrefillCostModel`'s defaults where the backend does not measure it.
    """
    known: dict[str, Any] = {"block_size": capability.block_size}
    if capability.kv_schema is not None:
        known["bytes_per_block"] = capability.kv_schema.bytes_per_block
    if capability.prefill_token_s:
        known["seconds_per_token"] = capability.prefill_token_s
        known["seconds_per_token_squared"] = capability.prefill_token_squared_s
    return PrefillCostModel(**known)


def build_token_copies(config: KVConfig, backend: InferenceBackend) -> TokenCopies | None:
    """What copies KV to other positions; None without `kv.approximate_reuse`.

    Raises `ConfigError` for a backend or model whose KV cannot be moved.
    """
    if not config.approximate_reuse:
        return None
    source: Callable[[], TokenCopies] | None = getattr(backend, "token_copier", None)
    needs = "kv.approximate_reuse needs a model whose layers all have plain attention with RoPE"
    try:
        if source is None or not config.prefix_caching:
            raise UnsupportedModelError(
                "this backend moves no KV" if source is None else "kv.prefix_caching is off"
            )
        return source()
    except UnsupportedModelError as error:
        raise ConfigError(f"{needs}, and kv.prefix_caching. {error}: leave it out") from error


def check_dropped_blocks(config: KVConfig, capability: CapabilityDescriptor) -> None:
    """Raise `ConfigError` for `kv.compress_reasoning` where no blocks can be dropped."""
    if config.compress_reasoning and DROPPED_BLOCKS not in capability.features:
        raise ConfigError(
            "kv.compress_reasoning needs the native backend, a model whose layers all have plain attention "
            "with RoPE, and no draft head that is a layer (medusa is none): leave it out"
        )
