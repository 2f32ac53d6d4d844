"""`SageConnector` in vLLM's real scheduler, alone and beside another connector."""

from __future__ import annotations

import json
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.engines.vllm import register
from sagellm.engines.vllm.connector import SageConnector
from sagellm.engines.vllm.stats import SageStats
from tests.peers.vllm_driver import MODEL

pytestmark = pytest.mark.peer
SIZE, NUM_BLOCKS = 4, 60
LOGGER = "vllm.sagellm"
COUNTED: list[dict[str, Any]] = []
"""What vLLM's scheduler has sent to its server, step by step."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    register()
    COUNTED.clear()
    return str(tmp_path)


def transfer(mode: str | None, **extra: Any) -> dict[str, Any] | None:
    if mode is None:
        return None
    own = {"kv_connector": "SageConnector", "kv_role": "kv_both"}
    return own | {"kv_connector_extra_config": {"mode": mode, **extra}}


def scheduler(
    model: str,
    config: dict[str, Any] | None,
    *,
    caching: bool = True,
    window: int = 0,
    kind: type[Any] = Scheduler,
    additional: dict[str, Any] | None = None,
    asynchronous: bool = False,
    policy: str = "fcfs",
) -> Scheduler:
    cache = CacheConfig(block_size=SIZE, enable_prefix_caching=caching)
    vllm_config = VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, max_model_len=4096, dtype="bfloat16", seed=0
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
            policy=policy,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        additional_config=additional or {},
        kv_transfer_config=None if config is None else KVTransferConfig(**config),
    )
    cache.num_gpu_blocks = NUM_BLOCKS + 1
    kinds: dict[str, Any] = {
        "block_size": SIZE,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": torch.bfloat16,
    }
    spec = SlidingWindowSpec(**kinds, sliding_window=window) if window else FullAttentionSpec(**kinds)
    kv = KVCacheConfig(
        num_blocks=NUM_BLOCKS + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    made: Scheduler = kind(
        vllm_config,
        kv,
        StructuredOutputManager(vllm_config),
        block_size=SIZE,
        hash_block_size=SIZE,
        log_stats=True,
    )
    return made


def serve(
    engine: Scheduler,
    seed: int = 0,
    num_requests: int = 120,
    fields: dict[str, Any] | None = None,
    every: int = 1,
) -> list[tuple[str, int]]:
    """Conversations, two or three at a time; returns each step's requests and tokens.

    `fields`: what each request, or one in `every`, says of its KV.
    """
    init_none_hash(sha256)
    hasher, rng = get_request_block_hasher(SIZE, sha256), random.Random(seed)
    sessions = [[100 + i] * 12 for i in range(8)]
    steps: list[tuple[str, int]] = []
    for number in range(num_requests):
        prompt = sessions[rng.choice((number % 8, number // 10 % 8, number // 10 % 8))]
        prompt += [rng.randrange(1000, 30000) for _ in range(rng.randrange(1, 12))]
        if len(prompt) > 100:
            del prompt[12:]
        said = fields if number % every == every - 1 else None
        params = SamplingParams(max_tokens=3, ignore_eos=True, extra_args=said)
        engine.add_request(Request(f"r{number}", list(prompt), params, None, block_hasher=hasher))
        while len(engine.requests) > 2 or (number == num_requests - 1 and engine.requests):
            steps += step(engine)
    return steps


def step(engine: Scheduler, transfers: KVConnectorOutput | None = None) -> list[tuple[str, int]]:
    """One step; what the connector counted goes to `COUNTED`. `transfers`: what workers say of theirs."""
    plan = engine.schedule()
    counts = plan.num_scheduled_tokens
    requests = [engine.requests[name] for name in counts]
    drawn = [[7] if one.num_computed_tokens == one.num_tokens else [] for one in requests]
    positions = {name: index for index, name in enumerate(counts)}
    outputs = engine.update_from_output(
        plan,
        ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index=positions,
            sampled_token_ids=drawn,
            kv_connector_output=transfers,
        ),
    )
    COUNTED.extend(
        found.scheduler_stats.kv_connector_stats
        for found in outputs.values()
        if found.scheduler_stats is not None and found.scheduler_stats.kv_connector_stats
    )
    return list(counts.items())


def test_off_and_shadow_schedule_alike(model: str) -> None:
    stock, shadow = (serve(scheduler(model, transfer(mode))) for mode in (None, "shadow"))
    assert shadow == stock


def test_with_lru_the_schedule_is_that_of_vllm(model: str) -> None:
    stock, lru = (serve(scheduler(model, config)) for config in (None, transfer("on", policy="lru")))
    assert lru == stock


def test_shadows_tell_what_would_be_reused(model: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = scheduler(model, transfer("shadow"))
    serve(engine)
    connector = engine.connector
    assert isinstance(connector, SageConnector)
    counts = connector.counts()
    assert set(counts) == {"vllm", "lru", "adaptive"}
    assert counts["vllm"].num_blocks == counts["lru"].num_blocks == counts["adaptive"].num_blocks > 1000
    assert 0 < counts["vllm"].num_hits < counts["vllm"].num_blocks
    assert counts["vllm"].ratio == pytest.approx(counts["lru"].ratio, abs=0.03)
    with caplog.at_level(logging.INFO, LOGGER):
        engine.shutdown()
    assert f"of {counts['vllm'].num_blocks} blocks of prompts were reused" in caplog.text
    assert "order of eviction: vLLM's own" in caplog.text


def test_the_policy_decides(model: str) -> None:
    engine = scheduler(model, transfer("on"))
    serve(engine)
    pool = engine.kv_cache_manager.block_pool
    assert pool.free_block_queue.num_restarts == 0
    assert pool.get_num_free_blocks() == NUM_BLOCKS
    pool.free_block_queue.check()
    assert set(engine.connector.counts()) == {"vllm", "lru", "adaptive"}


def test_it_gives_up_when_it_loses(
    model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here whatever is not far better than LRU has lost."""
    monkeypatch.setattr("sagellm.engines.guests.comparison.JUDGED_TOKENS", 2000)
    monkeypatch.setattr("sagellm.engines.guests.comparison.MAX_LOSS", -0.5)
    engine = scheduler(model, transfer("on"))
    serve(engine)
    assert "blocks fewer than LRU would" in caplog.text
    pool = engine.kv_cache_manager.block_pool
    assert type(pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"
    assert pool.get_num_free_blocks() == NUM_BLOCKS


def test_beside_another_connector(model: str) -> None:
    """Two of ours in vLLM's `MultiConnector`, as `sagellm vllm serve` composes them."""
    connectors = [transfer("shadow"), transfer("on", policy="lru")]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }
    engine = scheduler(model, config)
    assert serve(engine) == serve(scheduler(model, None))
    engine.kv_cache_manager.block_pool.free_block_queue.check()


