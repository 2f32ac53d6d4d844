"""`StoreWorker`: the bytes of the store in one worker of vLLM."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from vllm.model_executor.model_loader import utils as loader

from sagellm.core.blocks import Tier
from sagellm.core.errors import ConfigError, KVDataError, ModelError
from sagellm.core.protocols.kv_tiers import BlockFormat, BlockStorage
from sagellm.core.types import TOKEN_BYTES, Namespace
from sagellm.engines.guests.settings import StoreSettings
from sagellm.engines.vllm.store_format import DeviceBytes, block_format, refusal, rows_of
from sagellm.engines.vllm.store_messages import Move, MoveResult, OpenedStore, StoreMetadata, StoreReport
from sagellm.kvmgr.kv_pool.tiers.disk import DiskStorage
from sagellm.kvmgr.kv_pool.tiers.disk_slab import slot_bytes
from sagellm.kvmgr.kv_pool.tiers.host import HostStorage
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator, MigrationReport
from sagellm.kvmgr.prefix_cache.fingerprint import chain

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.sagellm")  # below "vllm": vLLM sets that logger up
REPLACING = ("reload_weights", "start_weight_update", "update_weights")
"""Methods of vLLM's worker, some of which a version may lack. All load by the model's `load_weights`, unless
weights are in kernel format; trainers call that directly, too."""
REPLACED = "the model's weights were replaced, so no KV is stored or loaded until a restart"
WAIT_S = 0.005
"""A step in which the model does not run waits so long at most for a move to end."""
CLOSE_S = 10.0
"""At its end a worker waits so long at most for what is being saved."""


class StoreWorker:
    """Owns storages and the threads that move blocks, from `open` to `close`. For the worker's thread.

    `finished` and `failed` gather, until they are taken: requests whose loads have ended, and blocks of the
    device that were not filled. `opened`: those of this process, which are off from the moment on in which
    vLLM replaces its weights.
    """

    opened: ClassVar[WeakSet[StoreWorker]] = WeakSet()

    def __init__(self, settings: StoreSettings, config: VllmConfig, kv: KVCacheConfig) -> None:
        self._settings, self._config, self._kv = settings, config, kv
        self._opened: OpenedStore | None = None
        self._data: DeviceBytes | None = None
        self._migrator: KVMigrator | None = None
        self._storages: dict[Tier, BlockStorage] = {}
        self._moves: dict[int, Move] = {}
        self._refused: list[Move] = []
        self._is_off = False
        self._metadata = StoreMetadata()
        self.finished: set[str] = set()
        self.failed: set[int] = set()

    def open(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Open the storages. Raises `ConfigError` for a folder or a size that cannot be used."""
        parallel = self._config.parallel_config
        rank, num_ranks = parallel.rank % parallel.world_size, parallel.world_size
        reason = refusal(self._config, self._kv)
        if not reason:
            try:
                made = block_format(self._config, self._kv, kv_caches, rank)
            except (KVDataError, ModelError) as error:
                reason = str(error)
        if reason:
            self._opened = OpenedStore(refusal=reason)
            return
        name = f"vllm-{parallel.data_parallel_index}-{rank}-of-{num_ranks}"
        folder = Path(self._settings.dir).expanduser() / name
        self._open_storages(made, folder, num_ranks)
        self._data = data = DeviceBytes(list(rows_of(kv_caches, self._kv.num_blocks).values()))
        size = self._kv.kv_cache_groups[0].kv_cache_spec.block_size
        self._migrator = KVMigrator(data, self._storages, partial(_hashes_of, size), block_size=size)
        self._watch_weights()
        self._opened = OpenedStore(
            made.bytes_per_block,
            {name: storage.num_slots for name, storage in self._storages.items()},
            {name: list(storage.recover()) for name, storage in self._storages.items()},
        )

    def _open_storages(self, made: BlockFormat, folder: Path, num_ranks: int) -> None:
        settings = self._settings
        sizes = {"host_gb": settings.host_gb, "disk_gb": settings.disk_gb}
        slot_sizes = {"host_gb": made.bytes_per_block, "disk_gb": slot_bytes(made.bytes_per_block)}
        slots = {name: int(size * 2**30 / num_ranks) // slot_sizes[name] for name, size in sizes.items()}
        for name, size in sizes.items():
            if size and not slots[name]:
                raise ConfigError(
                    f"{name}: {size:g} GiB on {num_ranks} ranks hold no block of {slot_sizes[name]:,} bytes"
                )
        if settings.disk_gb:
            self._storages[Tier.NVME] = DiskStorage(folder, slots["disk_gb"], made)
        if settings.host_gb:
            self._storages = {Tier.DRAM: HostStorage(slots["host_gb"], made), **self._storages}

    def _watch_weights(self) -> None:
        """From now on, while the weights are those of the format."""
        module, _, name = self._config.parallel_config.worker_cls.rpartition(".")
        worker = getattr(sys.modules.get(module), name, None)
        for method in REPLACING:
            _watch(worker, method)
        _watch(loader.get_model_cls(self._config.model_config), "load_weights")
        StoreWorker.opened.add(self)

    def weights_replaced(self) -> None:
        """Off from now on. What the disk has stays there, for the weights that it is of."""
        if not self._is_off:
            logger.warning("sageLLM: %s", REPLACED)
        self._is_off = True

    # -- with each step

    def begin(self, metadata: StoreMetadata) -> None:
        """Before the model runs: loads begin.

        They wait for the steps before, which may still write their blocks: with asynchronous scheduling a
        step may run on for a request that has ended. The step to come leaves these blocks alone.
        """
        self._metadata = metadata
        for name, slots in metadata.forgotten.items():
            if slots:
                self._storages[name].forget(slots)
        for move in metadata.loads:
            self._migrate(move, move.plan.targets[0].block_ids)

    def end(self) -> None:
        """The model has run, or is in the device's queue: saves begin behind it."""
        for move in self._metadata.saves:
            self._migrate(move, move.plan.source_ids)
        if not self._metadata.has_forward and self._migrator is not None and not self._migrator.is_idle:
            self._migrator.wait(WAIT_S)

    def _migrate(self, move: Move, block_ids: Sequence[int]) -> None:
        if self._is_off:
            self._refused.append(move)
            return
        assert self._migrator is not None
        assert self._data is not None
        self._data.mark(block_ids)
        self._moves[self._migrator.migrate(move.plan)] = move

    def report(self) -> StoreReport:
        """What has happened since the last call. It also fills `finished` and `failed`."""
        made = StoreReport(self._metadata.step, self._opened)
        self._opened = None
        if self._migrator is None:
            return made
        for report in self._migrator.poll():
            self._ended(self._moves.pop(report.move_id), report, made)
        for move in self._refused:
            self._ended(move, MigrationReport(0, move.plan), made)
        self._refused.clear()
        made.faults = {name: storage.fault for name, storage in self._storages.items() if storage.fault}
        if self._is_off:
            made.faults |= dict.fromkeys(self._storages, REPLACED)
        return made

    def _ended(self, move: Move, report: MigrationReport, made: StoreReport) -> None:
        if move.request_id:
            if self._is_off:
                report = MigrationReport(0, move.plan)  # what it has loaded is of the weights before
            self.finished.add(move.request_id)
            self.failed.update(move.plan.targets[0].block_ids[report.num_written.get(Tier.HBM, 0) :])
        made.results[move.move_id] = MoveResult.of(move.move_id, report)

    def close(self) -> None:
        """Wait for what is being saved, and close the storages. Again: nothing happens."""
        StoreWorker.opened.discard(self)
        migrator, self._migrator = self._migrator, None
        if migrator is None:
            return
        give_up_s = time.monotonic() + CLOSE_S
        while not migrator.is_idle and migrator.wait(give_up_s - time.monotonic()):
            migrator.poll()
        migrator.close()
        for storage in self._storages.values():
            storage.close()


def _watch(owner: Any, method: str) -> None:
    """Have calls of a method turn off the stores of this process first. One that is missing is left out."""
    original = getattr(owner, method, None)
    if original is None or getattr(original, "is_watched", False):
        return

    @wraps(original)
    def watched(*arguments: Any, **named: Any) -> Any:
        for store in list(StoreWorker.opened):
            store.weights_replaced()
        return original(*arguments, **named)

    watched.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, method, watched)


def _hashes_of(block_size: int, path: bytes, namespace: Namespace) -> list[bytes]:
    return chain(path, block_size * TOKEN_BYTES, namespace)
