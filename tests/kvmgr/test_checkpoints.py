"""Checkpoints of recurrent states in the manager: what is reused, what goes first, what fits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from sagellm.benchmarks.checkpoints.groups import PRESETS
from sagellm.benchmarks.checkpoints.replayer import VALUE, CheckpointPlan, budget, run_checkpoints
from sagellm.benchmarks.replay.block_trace import block_trace
from sagellm.benchmarks.traces import read_trace
from sagellm.core.binding import Binding
from sagellm.core.clock import ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import CapacityError
from sagellm.core.plan import Chunk, Draft, RequestState, StepStart
from sagellm.core.protocols.prefix_cache import SpanState
from sagellm.core.types import NO_ACCOUNT, Namespace, Request, Tokens
from sagellm.engines.build import build_engine, load_config
from sagellm.engines.build_kv import build_kv
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.manager import KVCacheManager
from tests.builders import fake_engine, request, run_all

BLOCK = 4
TRACE = Path(__file__).parent.parent / "golden" / "traces" / "chat.jsonl"


def manager(num_blocks: int, state_pages: int, clock: ManualClock | None = None) -> KVCacheManager:
    config = KVConfig(block_size=BLOCK, checkpoint_interval=BLOCK)
    return build_kv(config, num_blocks, state_pages=state_pages, max_chunk=1 << 20, clock=clock)


def serve(kv: KVCacheManager, name: str, tokens: Iterable[int], *, release: bool = True) -> int:
    """Compute a prompt in one step; returns the blocks that it reused."""
    state = RequestState.of(Request(name, Tokens(tokens)))
    hit = kv.quotes.match(state)
    chunk = Chunk(state, hit.num_tokens, len(state.tokens) - hit.num_tokens, hit)
    binding = Binding(Draft(StepStart(0, 0.0), 1 << 20, [], [], {name: chunk}))
    kv.bind(binding)
    kv.executed(binding)
    state.num_prefilled = len(state.tokens)
    kv.commit(state)
    if release:
        kv.release(state)
    return hit.num_blocks


def test_dropping_a_checkpoint_evicts_the_blocks_that_only_it_needed() -> None:
    kv = manager(64, 3)
    assert kv.checkpoints is not None
    for number in range(12):  # each: 8 blocks, and checkpoints behind 6, 7 and 8 of them
        serve(kv, f"r{number}", [number] * (8 * BLOCK + 1))
        kv.check()
    num_gone = sum(kv.allocator.num_evicted.values())
    assert num_gone >= 3 * kv.checkpoints.num_evicted > 0  # their blocks are counted as evicted, too
    needed = {lead for found in kv.checkpoints._at.values() for lead in found.leads}
    assert len(kv.checkpoints) > 2
    assert set(kv.index.all_block_ids()) == needed  # nothing else was evicted in their place


def test_blocks_without_a_checkpoint_go_before_any_checkpoint() -> None:
    kv = manager(40, 3)
    assert kv.checkpoints is not None
    state = RequestState.of(Request("holds", Tokens([1] * (4 * BLOCK + 1))))
    serve(kv, "first", [1] * (4 * BLOCK + 1))
    hit = kv.quotes.match(state)
    binding = Binding(Draft(StepStart(0, 0.0), 99, [], [], {"holds": Chunk(state, hit.num_tokens, 1, hit)}))
    kv.bind(binding)
    kv.executed(binding)
    kv.clear_cache()  # its blocks are pinned; their checkpoints go
    assert len(kv.checkpoints) == 0
    serve(kv, "second", [2] * (4 * BLOCK + 1))
    state.num_prefilled = len(state.tokens)
    kv.release(state)
    kv.allocator.make_room(kv.pool.num_free + 4, NO_ACCOUNT)
    kv.check()
    assert kv.checkpoints.num_evicted == 0
    assert kv.quotes.match(RequestState.of(Request("again", Tokens([2] * (4 * BLOCK + 1))))).num_blocks == 4


def test_a_prompt_that_was_evicted_whole_is_known_when_it_comes_again() -> None:
    kv = manager(64, 1)
    assert kv.checkpoints is not None
    serve(kv, "first", [1] * 33)
    kv.clear_cache()
    serve(kv, "again", [*[1] * 33, *[2] * 40], release=False)
    made = next(iter(kv.checkpoints._requests.values())).wanted
    assert made[0] == 8  # where the two prompts part


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hit_whose_checkpoint_does_not_fit_beside_the_request_is_not_used(overlap: bool) -> None:
    backend = TokenMemoryBackend(num_blocks=10, block_size=BLOCK, state_pages=5, max_model_len=40)
    engine = fake_engine(backend, overlap=overlap)
    engine.add(request("first", range(17)))
    run_all(engine)
    engine.add(request("second", range(33)))
    assert len(run_all(engine)["second"]) == 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("shares_pin", [False, True])
def test_a_hit_that_does_not_fit_beside_pinned_prefixes_is_not_used(overlap: bool, shares_pin: bool) -> None:
    """24 blocks, of which 7 are pinned; the request needs 14, and 5 more to begin with its checkpoint."""
    backend = TokenMemoryBackend(num_blocks=24, block_size=BLOCK, state_pages=5, max_model_len=96)
    engine = fake_engine(backend, overlap=overlap, max_pinned_share=0.5)
    pinned = range(9) if shares_pin else range(50, 59)
    engine.add(request("pinned", pinned))
    run_all(engine)
    engine.pin_prefix(Tokens(pinned), Namespace())
    engine.add(request("first", range(41)))
    run_all(engine)
    engine.add(request("second", [*range(41), *range(9)]))
    assert len(run_all(engine)["second"]) == 4


def admitted(kv: KVCacheManager, state: RequestState, num_tokens: int, binding: Binding) -> None:
    hit = kv.quotes.match(state)
    binding.draft.chunks[state.request_id] = Chunk(state, hit.num_tokens, num_tokens - hit.num_tokens, hit)


def test_a_request_keeps_its_places_when_it_is_admitted_again() -> None:
    kv = manager(64, 1)
    assert kv.checkpoints is not None
    serve(kv, "first", [1] * 33)
    kv.clear_cache()
    state = RequestState.of(Request("second", Tokens([*[1] * 33, *[2] * 40])))
    for _ in range(2):
        binding = Binding(Draft(StepStart(0, 0.0), 1 << 20, [], [], {}))
        admitted(kv, state, 12, binding)
        kv.bind(binding)
        assert kv.checkpoints._requests[kv._tables["second"]].wanted == [8, 16, 17, 18]
        kv.rollback(binding)
        kv.check()
    kv.clear_cache()


def test_decoding_requests_leave_room_for_cached_prefixes() -> None:
    """Six requests decode; their checkpoints take a quarter of the pool, two of them, and not all of it."""
    backend = TokenMemoryBackend(num_blocks=140, block_size=BLOCK, state_pages=15, max_num_seqs=6)
    engine = fake_engine(backend, checkpoint_interval=BLOCK, max_batched_tokens=64)
    idle = [90] * 33
    engine.add(request("idle", idle, 1))
    run_all(engine)
    for number in range(6):
        engine.add(request(f"r{number}", [number, 1, 2], 30))
    run_all(engine)
    assert engine.kv.quotes.match(RequestState.of(Request("again", Tokens(idle)))).num_blocks > 0


def test_a_single_checkpoint_in_decode_may_take_more_than_a_quarter() -> None:
    backend = TokenMemoryBackend(num_blocks=40, block_size=BLOCK, state_pages=15)
    engine = fake_engine(backend, checkpoint_interval=BLOCK)
    engine.add(request("r", [1, 2, 3], 30))
    tokens = run_all(engine)["r"]
    assert engine.kv.quotes.match(RequestState.of(Request("next", Tokens([1, 2, 3, *tokens])))).num_blocks > 5


def test_what_is_computed_again_of_an_answer_has_a_checkpoint() -> None:
    """A preempted request that lost everything goes on from the last checkpoint that it had in decode."""
    kv = manager(64, 1)
    state = RequestState.of(Request("r", Tokens([1] * 9)))
    state.tokens.extend([2] * 16)
    binding = Binding(Draft(StepStart(0, 0.0), 1 << 20, [], [], {}))
    admitted(kv, state, 25, binding)
    kv.bind(binding)
    kv.executed(binding)
    state.num_prefilled = 25
    kv.commit(state)
    kv.release(state)
    kv.check()
    assert kv.quotes.match(RequestState.of(Request("next", Tokens([1] * 9 + [2] * 20)))).num_blocks == 6


def test_a_later_bind_that_fails_leaves_the_checkpoints_of_the_step() -> None:
    kv = manager(23, 3)
    states = [RequestState.of(Request(f"r{i}", Tokens([i] * (4 * BLOCK + 1)))) for i in range(3)]
    binding = Binding(Draft(StepStart(0, 0.0), 1 << 20, [], [], {}))
    admitted(kv, states[0], 17, binding)
    kv.bind(binding, early=True)
    kept = list(binding.kept_states)
    assert kept
    admitted(kv, states[1], 17, binding)
    admitted(kv, states[2], 17, binding)
    with pytest.raises(CapacityError):
        kv.bind(binding, early=True)
    assert binding.kept_states == kept
    kv.rollback(binding)
    kv.check()
    assert kv.pool.num_free == 23


def test_an_explanation_ends_its_hit_where_a_state_was_kept() -> None:
    """What is cached and cannot be continued is computed again, and the explanation says so."""
    config = KVConfig(block_size=BLOCK, miss_attribution=True)
    kv = build_kv(config, 64, state_pages=1, max_chunk=1 << 20)

    def explained(tokens: list[int]) -> list[tuple[SpanState, int, int]]:
        spans = kv.explain(Tokens(tokens), Namespace()) or []
        return [(span.state, span.start, span.stop) for span in spans]

    first, edited = [1] * 33, [1] * 16 + [2] * 17
    serve(kv, "first", first)
    hit, incomplete, never_seen = SpanState.HIT, SpanState.INCOMPLETE, SpanState.NEVER_SEEN
    partial = (SpanState.PARTIAL_BLOCK, 32, 33)
    assert explained(first) == [(hit, 0, 32), partial]
    assert explained(first[:32]) == [(hit, 0, 32)]  # the last block is computed for its logits
    assert explained(edited) == [(incomplete, 0, 16), (never_seen, 16, 32), partial]
    assert explained(first[:24]) == [(incomplete, 0, 24)]  # the state behind it serves only longer prompts
    serve(kv, "edited", edited)
    assert explained([1] * 18) == [(hit, 0, 16), (SpanState.PARTIAL_BLOCK, 16, 18)]


@pytest.mark.parametrize(
    ("num_blocks", "said"),
    [
        (
            6,
            "no prefix is reused: a checkpoint of recurrent state takes 5 blocks, there are 6",
        ),
        (7, "a checkpoint of its recurrent state, in prompts of up to 8 tokens; a checkpoint takes 5 of 7"),
    ],
)
def test_the_log_says_what_is_reused(num_blocks: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    backend = TokenMemoryBackend(num_blocks=num_blocks, block_size=BLOCK, state_pages=5, max_model_len=24)
    config = load_config(cli={"kv.block_size": BLOCK}, environ={}).config
    engine = build_engine(config, backend)
    assert said in caplog.text
    for name in ("first", "second"):
        engine.add(request(name, range(8), 1))
        run_all(engine)
    assert engine.kv.metrics is not None
    assert (engine.kv.metrics.snapshot().num_hit_tokens > 0) == (num_blocks == 7)


def test_pinned_prefixes_count_the_state_behind_them() -> None:
    kv = manager(64, 20)
    serve(kv, "first", [1] * 17)
    with pytest.raises(CapacityError, match="blocks, at most 16"):
        kv.pin_prefix(Tokens([1] * 17))
    kv.check()


def test_hits_agree_with_the_replay() -> None:
    """With the same budget, the manager finds what the replay says, within 3 points of all prompt tokens."""
    trace, groups = block_trace(read_trace(TRACE), 64), PRESETS["qwen3-next"]
    num_bytes = budget("1GiB", trace, groups)
    replayed = run_checkpoints(trace, CheckpointPlan(groups, (VALUE,), ("1GiB",)))[0]
    page, clock = groups.attention_bytes * 64, ManualClock()
    extra = trace.longest  # the replay does not count working memory
    kv = manager(int(num_bytes // page) + extra, -(-groups.state_bytes // page), clock)
    hits = 0
    for number, one in enumerate(trace.requests):
        clock.advance(max(0.0, one.time_s - clock.now()))
        tokens = [part for block in one.ids for part in (block, 7, block + 1, 3)]
        hits += serve(kv, f"r{number}", tokens)
        kv.allocator.make_room(extra, NO_ACCOUNT)
    kv.check()
    assert abs(64 * hits / replayed.tokens - replayed.token_ratio) < 0.03