def new_hits(engine: Scheduler, prompt: list[int], **options: Any) -> dict[str, int]:
    """Serve one prompt alone; returns the blocks of it that each cache reused."""
    before = {name: count.num_hits for name, count in engine.connector.counts().items()}
    hasher = get_request_block_hasher(SIZE, sha256)
    params = SamplingParams(max_tokens=1, ignore_eos=True, **options)
    name = f"one{len(COUNTED)}"
    engine.add_request(Request(name, list(prompt), params, None, block_hasher=hasher))
    while name in engine.requests:
        step(engine)
    return {name: count.num_hits - before[name] for name, count in engine.connector.counts().items()}


@pytest.mark.parametrize("mode", ["shadow", "on"])
@pytest.mark.parametrize("reset_connector", [False, True])
def test_reset_clears_the_shadows(model: str, mode: str, reset_connector: bool) -> None:
    engine, prompt = scheduler(model, transfer(mode)), [5] * 30
    init_none_hash(sha256)
    assert new_hits(engine, prompt) == {"vllm": 0, "lru": 0, "adaptive": 0}
    assert new_hits(engine, prompt) == {"vllm": 7, "lru": 7, "adaptive": 7}
    assert engine.reset_prefix_cache(reset_connector=reset_connector)
    assert new_hits(engine, prompt) == {"vllm": 0, "lru": 0, "adaptive": 0}
    if mode == "on":
        engine.kv_cache_manager.block_pool.free_block_queue.check()
    assert engine.kv_cache_manager.block_pool.get_num_free_blocks() == NUM_BLOCKS


