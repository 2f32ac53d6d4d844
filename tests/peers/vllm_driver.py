"""Run inside vLLM's own environment: what its real scheduler decides, step by step.

    python vllm_driver.py WORKLOADS.json OUT.json

Reads a list of workloads (see `workloads.py`), runs each through a fresh `Scheduler`, without GPU and model,
and writes {"version": ..., "runs": [steps of the first workload, ...]}. Drawn tokens come from the
workload, so that another scheduler can be fed with the same.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32000,
    "max_position_embeddings": 200000, "torch_dtype": "bfloat16",
}  # fmt: skip
NULL_BLOCK = 1
"""vLLM keeps one block of the pool as a placeholder that no request gets."""


def scheduler(settings: dict[str, Any], model: str) -> Scheduler:
    size, length = settings["block_size"], settings["max_model_len"]
    num_blocks = settings["num_blocks"] + NULL_BLOCK
    cache = CacheConfig(block_size=size, enable_prefix_caching=settings["prefix_caching"])
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, max_model_len=length, dtype="bfloat16", seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_batched_tokens"],
            long_prefill_token_threshold=settings["long_prefill_tokens"],
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=size, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=size, hash_block_size=size)


def run(workload: dict[str, Any], model: str) -> list[dict[str, Any]]:
    """One record per step until every request has ended."""
    hash_block = get_hash_fn_by_name("sha256")
    init_none_hash(hash_block)
    hasher = get_request_block_hasher(workload["settings"]["block_size"], hash_block)
    engine = scheduler(workload["settings"], model)
    to_come: list[dict[str, Any]] = list(workload["requests"])
    ended: dict[str | None, int] = {None: 0}
    answers = {one["id"]: one["answer"] for one in to_come}
    seen: set[str] = set()
    steps: list[dict[str, Any]] = []
    while to_come or engine.has_unfinished_requests():
        here = [one for one in to_come if ended.get(one["after"], math.inf) + one["step"] <= len(steps)]
        to_come = [one for one in to_come if one not in here]
        for one in here:
            engine.add_request(request(one, hasher))
        steps.append(step(engine, answers, seen))
        ended |= dict.fromkeys(steps[-1]["finished"], len(steps))
        if len(steps) > workload["max_steps"]:
            raise RuntimeError(f"{workload['name']}: not done after {workload['max_steps']} steps")
    return steps


def request(one: dict[str, Any], hasher: Any) -> Request:
    params = SamplingParams(max_tokens=len(one["answer"]), ignore_eos=True)
    return Request(
        request_id=one["id"],
        prompt_token_ids=one["prompt"],
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
    )


def step(engine: Scheduler, answers: dict[str, list[int]], seen: set[str]) -> dict[str, Any]:
    waiting = [one.request_id for one in engine.waiting]
    plan = engine.schedule()
    counts = plan.num_scheduled_tokens
    scheduled = [(engine.requests[name], count) for name, count in counts.items()]
    joined = [new.req_id for new in plan.scheduled_new_reqs]
    joined += sorted(plan.scheduled_cached_reqs.resumed_req_ids)
    record = {
        "waiting": waiting,
        "scheduled": [[one.request_id, count, one.num_computed_tokens - count] for one, count in scheduled],
        "new": [name for name in counts if name in joined and name not in seen],
        "resumed": [name for name in counts if name in joined and name in seen],
        "preempted": sorted(plan.preempted_req_ids or ()),
        "free_blocks": engine.kv_cache_manager.block_pool.get_num_free_blocks(),
    }
    seen.update(joined)
    names = list(counts)
    drawn = [draw(engine.requests[name], answers[name]) for name in names]
    positions = {name: index for index, name in enumerate(names)}
    engine.update_from_output(
        plan, ModelRunnerOutput(req_ids=names, req_id_to_index=positions, sampled_token_ids=drawn)
    )
    record["finished"] = sorted(name for name in names if name not in engine.requests)
    return record


def draw(one: Request, answer: list[int]) -> list[int]:
    """The next token of the answer, where the step has reached the request's last token."""
    return [answer[one.num_output_tokens]] if one.num_computed_tokens == one.num_tokens else []


def main(source: str, target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        runs = [run(workload, folder) for workload in json.loads(Path(source).read_text())]
    Path(target).write_text(json.dumps({"version": vllm.__version__, "runs": runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
