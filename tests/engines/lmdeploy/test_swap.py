"""Swapping in LMDeploy's real scheduler and cache engine; `test_patches.py` runs these in a patched copy.

The cache engine keeps its "GPU" cache in CPU memory here, and its streams and events do nothing; shapes,
index arithmetic and copies are its own. A step writes KV that the tokens determine, and reads all KV of its
sequences.
"""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lmdeploy.pytorch.config import CacheConfig, ModelConfig, SchedulerConfig
from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.pytorch.engine import cache_engine, model_agent
from lmdeploy.pytorch.messages import SequenceMeta, UpdateTokenMode
from lmdeploy.pytorch.paging.scheduler import Scheduler
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from sagellm.core.errors import BookkeepingError, CapacityError, ConfigError, PlanError
from sagellm.engines.guests.settings import GuestSettings
from sagellm.engines.lmdeploy.block_moves import DeviceMove
from sagellm.engines.lmdeploy.cpu_cache import CPUCache
from sagellm.engines.lmdeploy.engine import LMDeployEngine
from tests.engines.lmdeploy.drivers import SIZE, Driver, nodes

pytestmark = pytest.mark.peer
LAYERS, HEADS, HEAD_DIM = 2, 2, 4


class NoStream:
    """A stream and an event that do nothing: copies in CPU memory are done when a call returns."""

    def record(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def wait(self) -> None:
        """Nothing is pending."""


def on_cpu(num_gpu_blocks: int, num_cpu_blocks: int, quant_policy: int = 0) -> Any:
    """LMDeploy's `CacheEngine`; only the devices of its tensors and its streams are replaced."""

    class OnCPU(cache_engine.CacheEngine):  # type: ignore[misc,unused-ignore]
        def _allocate_cache(self, num_blocks: int, device: Any) -> Any:
            return super()._allocate_cache(num_blocks, torch.device("cpu"))

    model = ModelConfig(
        hidden_size=16, num_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        bos_token_id=0, eos_token_id=[0], head_dim=HEAD_DIM, dtype=torch.float32,
    )  # fmt: skip
    config = CacheConfig(
        max_batches=4, block_size=SIZE, num_cpu_blocks=num_cpu_blocks, num_gpu_blocks=num_gpu_blocks,
        quant_policy=quant_policy,
    )  # type: ignore[arg-type,unused-ignore]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", NoStream)
        patch.setattr(torch.cuda, "current_stream", lambda: None)
        return OnCPU(config, model, cache_stream=NoStream())


def swapping_scheduler(num_gpu_blocks: int, num_cpu_blocks: int, **changed: Any) -> Any:
    config: dict[str, Any] = {
        "max_batches": 4, "block_size": SIZE, "num_cpu_blocks": num_cpu_blocks,
        "num_gpu_blocks": num_gpu_blocks, "max_prefill_token_num": 1 << 22, "enable_prefix_caching": True,
    }  # fmt: skip
    return Scheduler(
        SchedulerConfig(max_batches=4, max_session_len=1 << 22),
        CacheConfig(**{**config, **changed}),
        seq_meta=SequenceMeta(SIZE, strategy=ARSequenceStrategy()),
    )


class SwapDriver(Driver):
    """A driver whose steps compute: they write KV into real caches, and check what they find there."""

    def __init__(
        self, num_gpu_blocks: int, num_cpu_blocks: int, *, swap: bool = True, policy: str = "lru"
    ) -> None:
        super().__init__(num_gpu_blocks, None)
        self.scheduler = swapping_scheduler(num_gpu_blocks, num_cpu_blocks)
        self.trie = self.scheduler.block_trie
        if not hasattr(self.scheduler, "swaps"):
            pytest.skip("needs our patches")
        made = GuestSettings.of({"mode": "on", "policy": policy})
        self.engine = LMDeployEngine(self.scheduler, made, self.clock)
        self.guided = self.engine.guided
        if swap:
            self.engine.swap_to_cpu()
        self.device = on_cpu(num_gpu_blocks, num_cpu_blocks)
        for cache in (*self.device.full_gpu_cache, *self.device.full_cpu_cache):
            cache.fill_(-1.0)
        self.num_computed: dict[int, int] = {}
        self.num_both = 0

    @property
    def cpu(self) -> CPUCache:
        assert self.engine.cpu_cache is not None
        return self.engine.cpu_cache

    def prefill(self, token: int) -> list[int]:
        self.clock.advance(1.0)
        output = self.scheduler.schedule(is_prefill=True)
        self.compute(output)
        for sequence in output.running:
            sequence.update_token_ids(np.array([token]), mode=UpdateTokenMode.PREFILL)
        self.check()
        return [sequence.session_id for sequence in output.running]

    def decode(self, token: int) -> None:
        self.clock.advance(1.0)
        if not self.scheduler.has_running():
            return
        output = self.scheduler.schedule(is_prefill=False)
        self.compute(output)
        for sequence in output.running:
            sequence.update_token_ids(np.array([token]), mode=UpdateTokenMode.DECODE)
        self.check()

    def decode_and_prefill(self, token: int) -> None:
        """LMDeploy's engine schedules the next step while this one computes; its sequences are locked."""
        self.clock.advance(1.0)
        if not self.scheduler.has_running():
            return
        step = self.scheduler.schedule(is_prefill=False)
        self.scheduler.lock_running(step.running)
        following = self.scheduler.schedule(is_prefill=True)
        for output, mode in ((step, UpdateTokenMode.DECODE), (following, UpdateTokenMode.PREFILL)):
            self.compute(output)
            for sequence in output.running:
                sequence.update_token_ids(np.array([token]), mode=mode)
        self.scheduler.unlock_running(step.running)
        self.check()

    def compute(self, output: Any) -> None:
        """What LMDeploy's engine and model agent do with the output of a schedule."""
        if not output.running:
            assert not output.swap_in_map
            assert not output.swap_out_map
            return
        self.num_both += bool(output.swap_in_map and output.swap_out_map)
        model_agent.cache_swapping(
            self.device, swap_in_map=output.swap_in_map, swap_out_map=output.swap_out_map
        )
        tables = self.scheduler.get_block_tables(output.running)
        for sequence, table in zip(output.running, tables, strict=True):
            self._forward(sequence, table)

    def _forward(self, sequence: Any, table: Any) -> None:
        assert (table < self.num_blocks).all()
        expected = kv_of(sequence)
        done, total = int(sequence.num_history_ids), int(sequence.num_all_ids)
        for position in range(done, total):
            for number, cache in enumerate(self.device.full_gpu_cache):
                cache[:, int(table[position // SIZE]), position % SIZE] = expected[position] + number
        self.num_computed[sequence.session_id] = self.num_computed.get(sequence.session_id, 0) + total - done
        for number, cache in enumerate(self.device.full_gpu_cache):
            found = cache[:, torch.as_tensor(table)].flatten(1, 2)[:, :total]
            assert (found == (expected + number)[None, :, None, None]).all(), "KV is not what was computed"

    def check(self) -> None:
        super().check()
        if self.engine.cpu_cache is not None:
            self.engine.cpu_cache.check()
        assert self.engine.guided.is_guided


def kv_of(sequence: Any) -> torch.Tensor:
    """A number for each position that all tokens up to it determine; 24 bits are exact in float32."""
    values, state = [], hash(sequence.adapter_name or "") % 9973
    for token in sequence.all_ids.tolist():
        state = (state * 31 + int(token) * 7 + 1) % 8_388_593
        values.append(float(state))
    return torch.tensor(values)


def preempted_and_resumed(*, swap: bool) -> tuple[SwapDriver, int]:
    """Two requests decode until one is preempted; the other ends and the first goes on."""
    driver = SwapDriver(10, 16, swap=swap)
    first, second = driver.add([1] * (4 * SIZE)), driver.add([2] * (4 * SIZE))
    assert driver.prefill(5) == [first, second]
    for step in range(2 * SIZE + 1):
        driver.decode(1000 + step)
    assert driver.status(second) == "WAITING"
    for step in range(2 * SIZE):
        driver.decode(2000 + step)
    driver.end(first)
    assert driver.prefill(6) == [second]
    for step in range(3 * SIZE):
        driver.decode(3000 + step)
    return driver, driver.num_computed[second]


def test_a_preempted_sequence_computes_less_and_finds_its_kv() -> None:
    """`_forward` has compared all KV of each sequence in each step."""
    _, computed_again = preempted_and_resumed(swap=False)
    driver, computed = preempted_and_resumed(swap=True)
    assert driver.cpu.num_reused > 0
    assert computed_again - computed == driver.cpu.num_reused * SIZE
    assert driver.cpu.moves.num_swapped_in == driver.cpu.num_reused


def test_blocks_that_are_in_no_trie_are_swapped() -> None:
    """A sequence that is preempted before its first decode step has blocks that only it refers to."""
    driver = SwapDriver(9, 16)
    first, second = driver.add([1] * (4 * SIZE)), driver.add([2] * (4 * SIZE))
    assert driver.prefill(5) == [first, second]
    driver.decode(7)
    assert driver.status(second) == "WAITING"
    for step in range(SIZE + 1):
        driver.decode(100 + step)
    assert len(driver.cpu) == 4
    driver.end(first)
    assert driver.prefill(6) == [second]
    assert driver.cpu.num_reused == 4
    assert driver.num_computed[second] == 4 * SIZE + 1


@pytest.mark.parametrize(("num_tokens", "num_full"), [(4 * SIZE, 4), (4 * SIZE - 1, 3)])
def test_only_blocks_whose_kv_is_computed_are_kept(num_tokens: int, num_full: int) -> None:
    """The token that a step has just drawn may fill a block, but has no KV yet."""
    driver = SwapDriver(9, 16)
    number = driver.add([2] * num_tokens)
    driver.prefill(5)
    driver.sequences[number].status = type(driver.sequences[number].status).WAITING
    driver.scheduler.block_manager.free(driver.sequences[number])
    driver.sequences[number].set_step(0)
    driver.check()
    assert len(driver.cpu) == num_full


def test_at_least_one_token_of_a_prompt_is_computed() -> None:
    driver = SwapDriver(12, 8)
    prompt = [1] * (3 * SIZE)
    finished(driver, prompt)
    path = cached_path(driver)
    driver.engine.migrate_blocks([DeviceMove(block, "gpu", "cpu") for block in path])
    number = finished(driver, prompt)
    assert driver.cpu.num_reused == 2
    assert driver.num_computed[number] == SIZE + 1


def test_moves_wait_for_a_step_with_sequences() -> None:
    """LMDeploy drops the output of a schedule without any."""
    driver = SwapDriver(12, 8)
    finished(driver, [1] * (3 * SIZE))
    driver.engine.migrate_blocks([DeviceMove(block, "gpu", "cpu") for block in cached_path(driver)])
    output = driver.scheduler.schedule(is_prefill=True)
    assert (output.running, output.swap_out_map) == ([], {})
    finished(driver, [2] * SIZE)
    assert driver.cpu.moves.num_swapped_out == 3


def test_a_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lmdeploy.sagellm")
    driver, _ = preempted_and_resumed(swap=True)
    driver.engine.report_swaps()
    expected = "11 blocks were swapped out and 4 in; 4 were reused from the CPU and 0 dropped there; 7 are"
    assert expected in caplog.text


def test_without_swap_the_maps_stay_empty() -> None:
    driver = SwapDriver(10, 16, swap=False)
    assert driver.scheduler.swaps is None
    for family in range(6):
        number = driver.add([family] * (3 * SIZE))
        driver.prefill(5)
        output = driver.scheduler.schedule(is_prefill=False)
        assert (output.swap_in_map, output.swap_out_map) == ({}, {})
        driver.end(number)


@pytest.mark.parametrize("quant_policy", [0, 8])
def test_out_and_in_in_one_step_take_the_same_place(quant_policy: int) -> None:
    """Block 1 leaves the GPU and block 0 of the CPU takes its place: with our patch the order is right.

    With 8-bit KV there are four caches: keys, values, and the scales of both.
    """
    device = on_cpu(3, 3, quant_policy)
    for number, cache in enumerate((*device.full_gpu_cache, *device.full_cpu_cache)):
        for block in range(3):
            cache[:, block] = 10 * number + block
    num_caches = len(device.full_gpu_cache)
    SwapDriver(4, 4)  # skips where LMDeploy is not patched
    model_agent.cache_swapping(device, swap_in_map={0: 1}, swap_out_map={1: 2})
    for number in range(num_caches):
        assert (device.full_cpu_cache[number][:, 2] == 10 * number + 1).all()
        assert (device.full_gpu_cache[number][:, 1] == 10 * (number + num_caches)).all()


def test_a_plan_moves_cached_blocks_there_and_back() -> None:
    driver = SwapDriver(12, 4)
    prompt = [1] * (3 * SIZE) + [2]
    finished(driver, prompt)
    path = cached_path(driver)
    driver.engine.migrate_blocks([DeviceMove(block, "gpu", "cpu") for block in path])
    driver.check()
    assert nodes(driver.trie) == []
    assert {driver.cpu.moves.device(block) for block in path} == {"cpu"}
    finished(driver, [9] * SIZE)  # carries the moves out
    driver.engine.migrate_blocks([DeviceMove(block, "cpu", "gpu") for block in path[:2]])
    driver.check()
    assert {node.block for node in nodes(driver.trie)} >= set(path[:2])
    number = finished(driver, prompt)
    assert driver.num_computed[number] == 2  # the prompt's last token and the token after it
    assert driver.cpu.num_reused == 1


def cached_path(driver: SwapDriver) -> list[int]:
    """The blocks of a trie that has a single path, in order of position."""
    return [int(node.block) for node in sorted(nodes(driver.trie), key=lambda node: int(node.num_matched))]


def refused(driver: SwapDriver, error: type[Exception], message: str, *plan: DeviceMove) -> None:
    before = (sorted(node.block for node in nodes(driver.trie)), driver.cpu.blocks())
    with pytest.raises(error, match=message):
        driver.engine.migrate_blocks(plan)
    assert before == (sorted(node.block for node in nodes(driver.trie)), driver.cpu.blocks())
    driver.check()


def test_plans_that_are_refused_change_nothing() -> None:
    driver = SwapDriver(12, 2)
    finished(driver, [1] * (3 * SIZE) + [2])
    path = cached_path(driver)
    out = [DeviceMove(block, "gpu", "cpu") for block in path]
    refused(driver, PlanError, f"blocks \\[{path[1]}\\] continue block {path[0]}: add them", out[0])
    refused(driver, PlanError, f"block {path[2]} is in the plan twice", out[2], out[2])
    refused(driver, CapacityError, "3 blocks are to move to the CPU, which has room for 2", *out)
    refused(
        driver, PlanError, "is on the GPU already; cached on the CPU: none", DeviceMove(path[0], "cpu", "gpu")
    )
    refused(driver, PlanError, "block 11 is not in LMDeploy's prefix cache", DeviceMove(11, "gpu", "cpu"))
    refused(driver, PlanError, "block 99 is not cached on the CPU", out[2], DeviceMove(99, "cpu", "gpu"))
    running = driver.add([1] * (3 * SIZE) + [2, 3])
    driver.prefill(5)
    refused(driver, PlanError, f"1 sequences use block {path[2]}: it can move when", out[2])
    driver.end(running)
    driver.engine.migrate_blocks(out[1:])
    refused(driver, PlanError, "is on the CPU already", out[2])
    refused(
        driver, PlanError, f"the block before block {path[2]} is not on the GPU: add block {path[1]}",
        DeviceMove(path[2], "cpu", "gpu"),
    )  # fmt: skip
    refused(driver, PlanError, "is not on the GPU: add", out[0], DeviceMove(path[2], "cpu", "gpu"))
    with pytest.raises(PlanError, match="blocks move from 'gpu' to 'cpu' or from 'cpu' to 'gpu'"):
        DeviceMove(1, "gpu", "disk")


def test_the_gpu_must_have_room_for_a_plan() -> None:
    driver = SwapDriver(6, 4)
    finished(driver, [1] * (3 * SIZE) + [2])
    path = cached_path(driver)
    driver.engine.migrate_blocks([DeviceMove(block, "gpu", "cpu") for block in path])
    driver.add([3] * (6 * SIZE))
    driver.prefill(5)
    back = [DeviceMove(block, "cpu", "gpu") for block in path]
    refused(driver, CapacityError, "3 blocks are to move to the GPU, where 0 are free", *back)


def test_what_cannot_be_swapped_is_said() -> None:
    driver = SwapDriver(10, 4, swap=False)
    with pytest.raises(PlanError, match='set "swap": true'):
        driver.engine.migrate_blocks([])
    for scheduler, message in (
        (swapping_scheduler(10, 0), "set num_cpu_blocks"),
        (swapping_scheduler(10, 4, role=EngineRole.Decode), "use role Hybrid"),
        (
            swapping_scheduler(10, 4, states_shapes=[((1,), torch.float32)], num_state_caches=2),
            "recurrent state",
        ),
    ):
        engine = LMDeployEngine(scheduler, GuestSettings.of({"mode": "on"}), driver.clock)
        with pytest.raises(ValueError, match=message):
            engine.swap_to_cpu()
    shadow = LMDeployEngine(swapping_scheduler(10, 4), GuestSettings(), driver.clock)
    with pytest.raises(ConfigError, match='needs the mode "on"'):
        shadow.swap_to_cpu()


def test_an_error_ends_swapping_and_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = SwapDriver(8, 8)
    for family in range(4):
        finished(driver, [family] * (3 * SIZE))
    cache = driver.cpu
    assert len(cache) > 0

    def fails(*arguments: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(cache, "admitting", fails)
    for family in range(4):
        finished(driver, [family] * (3 * SIZE))
    assert caplog.text.count("nothing is swapped any more: RuntimeError('no idea')") == 1
    assert driver.engine.cpu_cache is None
    cache.check()
    assert driver.scheduler.block_manager.get_num_free_cpu_blocks() == 8


def test_what_cannot_be_freed_ends_swapping_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SwapDriver(8, 8)
    for family in range(4):
        finished(driver, [family] * (3 * SIZE))

    def fails(*arguments: Any) -> None:
        raise RuntimeError("no idea")

    monkeypatch.setattr(driver.cpu, "admitting", fails)
    monkeypatch.setattr(driver.cpu.moves, "drop", fails)
    for family in range(4):
        finished(driver, [family] * (3 * SIZE))
    assert driver.engine.cpu_cache is None


@pytest.mark.parametrize("num_tokens", [3, 4, 5])
def test_the_last_token_of_an_answer_fills_no_block(num_tokens: int) -> None:
    """It has no KV, in LMDeploy as in the shadows."""
    driver = SwapDriver(60, 0, swap=False)
    number = driver.add(list(range(28)))
    driver.prefill(100)
    for step in range(1, num_tokens):
        driver.decode(100 + step)
    again = [*driver.sequences[number].all_ids.tolist(), *[9] * 9]
    driver.end(number)
    finished(driver, again)
    compared = driver.engine.comparison
    hits = {compared.reuse.num_hits, *(shadow.reuse.num_hits for shadow in compared.shadows.values())}
    assert hits == {(27 + num_tokens) // SIZE}


def test_a_preempted_sequence_keeps_its_table_when_its_prompt_is_cached_meanwhile() -> None:
    """LMDeploy 0.11.0 appends what `match` finds behind the blocks that such a sequence still has."""
    for guided, num_blocks in ((False, 7), (True, 4)):
        driver = SwapDriver(20, 4)
        if not guided:
            driver.trie.hooks.guided.matching = lambda sequence: True
        prompt = [1] * (3 * SIZE) + [2]
        waiting, other = driver.add(prompt), driver.add(prompt)
        driver.prefill(5)
        driver.sequences[waiting].status = type(driver.sequences[waiting].status).WAITING
        driver.decode(6)
        assert driver.status(other) == "RUNNING"
        driver.scheduler.schedule(is_prefill=True)
        assert len(driver.sequences[waiting].logical_blocks) == num_blocks


@pytest.mark.parametrize("policy", ["lru", "adaptive", "sieve"])
def test_conversations_reuse_what_was_evicted(policy: str) -> None:
    """Twelve conversations in turns, memory for three: without swap hardly anything is reused."""
    computed = []
    for swap in (False, True):
        driver, rng = SwapDriver(40, 200, swap=swap, policy=policy), random.Random(1)
        sessions = [[100 + i] * (8 * SIZE) for i in range(12)]
        for turn in range(60):
            index = turn % 12
            number = driver.add([*sessions[index], *rng.sample(range(1000, 9999), 3)])
            driver.prefill(rng.randrange(1000, 9999))
            for _ in range(3):
                driver.decode(rng.randrange(1000, 9999))
            sessions[index] = driver.sequences[number].all_ids.tolist()
            driver.end(number)
        computed.append(sum(driver.num_computed.values()))
    assert computed[1] < 0.4 * computed[0]
    assert driver.num_both > 0


class SwapMachine(RuleBasedStateMachine):
    """Requests come, are preempted, stop, go on and end; plans move blocks; memory is short everywhere."""

    @initialize(num_gpu=st.integers(10, 24), num_cpu=st.integers(1, 24))
    def begin(self, num_gpu: int, num_cpu: int) -> None:
        self.driver, self.token = SwapDriver(num_gpu, num_cpu), 1000

    def next_token(self) -> int:
        self.token += 1
        return self.token

    def one_of(self, number: int) -> int:
        return sorted(self.driver.sequences)[number % len(self.driver.sequences)]

    @rule(family=st.integers(0, 3), length=st.integers(1, 40), tail=st.integers(0, 3), other=st.booleans())
    def add(self, family: int, length: int, tail: int, other: bool) -> None:
        prompt = [1] * min(length, 8) + [family + 2] * max(0, length - 8) + [50 + i for i in range(tail)]
        self.driver.add(prompt, "other" if other else None)

    @rule()
    def prefill(self) -> None:
        self.driver.prefill(self.next_token())

    @rule(count=st.integers(1, 6))
    def decode(self, count: int) -> None:
        for _ in range(count):
            self.driver.decode(self.next_token())

    @rule()
    def decode_and_prefill(self) -> None:
        self.driver.decode_and_prefill(self.next_token())

    @precondition(lambda self: self.driver.sequences)
    @rule(number=st.integers(0, 9))
    def stop(self, number: int) -> None:
        self.driver.stop(self.one_of(number))

    @precondition(lambda self: self.driver.sequences)
    @rule(number=st.integers(0, 9), count=st.integers(1, 9))
    def resume(self, number: int, count: int) -> None:
        chosen = self.one_of(number)
        if self.driver.status(chosen) == "STOPPED":
            self.driver.resume(chosen, [self.next_token() for _ in range(count)])

    @precondition(lambda self: self.driver.sequences)
    @rule(number=st.integers(0, 9))
    def end(self, number: int) -> None:
        self.driver.end(self.one_of(number))

    @rule(picks=st.lists(st.integers(0, 50), max_size=6), inwards=st.booleans())
    def migrate(self, picks: list[int], inwards: bool) -> None:
        """Any plan: it is carried out, or refused with nothing changed."""
        cached = sorted(node.block for node in nodes(self.driver.trie))
        known = sorted(self.driver.cpu.blocks()) if inwards else cached
        move = ("cpu", "gpu") if inwards else ("gpu", "cpu")
        plan = [DeviceMove(known[pick % len(known)] if known else pick, *move) for pick in picks]
        try:
            self.driver.engine.migrate_blocks(plan)
        except (PlanError, CapacityError):
            assert cached == sorted(node.block for node in nodes(self.driver.trie))
        else:
            assert {self.driver.cpu.moves.device(each.block_id) for each in plan} <= {move[1]}

    @invariant()
    def balanced(self) -> None:
        self.driver.check()
        assert self.driver.engine.cpu_cache is not None

    def teardown(self) -> None:
        for number in list(self.driver.sequences):
            self.driver.end(number)
        self.driver.cpu.close()
        self.driver.trie.evict(100)
        self.driver.cpu.close()
        self.driver.check()


IS_PATCHED = importlib.util.find_spec("lmdeploy.pytorch.comm_hooks") is not None
TestSwapMachine = pytest.mark.skipif(not IS_PATCHED, reason="needs our patches")(SwapMachine.TestCase)
TestSwapMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_check_notices_a_block_on_the_wrong_device() -> None:
    driver = SwapDriver(8, 8)
    finished(driver, [1] * (3 * SIZE))
    driver.cpu.moves.to_cpu(nodes(driver.trie)[-1].block)
    with pytest.raises(BookkeepingError, match="trie refers to a block on the CPU"):
        driver.cpu.check()


def finished(driver: SwapDriver, prompt: list[int]) -> int:
    """Serve a request alone; returns its number."""
    number = driver.add(prompt)
    assert driver.prefill(10**6) == [number]
    driver.decode(10**6 + 1)
    driver.end(number)
    return number