def test_a_reset_that_vllm_refuses_clears_no_shadow(model: str) -> None:
    engine, prompt = scheduler(model, transfer("shadow")), [5] * 30
    init_none_hash(sha256)
    new_hits(engine, prompt)
    hasher = get_request_block_hasher(SIZE, sha256)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    engine.add_request(Request("runs", [9] * 8, params, None, block_hasher=hasher))
    step(engine)
    assert not engine.reset_prefix_cache(reset_connector=True)  # a request runs
    assert new_hits(engine, prompt) == {"vllm": 7, "lru": 7, "adaptive": 7}


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_the_last_token_of_an_answer_fills_no_block(model: str, num_tokens: int) -> None:
    """It has no KV, in vLLM as in the shadows; 28 and 4 tokens are 8 blocks, of which 7 are cached."""
    engine, hasher = scheduler(model, transfer("shadow")), get_request_block_hasher(SIZE, sha256)
    init_none_hash(sha256)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    first = Request("first", list(range(28)), params, None, block_hasher=hasher)
    engine.add_request(first)
    while engine.requests:
        step(engine)
    found = new_hits(engine, [*range(28), *first.output_token_ids, *[9] * 9])
    assert found == dict.fromkeys(("vllm", "lru", "adaptive"), (27 + num_tokens) // SIZE)


@pytest.mark.parametrize("mode", ["shadow", "on"])
def test_a_reset_under_running_requests_leaves_the_books_in_order(model: str, mode: str) -> None:
    engine = scheduler(model, transfer(mode, hints="all"))
    serve(engine, num_requests=10)
    hasher = get_request_block_hasher(SIZE, sha256)
    fields = {"sage_session": "s", "sage_pin_s": 9}
    for number in range(6):
        params = SamplingParams(max_tokens=20, ignore_eos=True, extra_args=fields)
        engine.add_request(Request(f"x{number}", [number] * 20, params, None, block_hasher=hasher))
    for _ in range(5):
        step(engine)
    assert engine.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3):
        step(engine)
    engine.finish_requests(["x1", "x5"], RequestStatus.FINISHED_ABORTED)
    while engine.requests:
        step(engine)
    for shadow in engine.connector._comparison.shadows.values():
        shadow.check()
        assert shadow.num_held == 0
    if mode == "on":
        engine.kv_cache_manager.block_pool.free_block_queue.check()
    serve(engine, num_requests=20, seed=5)


