"""vLLM's real scheduler with both halves of the store, and a model whose KV is a hash of its tokens.

Each step checks all KV that attention would read.
"""

from __future__ import annotations

import json
import random
from collections import deque
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sagellm.core.blocks import Tier
from sagellm.engines.vllm import register
from sagellm.engines.vllm.store import SageStoreConnector
from sagellm.engines.vllm.store_books import StoreBooks
from sagellm.kvmgr.kv_pool.tiers.disk_slab import slot_bytes
from tests.peers.vllm_driver import MODEL

SIZE, HEADS, DIM, LAYERS = 4, 2, 4, ("layer.0", "layer.1")
BLOCK_GB = 1.5 * len(LAYERS) * 2 * HEADS * SIZE * DIM * 2 / 2**30
"""Room for one block and no second one, so `n * BLOCK_GB` has room for `n` blocks at least."""
SLOT_GB = 1.5 * slot_bytes(len(LAYERS) * 2 * HEADS * SIZE * DIM * 2) / 2**30
"""The same on a disk."""


def write_folder(folder: Path, seed: int = 0) -> str:
    """A folder with a config.json and one small random weight."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    save_file({"model.norm.weight": weight}, folder / "model.safetensors")
    return str(folder)


def store_config(**settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "SageStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


class World:
    """One engine, from its constructor until `close`."""

    def __init__(
        self,
        model: str,
        config: dict[str, Any] | None,
        *,
        num_blocks: int = 40,
        asynchronous: bool = False,
        ranks: int = 1,
        worker_cls: str = "auto",
    ) -> None:
        register()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(SIZE, sha256)
        cache = CacheConfig(block_size=SIZE, enable_prefix_caching=True)
        vllm_config = VllmConfig(
            model_config=ModelConfig(
                model=model, skip_tokenizer_init=True, max_model_len=4096, dtype="bfloat16", seed=0
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=64, max_model_len=4096, enable_chunked_prefill=True,
                is_encoder_decoder=False, async_scheduling=asynchronous,
            ),
            cache_config=cache,
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(tensor_parallel_size=ranks, worker_cls=worker_cls),
            kv_transfer_config=None if config is None else KVTransferConfig(**config),
        )  # fmt: skip
        cache.num_gpu_blocks = num_blocks + 1
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16)
        kv = KVCacheConfig(
            num_blocks=num_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
        )
        self.engine = Scheduler(
            vllm_config, kv, StructuredOutputManager(vllm_config), block_size=SIZE, hash_block_size=SIZE,
            log_stats=True,
        )  # fmt: skip
        shape = (num_blocks + 1, HEADS, SIZE, 2 * DIM)
        self.kv: list[dict[str, torch.Tensor]] = []
        self.workers: list[Any] = []
        for rank in range(ranks):
            self.kv.append({name: torch.full(shape, -1.0, dtype=torch.bfloat16) for name in LAYERS})
            if config is not None:
                of_rank = copy(vllm_config)
                of_rank.parallel_config = copy(vllm_config.parallel_config)
                of_rank.parallel_config.rank = rank
                self.workers.append(KVConnectorFactory.create_connector(of_rank, KVConnectorRole.WORKER, kv))
                self.workers[-1].register_kv_caches(self.kv[-1])
        self._aggregator = KVOutputAggregator(ranks)
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._depth = 1 + asynchronous
        self.num_requests = self.num_computed = 0
        self.answers: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.counted: list[dict[str, Any]] = []
        """What vLLM's scheduler sends to its server, step by step."""

    # -- one request after the other

    def add(self, prompt: list[int], num_output: int = 3, salt: str | None = None) -> str:
        self.num_requests += 1
        name = f"r{self.num_requests}"
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        request = Request(name, list(prompt), params, None, block_hasher=self.hasher, cache_salt=salt)
        self.requests[name] = request
        self.engine.add_request(request)
        return name

    def ask(self, prompt: list[int], num_output: int = 3, salt: str | None = None) -> list[int]:
        """The answer to one prompt that is alone."""
        name = self.add(prompt, num_output, salt)
        self.run()
        return list(self.requests[name].output_token_ids)

    def abort(self, name: str) -> None:
        self.engine.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(3000):
            if not self.engine.has_requests() and not self._in_flight:
                return
            self.step()
        raise AssertionError(f"still there after 3000 steps: {self.engine.requests}")

    # -- steps

    def step(self) -> None:
        plan = self.engine.schedule()
        self._in_flight.append((plan, self._execute(plan)))
        if (
            len(self._in_flight) >= self._depth
            or not self.engine.has_requests()
            or not plan.num_scheduled_tokens
        ):
            while self._in_flight:
                outputs = self.engine.update_from_output(*self._in_flight.popleft())
                stats = [found.scheduler_stats for found in outputs.values() if found.scheduler_stats]
                self.counted += [one.kv_connector_stats for one in stats if one.kv_connector_stats]
        if self.books is not None:
            self.books.check()

    def _execute(self, plan: Any) -> ModelRunnerOutput:
        counts = plan.num_scheduled_tokens
        for worker in self.workers:
            worker.handle_preemptions(plan.kv_connector_metadata)
            worker.bind_connector_metadata(plan.kv_connector_metadata)
        drawn = [self._compute(self.requests[name], count) for name, count in counts.items()]
        output = ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: index for index, name in enumerate(counts)},
            sampled_token_ids=drawn,
        )
        if self.workers:
            outputs = [copy(output) for _ in self.workers]
            for worker, own in zip(self.workers, outputs, strict=True):
                own.kv_connector_output = _transfers(worker, plan)
            return self._aggregator.aggregate(outputs)
        return output

    def _compute(self, request: Request, count: int) -> list[int]:
        """Read all KV in front, write that of the new tokens, draw a token behind the last one."""
        stop = request.num_computed_tokens
        tokens = self._known(request)[:stop]
        (blocks,) = self.engine.kv_cache_manager.get_block_ids(request.request_id)
        chained, start = 0, stop - count
        caches = [cache for of_rank in self.kv for cache in of_rank.values()]
        for position, token in enumerate(tokens):
            chained = hash((chained, token))
            for number, cache in enumerate(caches):
                row = cache[blocks[position // SIZE], :, position % SIZE].view(torch.int64)
                value = hash((chained, number))
                if position < start:
                    assert bool((row == value).all()), f"{request.request_id}: wrong KV at {position}"
                else:
                    row[:] = value
        self.num_computed += count
        if stop < len(self._known(request)):
            return []
        drawn = 10 + chained % 20_000
        self.answers.setdefault(request.request_id, []).append(drawn)
        return [drawn]

    def _known(self, request: Request) -> list[int]:
        """All tokens, also drawn ones that the scheduler has not seen."""
        return list(request.prompt_token_ids) + self.answers.get(request.request_id, [])

    # -- what is looked at

    @property
    def connector(self) -> SageStoreConnector | None:
        """The store's half in the scheduler, also inside a `MultiConnector`."""
        return _store_of(self.engine.connector)

    @property
    def books(self) -> StoreBooks | None:
        return None if self.connector is None else self.connector._books

    def storage(self, tier: Tier, rank: int = 0) -> Any:
        """Where a worker keeps the bytes of a tier."""
        found = _store_of(self.workers[rank])
        assert found is not None
        assert found._worker is not None
        return found._worker._storages[tier]

    def counts(self, tier: str) -> dict[str, Any]:
        assert self.books is not None
        (state,) = [one.state() for one in self.books.tiers if one.tier == tier]
        return state._asdict()

    def check_idle(self) -> None:
        """Nothing is held any more."""
        pool = self.engine.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        if self.books is not None:
            assert not self.books.is_saving
            assert not self.books._loads
            assert self.connector is not None
            assert not self.connector._prompts
            assert not self.connector._found
            assert not self.connector._unsaved

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.engine.shutdown()


def _transfers(worker: Any, plan: Any) -> KVConnectorOutput:
    """What a worker does around the forward pass, and reports."""
    worker.start_load_kv(None)
    worker.wait_for_save()
    found = worker.get_transfer_results(plan.finished_req_ids)
    output = KVConnectorOutput(
        finished_sending=found.finished_sending,
        finished_recving=found.finished_recving,
        failed_recving=found.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    worker.clear_connector_metadata()
    return output


def _store_of(connector: Any) -> SageStoreConnector | None:
    members = getattr(connector, "_connectors", [connector])
    return next((one for one in members if isinstance(one, SageStoreConnector)), None)


def conversations(seed: int, num_requests: int, num_sessions: int = 8, longest: int = 90) -> list[list[int]]:
    """Prompts of sessions that grow, in a random order."""
    rng = random.Random(seed)
    sessions = [[100 + i] * 12 for i in range(num_sessions)]
    prompts = []
    for _ in range(num_requests):
        prompt = sessions[rng.randrange(num_sessions)]
        prompt += [rng.randrange(1000, 30_000) for _ in range(rng.randrange(1, 12))]
        if len(prompt) > longest:
            del prompt[12:]
        prompts.append(list(prompt))
    return prompts
