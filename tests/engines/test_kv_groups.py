"""KV groups, seen from an engine: which prefixes are served, what goes first, how much memory it takes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.core.config import KVConfig
from sagellm.core.errors import BookkeepingError
from sagellm.core.types import NO_ACCOUNT, AttentionChunk, KVGroup, Namespace, Window
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.scheduler_ir import PassPipeline
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all

BLOCK = 4
FIVE_TO_ONE = (None, *[12] * 5)
CHUNKS = (None, *[AttentionChunk(16)] * 3, 5)


def engine_with(
    windows: tuple[Window | None, ...], num_blocks: int = 64, *, max_model_len: int = 512, **options: object
) -> Engine:
    backend = TokenMemoryBackend(
        num_blocks * len(windows), BLOCK, max_model_len=max_model_len, windows=windows, vocab_size=997
    )
    return fake_engine(backend, **options)  # type: ignore[arg-type]


def serve(engine: Engine, name: str, tokens: Iterable[int], max_tokens: int = 1) -> tuple[int, list[int]]:
    """The cached tokens of a request that runs alone, and its answer."""
    engine.add(request(name, tokens, max_tokens))
    cached, answer = 0, list[int]()
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            cached = output.num_cached_tokens
            answer += output.new_token_ids
        check_books(engine)
    return cached, answer


def backend_of(engine: Engine) -> TokenMemoryBackend:
    assert isinstance(engine.backend, TokenMemoryBackend)
    return engine.backend


def conversation(num_turns: int, seed: int = 0) -> list[list[int]]:
    """What each turn adds to the prompt."""
    draw = random.Random(seed)
    return [[draw.randrange(997) for _ in range(draw.randrange(9, 40))] for _ in range(num_turns)]


@pytest.mark.parametrize("windows", [FIVE_TO_ONE, (None, 7, 30), (None, None, 5), (None, 1), CHUNKS])
def test_a_prompt_that_extends_a_cached_prefix_reuses_what_a_whole_cache_would(
    windows: tuple[Window | None, ...],
) -> None:
    whole, split = engine_with((None,), 128), engine_with(windows, 128)
    tokens: list[int] = []
    for turn, added in enumerate(conversation(9)):
        tokens += added
        found = [serve(engine, f"t{turn}", tokens, 6) for engine in (whole, split)]
        assert found[0] == found[1]
        assert turn == 0 or found[0][0] >= len(tokens) - len(added) - BLOCK
        tokens += found[0][1]


@pytest.mark.parametrize("windows", [FIVE_TO_ONE, (None, 30), CHUNKS])
def test_an_edited_last_turn_loses_one_block_at_most(windows: tuple[Window | None, ...]) -> None:
    whole, split = engine_with((None,), 128), engine_with(windows, 128)
    tokens: list[int] = []
    for turn, added in enumerate(conversation(6, seed=1)):
        for version, end in enumerate((added, [*added[:-3], 1, 2, 3], [5, *added])):
            found = [serve(engine, f"t{turn}-{version}", tokens + end, 4) for engine in (whole, split)]
            assert found[0][1] == found[1][1]
            if version != 1:  # the others begin their last turn anew
                assert found[1][0] >= found[0][0] - BLOCK
        tokens += [5, *added, *found[0][1]]


def test_a_prompt_that_is_sent_again_is_found_to_its_end() -> None:
    engine = engine_with(FIVE_TO_ONE)
    prompt = list(range(101))
    assert serve(engine, "first", prompt, 40)[0] == 0
    assert serve(engine, "again", prompt, 40)[0] == 100


def test_what_two_prompts_share_is_found_by_the_third() -> None:
    """Also where the window at the end of the shared part had gone before the second prompt came."""
    engine = engine_with(FIVE_TO_ONE, num_blocks=40)
    shared, draw = list(range(100)), random.Random(0)

    def other() -> list[int]:
        return [draw.randrange(900) for _ in range(30)]

    assert serve(engine, "a", shared + other())[0] == 0
    serve(engine, "filler", other() * 4)
    engine.kv.allocator.make_room(engine.kv.pool.num_free + 1, NO_ACCOUNT)
    second = serve(engine, "b", shared + other())[0]
    assert serve(engine, "c", shared + other())[0] == 100 >= second


def test_golden_an_evicted_windowed_prefix_comes_back() -> None:
    """Cached tokens of four prompts in turn, where memory holds two of them."""
    engine, draw = engine_with((None, 8, 8), num_blocks=30, eviction="lru"), random.Random(3)
    prompts = [[draw.randrange(997) for _ in range(61)] for _ in range(4)]
    order = [0, 1, 0, 2, 0, 3, 1, 1, 2, 0, 3, 3]
    found = [serve(engine, f"r{i}", prompts[number], 3)[0] for i, number in enumerate(order)]
    assert found == [0, 0, 60, 0, 60, 0, 0, 60, 0, 0, 0, 60]


def test_golden_prefixes_that_end_with_a_chunk_need_no_page_of_it() -> None:
    """Cached tokens of prompts that leave a cached one of 61 tokens, whose other pages have gone."""
    windows = (None, AttentionChunk(16), AttentionChunk(16))
    for shared, expected in ((61, 60), (48, 48), (47, 32), (32, 32), (20, 16), (15, 0)):
        engine, draw = engine_with(windows, num_blocks=20), random.Random(3)
        prompt = [draw.randrange(997) for _ in range(61)]
        serve(engine, "first", prompt)
        engine.kv.allocator.make_room(60 - 15 - 2 * 3, NO_ACCOUNT)  # all but leads and the last chunk's
        assert serve(engine, "second", [*prompt[:shared], *[1] * 5])[0] == expected


def test_blocks_behind_a_window_go_before_any_cached_prefix() -> None:
    engine = engine_with((None, 8), num_blocks=40)
    draw = random.Random(0)
    first, second = ([draw.randrange(997) for _ in range(101)] for _ in range(2))
    serve(engine, "a", first)  # 25 blocks of the first group; 25 pages, of which 3 are kept
    serve(engine, "b", second)  # fits into 80 only if pages of the first go
    assert serve(engine, "a2", first)[0] == 100
    assert serve(engine, "b2", second)[0] == 100


def test_memory_of_a_long_context() -> None:
    """Window mix 5:1 at 32K, window 1,024: what is held, beside keeping all layers whole."""
    windows = (None, *[1024] * 5)
    backend = TokenMemoryBackend(6 * 2100, 16, 1, max_model_len=33_000, windows=windows, vocab_size=997)
    engine = fake_engine(backend, max_batched_tokens=512)
    tokens = [i % 990 for i in range(32 * 1024)]
    engine.add(request("long", tokens, 40))
    most = 0
    while engine.has_work():
        engine.step()
        kv = engine.kv
        needed = kv.pool.total_blocks - kv.quotes.available_blocks() * kv.num_groups
        most = max(most, needed)
    assert most <= 0.25 * 6 * 2051


def test_a_request_may_be_longer_than_a_pool_that_keeps_all_layers_whole() -> None:
    engine = engine_with((None, *[8] * 5), num_blocks=12, max_model_len=200, max_batched_tokens=16)
    assert engine.max_model_len == 128  # 72 pages: 32 blocks of the first group, and windows
    assert serve(engine, "long", range(100), 20)[1] == expected_tokens(backend_of(engine), range(100), 20)


@given(st.data())
def test_groups_with_any_windows_serve_any_prompts(data: st.DataObject) -> None:
    windows = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(sorted))
    whole = data.draw(st.integers(0, 2))
    engine = engine_with((None, *[None] * whole, *windows), num_blocks=data.draw(st.integers(12, 30)))
    for i in range(data.draw(st.integers(2, 8))):
        start = data.draw(st.sampled_from([0, 0, 500]))
        tokens = [*range(start, start + data.draw(st.integers(1, 40))), *[i] * data.draw(st.integers(0, 3))]
        assert serve(engine, f"r{i}", tokens, 3)[1] == expected_tokens(backend_of(engine), tokens, 3)


def test_a_pinned_prefix_keeps_its_window() -> None:
    engine = engine_with(FIVE_TO_ONE, num_blocks=40)
    system, draw = list(range(40)), random.Random(0)
    serve(engine, "a", [*system, 7, 8, 9])
    pinned = engine.pin_prefix(request("x", system).tokens, Namespace())
    for i in range(8):
        serve(engine, f"filler{i}", [draw.randrange(997) for _ in range(110)])
    assert serve(engine, "b", [*system, 5])[0] == 40
    pinned()
    engine.kv.clear_cache()
    check_books(engine)
    assert engine.kv.block_states().free == engine.kv.pool.total_blocks


def test_compaction_moves_pages_of_all_groups() -> None:
    engine = engine_with(FIVE_TO_ONE)
    for i in range(4):
        serve(engine, f"filler{i}", range(100 * i, 100 * i + 50))
    engine.add(request("r", range(70), 30))
    for _ in range(8):
        engine.step()
    engine.kv.clear_cache()
    assert engine.compact() > 0
    check_books(engine)
    answer = run_all(engine)["r"]
    whole = expected_tokens(backend_of(engine), range(70), 30)
    assert answer[-22:] == whole[-22:]
    assert serve(engine, "again", [*range(70), *whole])[0] == 96


def test_groups_and_what_they_do_not_go_with() -> None:
    groups = (KVGroup((0,)), KVGroup((1,), 8))
    shares = KVConfig.model_validate({"tenant_shares": {"a": {"guaranteed": 0.5}}})
    with pytest.raises(ValueError, match="neither quotas nor tiers"):
        build_kv(shares, 10, groups=groups)
    with pytest.raises(ValueError, match="must follow each other"):
        build_kv(KVConfig(), 10, groups=(*groups, KVGroup((2,), 9), KVGroup((3,), 8)))
    with pytest.raises(ValueError, match="2 KV groups, the backend 1"):
        Engine(
            TokenMemoryBackend(block_size=16),
            build_kv(KVConfig(), 10, groups=groups),
            PassPipeline([]),
            max_batched_tokens=8,
        )


def test_a_wrong_count_is_found() -> None:
    engine = engine_with(FIVE_TO_ONE)
    serve(engine, "a", range(50))
    pages = engine.kv._pages
    assert pages is not None
    rule = pages.rules[0]
    lead = next(iter(rule._kept))
    rule.need([lead])
    with pytest.raises(BookkeepingError, match="counted wrong"):
        engine.check()
    rule.pass_by([lead])


@pytest.mark.parametrize("windows", [FIVE_TO_ONE, (None, 8)])
def test_an_end_from_which_two_went_is_kept_though_the_second_found_its_window(
    windows: tuple[Window | None, ...],
) -> None:
    engine, shared = engine_with(windows), list(range(100))
    serve(engine, "a", [*shared, *[500] * 30])
    assert serve(engine, "b", [*shared, *[600] * 30])[0] == 100  # by pages that nothing keeps
    pages, pool = engine.kv._pages, engine.kv.pool
    assert pages is not None
    behind = sum(len(rule._behind) * rule.num_groups for rule in pages.rules)
    engine.kv.allocator.make_room(pool.num_free + behind, NO_ACCOUNT)
    assert serve(engine, "c", [*shared, *[700] * 30])[0] == 100


@pytest.mark.parametrize("num_pages", range(72, 79))
def test_what_max_model_len_allows_is_served_with_and_without_a_hit(num_pages: int) -> None:
    windows = (None, *[8] * 5)
    for cached in (0, 4, 50):
        backend = TokenMemoryBackend(num_pages, BLOCK, max_model_len=200, windows=windows, vocab_size=997)
        engine = fake_engine(backend, max_batched_tokens=16)
        if cached:
            serve(engine, "before", range(cached))
        longest = range(engine.max_model_len - 1)
        assert serve(engine, "longest", longest)[1] == expected_tokens(backend, longest, 1)


@pytest.mark.parametrize("group", [None, "g"])
def test_a_request_whose_last_block_others_copy_frees_what_its_windows_have_passed(group: str | None) -> None:
    """All but the copied block: it fits where a request of no group does, and that block is still copied."""
    engine = engine_with((None, *[8] * 5), num_blocks=13, max_model_len=200, max_batched_tokens=16)
    engine.add(request("donor", range(30), 80, group=group))
    answers: dict[str, list[int]] = {}
    for step in range(110):
        if step == 70:
            engine.add(request("late", [*range(30), 5], 3, group=group))
        for output in engine.step():
            assert output.error is None, output.error
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.request_id == "late" and group is not None:
                assert output.num_cached_tokens == 30
        check_books(engine)
    assert not engine.has_work()
    assert answers["donor"] == expected_tokens(backend_of(engine), range(30), 80)
    assert answers["late"] == expected_tokens(backend_of(engine), [*range(30), 5], 3)
    assert engine.stats().num_preemptions == 0