def test_a_prompt_that_must_be_computed_whole_is_reused_by_no_shadow(model: str) -> None:
    engine, prompt = scheduler(model, transfer("shadow")), [5] * 30
    init_none_hash(sha256)
    new_hits(engine, prompt)
    assert new_hits(engine, prompt, prompt_logprobs=1) == {"vllm": 0, "lru": 0, "adaptive": 0}
    assert new_hits(engine, prompt) == {"vllm": 7, "lru": 7, "adaptive": 7}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"caching": False}, "prefix caching is switched off"), ({"window": 8}, "SlidingWindowSpec")],
)
def test_what_is_not_supported_stays_as_it_is(
    model: str, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    engine = scheduler(model, transfer("on"), **changes)
    assert reason in caplog.text
    assert "touch" not in vars(engine.kv_cache_manager.block_pool)
    assert serve(engine) == serve(scheduler(model, None, **changes))


def test_a_name_that_has_moved(
    model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sagellm.engines.vllm.block_pool.BLOCK_NAMES", ("block_id", "num_references"))
    engine = scheduler(model, transfer("on"))
    assert "KVCacheBlock of this vLLM has no num_references" in caplog.text
    assert serve(engine) == serve(scheduler(model, None))


@pytest.mark.parametrize("mode", ["shadow", "on"])
def test_an_error_of_the_counts_ends_them_and_no_request(
    model: str, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    engine = scheduler(model, transfer(mode))

    def fails(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no idea")

    engine.connector._comparison.began = fails
    assert serve(engine) == serve(scheduler(model, None))
    assert caplog.text.count("reuse is not counted any more: RuntimeError('no idea')") == 1
    assert type(engine.kv_cache_manager.block_pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"


@pytest.mark.parametrize(
    ("extra", "error"),
    [({"polcy": "lru"}, ConfigError), ({"policy": "nope"}, UnknownNameError), ({"options": 3}, ConfigError)],
)
def test_wrong_settings_stop_the_start(model: str, extra: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        scheduler(model, transfer("shadow", **extra))


@pytest.mark.parametrize("mode", ["shadow", "on"])
def test_counts_reach_the_server(model: str, mode: str) -> None:
    engine = scheduler(model, transfer(mode))
    serve(engine)
    total = SageStats({})
    for data in COUNTED:
        total.aggregate(SageConnector.build_kv_connector_stats(data))
    counts, misses = engine.connector.counts(), engine.connector._comparison.misses
    assert total.data["blocks"] == counts["vllm"].num_blocks > 1000
    assert total.data["reused"] == {name: count.num_hits for name, count in counts.items()}
    assert sum(total.data["missed"].values()) == sum(misses)
    by = counts["adaptive" if mode == "on" else "lru"]
    assert sum(misses) == pytest.approx(by.num_blocks - by.num_hits, abs=120)  # a prompt computes one token
    assert total.reduce()["blocks of prompts"] == counts["vllm"].num_blocks
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_two_loggers_of_a_server_count_the_same_steps_once() -> None:
    steps = [{"blocks": 5, "reused": {"vllm": 2}, "missed": {"cold": 3}} for _ in range(2)]
    sums = [SageConnector.build_kv_connector_stats(steps[0]) for _ in range(2)]
    for total in sums:
        total.aggregate(SageConnector.build_kv_connector_stats(steps[1]))
    assert [total.data for total in sums] == 2 * [
        {"blocks": 10, "reused": {"vllm": 4}, "missed": {"cold": 6}}
    ]
    sums[0].reset()
    assert steps[0] == steps[1]


class LateConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc,unused-ignore]
    """Another connector: it lets blocks go later, and cannot always say at once what it has."""

    late: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rng = random.Random(3)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (None if self._rng.random() < 0.3 else 0), False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        is_late = bool(block_ids) and self._rng.random() < 0.6
        self.late.extend([request.request_id] * is_late)
        return is_late, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def update_state_after_alloc(self, *arguments: Any) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc


@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_that_another_connector_frees_later(model: str, seed: int) -> None:
    """With aborts, preemptions and hints of all kinds, valid and not."""
    name, rng, late = "LateConnector", random.Random(seed), LateConnector.late
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, __name__, name)
    late.clear()
    members = [{"kv_connector": name, "kv_role": "kv_both"}, transfer("on", hints="all")]
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    engine = scheduler(model, {**config, "kv_connector_extra_config": {"connectors": members}})
    queue = engine.kv_cache_manager.block_pool.free_block_queue
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)
    sessions = [[100 + i] * 12 for i in range(8)]

    def freed() -> KVConnectorOutput | None:
        gone = {name for name in late if rng.random() < 0.3}
        late[:] = [name for name in late if name not in gone]
        return KVConnectorOutput(finished_sending=gone) if gone else None

    def advance() -> None:
        step(engine, freed())
        queue.check()

    for number in range(120):
        prompt = rng.choice(sessions)
        prompt += [rng.randrange(1000) for _ in range(rng.randrange(1, 12))]
        if len(prompt) > 100:
            del prompt[12:]
        kind = rng.choice(["session.end", "session.supersede", "kv.retain", "kv.expect", "no.such"])
        action = {"action_type": kind, "payload": rng.choice([{}, {"session_id": "s1"}, {"priority": "x"}])}
        fields = {
            "sage_session": f"s{rng.randrange(5)}",
            "sage_hints": json.dumps({"actions": [action]}),
            "sage_pin_s": rng.choice([0, 1, 1e5, -1]),
        }
        params = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, extra_args=fields)
        engine.add_request(Request(f"r{number}", list(prompt), params, None, block_hasher=hasher))
        while len(engine.requests) - len(late) > 3:
            advance()
            chosen = rng.choice(sorted(engine.requests))
            if chosen not in late and rng.random() < 0.05:
                engine.finish_requests([chosen], RequestStatus.FINISHED_ABORTED)
    while engine.requests or late:
        advance()
    assert engine.kv_cache_manager.block_pool.free_block_queue is queue
    assert queue.num_restarts == len(queue._finishing) == len(queue._pins) == len(queue._unclaimed) == 0
    ours = next(each for each in engine.connector._connectors if isinstance(each, SageConnector))
    assert ours._comparison is not None
    assert not ours._found
    for shadow in ours._comparison.shadows.values():
        shadow.check()
        assert shadow.num_held == 0


def test_counts_of_a_multi_connector(model: str) -> None:
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [transfer("shadow")]},
    }
    engine = scheduler(model, config)
    serve(engine, num_requests=20)
    built = type(engine.connector).build_kv_connector_stats(COUNTED[-1])
    assert not built.data["SageConnector"].is_empty()


