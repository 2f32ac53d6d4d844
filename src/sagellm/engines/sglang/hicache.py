"""`SageHiCache`: our disk tier, or the shared store, behind SGLang's HiCache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "sagellm", "module_path": "sagellm.engines.sglang.hicache", "class_name": "SageHiCache",
      "interface_v1": 1, "dir": "/var/cache/sagellm-sglang", "disk_gb": 100}'

One thread of SGLang asks what is there, one reads and one writes. With `interface_v1` pages are copied
between the host pool and the storage directly; without it, through tensors that SGLang makes.

SGLang names a page by a chained hash. It gives the hashes in front of a page only with
`hicache_storage_pass_prefix_keys`, not in every call, and of some pools it keeps only the last pages of a
prefix. So pages are kept by key (`KeyedBlocks`) and not as paths. Where the hashes in front are given, they
count as used, too: the request has those pages in nearer memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__ as sglang_version

from sagellm.core.clock import MonotonicClock
from sagellm.core.errors import ConfigError, KVDataError, SageError
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.kv_tiers import BlockFormat
from sagellm.engines.build_kv import make_policy
from sagellm.engines.guests.keyed_blocks import KeyedBlocks, KeyedRemote, KeyedTier
from sagellm.engines.sglang.hicache_format import (
    OF_DRAFT,
    HiCacheSettings,
    format_of_pages,
    identity_of_draft,
    identity_of_model,
)
from sagellm.kvmgr.kv_pool.tiers.codecs import CODECS
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.disk_folder import OwnedFolder
from sagellm.kvmgr.kv_pool.tiers.disk_slab import slot_bytes
from sagellm.kvmgr.kv_pool.tiers.remote import RemoteOptions, RemoteStore

logger = logging.getLogger("sagellm.sglang")
DIGEST_BYTES = 32


class SageHiCache(HiCacheStorage):  # type: ignore[misc]
    """SGLang's storage of one rank. Owns its folder from the constructor until `close`.

    The constructor and the registration of a pool raise `ConfigError`. Each host pool (KV, recurrent states,
    a draft model's KV, ...) has a `KeyedBlocks` of its own, with equally many slots. They are opened at the
    first call, since SGLang registers pools until then. Later trouble raises nothing: pages are not found or
    not stored, and the log says so once.
    """

    weights_changed: ClassVar[bool] = False
    """Whether this process has replaced its model's weights: pages from then on are of no known model."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self.config = storage_config
        self.settings = HiCacheSettings.of(storage_config.extra_config or {})
        self.registered_pools: dict[str, Any] = {}
        self._formats: dict[str, BlockFormat] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._stores: dict[str, KeyedBlocks] | None = None
        self._opening, self._counting = Lock(), Lock()
        self._folder: OwnedFolder | None = None
        self._fault = ""
        self._metrics = StorageMetrics()
        self._refuse_what_cannot_work()
        _watch_weights()
        try:
            args = get_server_args()
        except (RuntimeError, ValueError):  # no server: a test or a tool
            args = None
        self._model = identity_of_model(self.settings.weights_id, args)
        self._draft = identity_of_draft(self.settings.weights_id, args)
        if self.settings.remote_url:  # a wrong URL or a missing package: now, and not at the first call
            RemoteStore(RemoteOptions(self.settings.remote_url), BlockFormat(bytes(16), 1)).close()
        else:
            self._folder = OwnedFolder(Path(self.settings.dir).expanduser() / self._rank)

    # -- what SGLang calls at the start

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool of the KV."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """One more host pool. Raises `ConfigError` where its pages cannot be stored."""
        if self.registered_pools.get(host_pool_name) is host_pool:
            return
        model = self._model + self._draft if host_pool_name in OF_DRAFT else self._model
        page_format = format_of_pages(host_pool_name, host_pool, self.config, model)
        with self._opening:
            if self._stores is not None:
                logger.warning("sageLLM: pages of %s are not stored: the pool came late", host_pool_name)
                return
            self.registered_pools[host_pool_name] = host_pool
            self._formats[host_pool_name] = page_format
            self._dtypes[host_pool_name] = host_pool.get_data_page(0, flat=False).dtype
            if self.settings.dir:
                self._num_slots()

    # -- KV pages

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are there."""
        store = self._store(PoolName.KV)
        if store is None:
            return 0
        self._use(store, extra_info)
        return _leading(store.contains(list(map(_key, keys))))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Fill pages of the host pool. The bytes of one that was not read are as they were."""
        return self._load(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool; says which are there now."""
        return self._save(PoolName.KV, keys, host_indices)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill tensors, one for each page, or new ones.

        None stands for a page that was not read.
        """
        targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        for target in targets:
            self._check_page(target)

        def deliver(place: int, memory: memoryview) -> None:
            _bytes_of(targets[place]).copy_(torch.frombuffer(memory, dtype=torch.uint8))

        found = self._get(PoolName.KV, keys, deliver)
        return [target if is_found else None for target, is_found in zip(targets, found, strict=True)]

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store tensors, one for each page; False if one is not there afterwards."""
        pages = list(values or ())
        for page in pages:
            self._check_page(page)

        def fill(place: int, memory: memoryview) -> None:
            torch.frombuffer(memory, dtype=torch.uint8).copy_(_bytes_of(pages[place]))

        return len(pages) == len(keys) and all(self._put(PoolName.KV, keys, fill))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    # -- pages of several pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that every pool can restore, and all such lengths."""
        num_pages = self.batch_exists(keys, extra_info)
        hits: dict[str, int] = {PoolName.KV: num_pages} if num_pages else {}
        restorable = list(range(1, num_pages + 1))
        for transfer in pool_transfers or ():
            store = self._store(transfer.name)
            there = store.contains(list(map(_key, keys[:num_pages]))) if store else [False] * num_pages
            lengths = _restorable(transfer, there)
            if lengths:
                hits[transfer.name] = lengths[-1]
            kept = set(lengths)
            restorable = [length for length in restorable if length in kept]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._load(each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._save(each.name, each.keys or [], each.host_indices) for each in transfers}

    # -- the rest of the interface

    def clear(self) -> None:
        """Evict all pages of a disk. Raises `ConfigError` for a shared store."""
        for name in self.registered_pools:
            if store := self._store(name):
                store.clear()

    def get_stats(self) -> StorageMetrics:
        """Pages and GB/s of each call since the last `get_stats`, for SGLang's metrics."""
        with self._counting:
            found, self._metrics = self._metrics, StorageMetrics()
        return found

    def misses(self) -> dict[str, dict[str, int]]:
        """Pages that were there and did not verify, by pool and cause."""
        return {str(name): dict(store.misses()) for name, store in (self._stores or {}).items()}

    def close(self) -> None:
        """Let go of the folder, so that another process may open it. A second call changes nothing."""
        with self._opening:
            stores, self._stores = self._stores or {}, {}
        for name, store in stores.items():
            if misses := store.misses():
                logger.warning("sageLLM: pages of %s that did not verify: %s", name, dict(misses))
            store.close()
        if self._folder is not None:
            self._folder.close()

    # -- inside

    @property
    def _rank(self) -> str:
        config = self.config
        return f"dp{config.dp_rank}-pp{config.pp_rank}-cp{config.attn_cp_rank}-tp{config.tp_rank}"

    def _refuse_what_cannot_work(self) -> None:
        if self.weights_changed:
            raise ConfigError(
                "the weights of this process were replaced while it ran, so its KV is of no known model: "
                "restart SGLang with the new weights"
            )
        if self.settings.dir and self.config.is_mla_model and self.config.tp_size > 1:
            raise ConfigError(
                f"of an MLA model only one of its {self.config.tp_size} ranks writes to a storage, and a "
                'folder belongs to one process: give "remote_url" in place of "dir"'
            )

    def _num_slots(self) -> int:
        """Of each pool, so that all pools together take `disk_gb`."""
        num_bytes = sum(slot_bytes(each.bytes_per_block) for each in self._formats.values())
        num_slots = int(self.settings.disk_gb * 2**30) // num_bytes
        if num_slots < 2:
            raise ConfigError(
                f"{self.settings.disk_gb:g} GiB hold no two pages of {num_bytes:,} bytes (of all pools): "
                'raise "disk_gb"'
            )
        return num_slots

    def _store(self, name: str) -> KeyedBlocks | None:
        """The pages of a pool; None where they are not stored."""
        if self.weights_changed:
            if not self._fault:
                self._fault = "weights changed"
                logger.warning("sageLLM: the HiCache storage is off: the model's weights were replaced")
            return None
        if self._stores is None:
            with self._opening:
                if self._stores is None:
                    self._stores = self._opened()
        return self._stores.get(name)

    def _opened(self) -> dict[str, KeyedBlocks]:
        """A store for each pool, or none at all."""
        stores: dict[str, KeyedBlocks] = {}
        try:
            for name in self._formats:
                stores[name] = self._disk(name) if self._folder else self._remote(name)
        except SageError as error:
            logger.warning("sageLLM: the HiCache storage is off: %s", error)
            for store in stores.values():
                store.close()
            return {}
        return stores

    def _disk(self, name: str) -> KeyedTier:
        assert self._folder is not None
        page_format, clock, settings = self._formats[name], MonotonicClock(), self.settings
        folder = self._folder.path / str(name)
        storage = DiskStorage(folder, self._num_slots(), page_format, codec=self._codec(name))

        def policy() -> EvictionPolicy:
            return make_policy(settings.policy, capacity=storage.num_slots, clock=clock, **settings.options)

        made = KeyedTier(storage, page_format.bytes_per_block, policy, clock)
        logger.info(
            "sageLLM: HiCache storage %s: %d of %d pages from before", folder, made.num_recovered,
            storage.num_slots,
        )  # fmt: skip
        return made

    def _remote(self, name: str) -> KeyedRemote:
        page_format, settings = self._formats[name], self.settings
        options = RemoteOptions(settings.remote_url, max_put_bytes=int(settings.remote_gb * 2**30))
        store = RemoteStore(options, page_format, self._codec(name))
        return KeyedRemote(store, page_format.bytes_per_block)

    def _codec(self, name: str) -> Any:
        if self.settings.codec == "raw":
            return None
        dtype = str(self.registered_pools[name].dtype).removeprefix("torch.")
        return CODECS.create(self.settings.codec, dtype=dtype)

    def _use(self, store: KeyedBlocks, extra_info: HiCacheStorageExtraInfo | None) -> None:
        if extra_info is not None and extra_info.prefix_keys:
            store.use(list(map(_key, extra_info.prefix_keys)))

    def _load(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool = self.registered_pools.get(name)
        first = _first_tokens(pool, keys, host_indices)
        if pool is None or first is None:
            return [False] * len(keys)

        def deliver(place: int, memory: memoryview) -> None:
            pool.set_from_flat_data_page(first[place], torch.frombuffer(memory, dtype=self._dtypes[name]))

        return self._get(name, keys, deliver)

    def _save(self, name: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        pool = self.registered_pools.get(name)
        first = _first_tokens(pool, keys, host_indices)
        if pool is None or first is None:
            return [False] * len(keys)

        def fill(place: int, memory: memoryview) -> None:
            page = pool.get_data_page(first[place], flat=False)
            torch.frombuffer(memory, dtype=torch.uint8).view(page.dtype).view(page.shape).copy_(page)

        return self._put(name, keys, fill)

    def _get(self, name: str, keys: Sequence[str], deliver: Callable[[int, memoryview], None]) -> list[bool]:
        store, began_s = self._store(name), time.perf_counter()
        found = store.get(list(map(_key, keys)), deliver) if store else [False] * len(keys)
        self._count(self._metrics.prefetch_pgs, self._metrics.prefetch_bandwidth, name, sum(found), began_s)
        return found

    def _put(self, name: str, keys: Sequence[str], fill: Callable[[int, memoryview], None]) -> list[bool]:
        store, began_s = self._store(name), time.perf_counter()
        stored = store.put(list(map(_key, keys)), fill) if store else [False] * len(keys)
        self._count(self._metrics.backup_pgs, self._metrics.backup_bandwidth, name, sum(stored), began_s)
        return stored

    def _count(
        self, pages: list[int], bandwidth: list[float], name: str, num_pages: int, began_s: float
    ) -> None:
        if num_pages and self.config.enable_storage_metrics:
            num_bytes = num_pages * self._formats[name].bytes_per_block
            with self._counting:
                pages.append(num_pages)
                bandwidth.append(num_bytes / 1e9 / max(1e-9, time.perf_counter() - began_s))

    def _check_page(self, page: Any) -> None:
        """Raise `KVDataError` for a tensor that is no page of KV."""
        expected = self._formats[PoolName.KV].bytes_per_block
        if not isinstance(page, torch.Tensor) or not page.is_contiguous() or page.nbytes != expected:
            raise KVDataError(f"a page is a contiguous tensor of {expected} bytes, got {_described(page)}")


def _described(page: Any) -> str:
    return f"{page.nbytes} bytes" if isinstance(page, torch.Tensor) else type(page).__name__


def _key(key: str) -> bytes:
    """SGLang's page hashes are SHA-256 in hexadecimal digits; any other text is hashed."""
    try:
        found = bytes.fromhex(key)
    except ValueError:
        found = b""
    return found if len(found) == DIGEST_BYTES else blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


def _leading(there: Iterable[bool]) -> int:
    count = 0
    for is_there in there:
        if not is_there:
            break
        count += 1
    return count


def _restorable(transfer: PoolTransfer, there: Sequence[bool]) -> list[int]:
    """Lengths of prefixes, in pages and ascending, that a pool can restore."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return list(range(1, _leading(there) + 1))
    if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
        raise ValueError(f"sageLLM's HiCache storage does not know the hit policy {transfer.hit_policy}")
    num_needed, run, lengths = max(1, len(transfer.keys or ())), 0, []
    for length, is_there in enumerate(there, start=1):
        run = run + 1 if is_there else 0
        if run >= min(num_needed, length):
            lengths.append(length)
    return lengths


def _first_tokens(pool: Any, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int] | None:
    """The first token slot of each page in a host pool.

    None where there is no pool, or the number of indices is wrong.
    """
    if pool is None:
        return None
    size = pool.page_size
    if host_indices is None or host_indices.numel() != len(keys) * size:
        num_given = 0 if host_indices is None else host_indices.numel()
        logger.error("sageLLM: %d indices for %d pages of %d tokens", num_given, len(keys), size)
        return None
    return [int(index) for index in host_indices[::size].tolist()]


def _bytes_of(page: torch.Tensor) -> torch.Tensor:
    return page.view(-1).view(torch.uint8)


def _watch_weights() -> None:
    """Have SGLang set `SageHiCache.weights_changed` before it replaces the weights of this process.

    Each of its four ways to do so enters `_observe_weight_load`. Raises `ConfigError` where that is missing.
    """
    original = getattr(SchedulerWeightUpdaterManager, "_observe_weight_load", None)
    if original is None:
        raise ConfigError(
            f"sageLLM's HiCache storage cannot see when SGLang {sglang_version} replaces weights: use 0.5.23"
        )
    if getattr(original, "is_watched", False):
        return

    def watched(updater: Any, source: str) -> Any:
        SageHiCache.weights_changed = True
        return original(updater, source)

    watched.is_watched = True  # type: ignore[attr-defined]
    SchedulerWeightUpdaterManager._observe_weight_load = watched
