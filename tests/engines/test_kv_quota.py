"""Quotas seen from an engine: no request waits for ever, takes guaranteed blocks or stops the loop."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sagellm.core.errors import RequestError
from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.types import Namespace, Retention, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.scheduler_ir.strategies import make
from tests.builders import check_books, fake_engine, request, run_all


def tenant(name: str) -> Namespace:
    return Namespace(tenant=name)


def outcomes(engine: Engine, max_steps: int = 500) -> dict[str, str | None]:
    """Step to the end; the error of each request, None for a good end."""
    found: dict[str, str | None] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return found
        for output in engine.step():
            if output.finish_reason is not None:
                found[output.request_id] = output.error
        check_books(engine)
    raise AssertionError(f"{max_steps} steps were not enough: {engine.stats()}")


def test_a_request_that_fits_only_into_guarantees_of_others_gets_an_error() -> None:
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=64, max_model_len=256), tenant_shares={"b": {"guaranteed": 0.5}}
    )
    engine.add(request("b", range(96), 1, namespace=tenant("b")))
    run_all(engine)
    engine.add(request("a", [7] * 160, 4, namespace=tenant("a")))
    engine.add(request("behind", range(4), 1, namespace=tenant("a")))
    found = outcomes(engine)
    assert "out of KV memory" in str(found["a"])
    assert found["behind"] is None


def test_a_request_that_does_not_fit_beside_a_pinned_prompt_gets_an_error() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=64, max_model_len=256))
    engine.add(request("pinned", range(64), 1))
    run_all(engine)
    engine.kv.pin_prefix(Tokens(range(64)))
    engine.add(request("big", [7] * 240, 4))
    engine.add(request("small", range(4), 1))
    found = outcomes(engine)
    assert "out of KV memory" in str(found["big"])
    assert found["small"] is None


def test_a_tenant_within_its_guarantee_is_not_ended_for_one_that_borrows() -> None:
    shares = {"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.25}}
    engine = fake_engine(TokenMemoryBackend(num_blocks=32), tenant_shares=shares)
    engine.add(request("b", range(28), 1, namespace=tenant("b")))
    run_all(engine)
    engine.add(request("a", range(8), 40, namespace=tenant("a")))
    engine.add(request("c", range(50, 58), 60, namespace=tenant("c")))
    assert outcomes(engine)["a"] is None


def test_a_stream_of_borrowers_does_not_starve_a_guaranteed_account() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=32), tenant_shares={"a": {"guaranteed": 0.5}})
    for index in range(200):
        if index == 20:
            engine.add(request("a", [7] * 60, 2, namespace=tenant("a"), priority=9))
        engine.add(request(f"c{index}", [index % 90, *range(11)], 6, namespace=tenant("c")))
        if "a" in {output.request_id for output in engine.step()}:
            break
    assert index < 199, "never served"
    run_all(engine)


def test_cached_blocks_that_lead_to_spared_ones_do_not_block_the_engine() -> None:
    shares = {"b": {"guaranteed": 0.75}}
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=32), tenant_shares=shares, sharing_groups={"g": ["a", "b"]}
    )
    engine.add(request("a", range(32), 1, namespace=tenant("a")))
    run_all(engine)
    engine.add(request("b", [*range(32), *range(40, 88)], 1, namespace=tenant("b")))
    run_all(engine)
    engine.add(request("c", [7] * 60, 4, namespace=tenant("c")))
    engine.add(request("small", range(4), 1, namespace=tenant("d")))
    assert outcomes(engine)["small"] is None


@pytest.mark.parametrize("index", ["radix", "hashed"])
@pytest.mark.parametrize("preset", ["fifo", "priority", "fair"])
def test_accepted_requests_that_fit_beside_all_guarantees_end_well(preset: str, index: str) -> None:
    """Guarantees leave 5 of 8 blocks, and no request needs more: an admission in the same step must not end a
    running request for memory. Seeds 6 and 28 did."""
    shares = {"a": {"guaranteed": 0.25}, "b": {"guaranteed": 0.125}}
    for seed in (6, 28):
        draw = random.Random(seed)
        backend = TokenMemoryBackend(num_blocks=8, block_size=16, max_num_seqs=4)
        engine = fake_engine(backend, passes=make(preset), index=index, tenant_shares=shares)
        arrivals = sorted((draw.randrange(30), number) for number in range(8))
        found: dict[str, str | None] = {}
        decided: set[tuple[str, str]] = set()
        step = 0
        while arrivals or engine.has_work():
            while arrivals and arrivals[0][0] <= step:
                number = arrivals.pop(0)[1]
                length = draw.randrange(1, 60)
                text = draw.choice([list(range(60)), [7] * 60, [draw.randrange(90) for _ in range(60)]])
                max_tokens = draw.randrange(1, 80 - length)
                space = tenant(draw.choice("abc"))
                engine.add(request(f"r{number}", text[:length], max_tokens, namespace=space))
            for output in engine.step():
                if output.finish_reason is not None:
                    found[output.request_id] = output.error
            check_books(engine)
            plan = engine.last_plan
            decided |= {(one.pass_name, one.action) for one in (plan.decisions if plan is not None else ())}
            step += 1
        assert ("bind", "wait") in decided, "the plan says which request lacks blocks"
        assert found == dict.fromkeys(found)
        assert len(found) == 8


def test_a_request_waits_for_another_class_of_its_tenant_below_their_ceiling() -> None:
    """Both classes count on the ceiling of the tenant: the second is not alone below it."""
    shares = {"a": {"ceiling": 0.5}}
    engine = fake_engine(TokenMemoryBackend(num_blocks=16), tenant_shares=shares, class_shares={"flex": {}})
    engine.add(request("first", range(20), 8, namespace=tenant("a")))
    engine.step()
    engine.add(request("second", [7] * 20, 8, namespace=tenant("a"), service_class="flex"))
    assert outcomes(engine) == {"first": None, "second": None}


def full_ceiling(preset: str) -> Engine:
    """16 blocks of which class `flex` has 8 at most: 4 hold what `c` computed, within its guarantee."""
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=16, block_size=4),
        passes=make(preset),
        tenant_shares={"c": {"guaranteed": 0.25}},
        class_shares={"flex": {"ceiling": 0.5}},
    )
    engine.add(request("cached", range(16), 1, namespace=tenant("c"), service_class="flex"))
    assert outcomes(engine) == {"cached": None}
    return engine


@pytest.mark.parametrize("preset", ["fifo", "priority", "fair", "vllm-like"])
@pytest.mark.parametrize("num_prompt_tokens", [22, 6])
def test_guaranteed_blocks_in_the_cache_do_not_end_a_request_below_its_ceiling(
    preset: str, num_prompt_tokens: int
) -> None:
    """At its admission, or at its next block: 6 blocks fit below the ceiling, 12 are guaranteed to none."""
    engine = full_ceiling(preset)
    alone = request("alone", [7] * num_prompt_tokens, 24 - num_prompt_tokens, service_class="flex")
    engine.add(alone)
    assert outcomes(engine) == {"alone": None}
    assert engine.kv.allocator.num_evicted == {"quota": 2}


def test_guaranteed_blocks_in_the_cache_stay_while_another_request_may_make_room() -> None:
    engine = full_ceiling("fifo")
    engine.add(request("first", [7] * 10, 6, service_class="flex"))
    engine.step()
    engine.add(request("second", [8] * 10, 6, service_class="flex"))
    assert outcomes(engine) == {"first": None, "second": None}
    again = request("again", range(17), 1, namespace=tenant("c"), service_class="flex")
    engine.add(again)
    assert engine.step()[0].num_cached_tokens == 16


def test_guaranteed_blocks_below_a_ceiling_go_although_others_are_cached_behind_them() -> None:
    """Blocks of `c` in class `flex` lead to blocks of `a`, which count on no ceiling."""
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=16, block_size=4),
        tenant_shares={"a": {"guaranteed": 0.125}, "c": {"guaranteed": 0.25}},
        class_shares={"flex": {"ceiling": 0.5}},
        sharing_groups={"g": ["a", "c"]},
    )
    engine.add(request("front", range(16), 1, namespace=tenant("c"), service_class="flex"))
    assert outcomes(engine) == {"front": None}
    engine.add(request("behind", range(24), 1, namespace=tenant("a")))
    assert outcomes(engine) == {"behind": None}
    engine.add(request("alone", [7] * 22, 2, service_class="flex"))
    assert outcomes(engine) == {"alone": None}


def crossed(preset: str) -> Engine:
    """Class `flex` has 4 blocks at most; a request of another class runs, and reads 3 that it computed."""
    backend = TokenMemoryBackend(num_blocks=16, block_size=4)
    shares = {"flex": {"ceiling": 0.25}}
    engine = fake_engine(backend, passes=make(preset), class_shares=shares)
    engine.add(request("before", range(12), 1, service_class="flex"))
    assert outcomes(engine) == {"before": None}
    engine.add(request("reader", range(14), 12))
    engine.step()
    return engine


@pytest.mark.parametrize("preset", ["fifo", "priority", "fair", "vllm-like"])
@pytest.mark.parametrize("num_prompt_tokens", [10, 3])
def test_a_request_waits_for_blocks_below_its_ceiling_that_another_class_reads(
    preset: str, num_prompt_tokens: int
) -> None:
    """At its admission, or at its next block: nothing that runs counts on its ceiling, and yet it is not
    alone."""
    engine = crossed(preset)
    engine.add(request("late", [7] * num_prompt_tokens, 12 - num_prompt_tokens, service_class="flex"))
    assert outcomes(engine) == {"reader": None, "late": None}


def test_a_forgotten_account_can_still_give_back_nothing() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=64), tenant_shares={"a": {"guaranteed": 0.25}})
    engine.add(request("first", range(12), 1, service_class=""))
    run_all(engine)
    engine.add(request("second", range(12), 1, service_class="flex"))
    for index in range(1100):
        engine.kv.quotes.max_blocks(request("x", [1], namespace=tenant(f"salt {index}")).account)
    engine.step()
    engine.abort("second")
    check_books(engine)
    assert engine.kv.block_states().active == 0


def test_names_that_clients_make_up_cost_nothing() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=64), tenant_shares={"a": {"guaranteed": 0.25}})
    for index in range(200):
        engine.add(
            request(str(index), range(6), 1, namespace=tenant(f"salt {index}"), service_class=f"{index}")
        )
        run_all(engine, check=False)
    assert len(engine.kv.index.evictable_by_account()) == 1


def test_a_window_gives_blocks_back_under_a_quota_too() -> None:
    for shares in ({"other": {"guaranteed": 0.1}}, {"a": {"ceiling": 0.5}}):
        backend = TokenMemoryBackend(num_blocks=24, max_model_len=96, sliding_window=8)
        engine = fake_engine(backend, tenant_shares=shares)
        for name in "ab":
            engine.add(request(name, range(8), 60, namespace=tenant("a")))
        assert outcomes(engine) == {"a": None, "b": None}


def test_no_salt_opens_the_door_of_a_sharing_group() -> None:
    engine = fake_engine(sharing_groups={"team": ["a", "b"]})
    engine.add(request("a", range(12), 1, namespace=tenant("a")))
    run_all(engine)
    for salt in ("team", "group:team"):
        engine.add(request(salt, range(12), 1, namespace=tenant(salt)))
        assert engine.step()[0].num_cached_tokens == 0
    with pytest.raises(RequestError, match="NUL"):
        request("x", range(12), namespace=tenant("\0group:team"))


def test_ranges_of_retention_are_bounded() -> None:
    with pytest.raises(RequestError, match="at most 64 ranges"):
        request("x", range(12), retention=(Retention(0, 1),) * 65)


def test_guarantees_and_ceilings_hold_in_a_tier() -> None:
    """`a` has half of a host tier for certain; `b` floods it, and has at most ten of its sixteen blocks."""
    shares = {"a": {"guaranteed": 0.5}, "b": {"ceiling": 0.625}}
    engine = fake_engine(TokenMemoryBackend(num_blocks=16), tenant_shares=shares, host_blocks=16)
    assert isinstance(engine.kv.tiers, HierarchyManager)
    [host] = engine.kv.tiers.tiers

    def served(name: str, number: int) -> int:
        """Tokens of a prompt of four blocks that were cached."""
        prompt = [number, *range(16)]
        engine.add(request(f"{name} {number}", prompt, 1, namespace=tenant(name)))
        num_cached = 0
        while engine.has_work():
            num_cached += sum(output.num_cached_tokens or 0 for output in engine.step())
            check_books(engine)
            in_tier = Counter[str]()
            for account, count in host.index.evictable_by_account().items():
                in_tier[account.tenant] += count
            assert in_tier["b"] <= 10
        return num_cached

    assert [served("a", number) for number in range(2)] == [0, 0]
    assert [served("b", number) for number in range(10)] == [0] * 10
    assert host.num_evicted >= 4 * 7, "of eight free blocks, b has two prompts at a time"
    engine.kv.clear_cache()
    assert [served("a", number) for number in range(2)] == [16, 16]
    assert host.num_loaded == 8
    engine.close()


class PreemptFirst:
    """A pass of a user that preempts before memory is looked at."""

    name = "preempt_first"

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        if draft.step.number % 3 == 2 and len(draft.running) > 1:
            draft.preempt(draft.running[-1])


def test_a_pass_may_preempt_before_memory_is_looked_at() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=10), passes=[PreemptFirst()])
    for name in "abc":
        engine.add(request(name, range(8), 16))
    assert outcomes(engine) == dict.fromkeys("abc")


def test_a_group_with_other_members_shares_nothing_with_the_one_before() -> None:
    """Blocks outlive the configuration, on a disk and on a server."""

    def of_a(groups: dict[str, list[str]]) -> Namespace:
        return fake_engine(sharing_groups=groups).kv.namespace_of(tenant("a"))

    names = [
        of_a({}),
        of_a({"team": ["a"]}),
        of_a({"team": ["a", "b"]}),
        of_a({"team": ["a", "c"]}),
        of_a({"other": ["a", "b"]}),
        of_a({"team": ["a", "b", "c"]}),
    ]
    assert len(set(names)) == len(names)
    assert of_a({"team": ["b", "a"], "more": ["c"]}) == of_a({"team": ["a", "b"]})
    engine = fake_engine(sharing_groups={"team": ["a", "b"]})
    assert engine.kv.namespace_of(tenant("b")) == names[2]


def test_write_back_evicts_what_is_above_the_guarantees() -> None:
    engine = fake_engine(
        TokenMemoryBackend(num_blocks=64, max_model_len=256), host_blocks=256, write_policy="write_back",
        host_gb=1.0, free_watermark=0.25, max_batched_tokens=8, tenant_shares={"a": {"guaranteed": 0.25}},
    )  # fmt: skip
    assert isinstance(engine.kv.tiers, HierarchyManager)
    for index in range(12):
        name = "a" if index == 0 else "b"
        engine.add(request(f"r{index}", [index + 1] * 40, 1, namespace=tenant(name)))
        assert outcomes(engine) == {f"r{index}": None}
        engine.drain()
    evicted = engine.kv.allocator.num_evicted
    assert evicted["ahead"] > 0
    assert engine.kv.index.lookup(Tokens([1] * 40), tenant("a")).num_tokens == 40
    assert engine.kv.tiers.states()[0].stored > 0