def test_the_counters_of_a_server(model: str) -> None:
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = SageConnector.build_prom_metrics(
        VllmConfig(device_config=DeviceConfig("cpu")), kinds, ["model_name", "engine"], {0: ["m", "0"]}
    )
    for _ in range(2):
        metrics.observe({"blocks": 5, "reused": {"vllm": 2, "lru": 1}, "missed": {"cold": 3}})
    labels = {"model_name": "m", "engine": "0"}
    for name, more, value in (
        ("sagellm_prompt_blocks_total", {}, 10),
        ("sagellm_reused_blocks_total", {"cache": "vllm"}, 4),
        ("sagellm_kv_misses_total", {"cause": "cold"}, 6),
    ):
        assert registry.get_sample_value(name, labels | more) == value


def test_a_process_that_makes_two_engines_has_the_counters_of_the_second(model: str) -> None:
    config = scheduler(model, transfer("shadow")).vllm_config
    loggers = [PrometheusStatLogger(config, [0]) for _ in range(2)]
    loggers[1].kv_connector_prom.observe({"blocks": 5, "reused": {"vllm": 2}, "missed": {}})
    labels = {"model_name": config.model_config.served_model_name, "engine": "0"}
    assert REGISTRY.get_sample_value("sagellm_prompt_blocks_total", labels) == 5


def test_hints_change_the_order_and_no_answer(model: str) -> None:
    end = {"sage_hints": json.dumps({"actions": [{"action_type": "session.end"}]})}
    stock = scheduler(model, None)
    plain, ended = (scheduler(model, transfer("on", policy="lru", hints=["session.end"])) for _ in range(2))
    assert serve(plain) == serve(stock)
    serve(ended, fields=end, every=3)
    queue = ended.kv_cache_manager.block_pool.free_block_queue
    queue.check()
    assert queue.num_restarts == 0
    counts = ended.connector.counts()
    with_hints, without = counts["lru with session.end"].num_hits, counts["lru"].num_hits
    assert abs(with_hints - without) > 0.05 * without
    assert counts["vllm"].num_hits == pytest.approx(with_hints, abs=0.02 * with_hints)


@pytest.mark.parametrize("text", ["{", "[" * 60_000])
def test_wrong_hints_are_ignored_once(model: str, caplog: pytest.LogCaptureFixture, text: str) -> None:
    engine = scheduler(model, transfer("on", policy="lru", hints="all"))
    assert serve(engine, fields={"sage_hints": text}) == serve(scheduler(model, None))
    assert caplog.text.count("are ignored: sage_hints is no JSON") == 1
