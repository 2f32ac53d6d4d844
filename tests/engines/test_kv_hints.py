"""KV hints seen from an engine: what they do under every policy, whose they are, who waits."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.errors import RequestError
from sagellm.core.kv_hints import HintStatus, KVHintsEnvelope
from sagellm.core.types import Account, Namespace, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.llm import LLM, RequestOptions
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.manager.hints import KVHints
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.builders import TENANT_A, TENANT_B, check_books, expected_tokens, fake_engine, request, run_all
from tests.engines.kv_scenes import (
    FILLER,
    INDEXES,
    OLD,
    POLICIES,
    YOUNG,
    Preempt,
    hints,
    resident,
    serve,
    session,
    small_engine,
    status,
)
from tests.scripted_engine import toy_tokenizer

IN_ORDER_OF_ARRIVAL = {"fifo", "s3fifo", "sieve", "two_q"}
"""Policies that a priority or a duration does not move."""


# -- hints


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["session.end", "session.supersede"])
def test_an_ended_session_goes_first_under_every_policy(policy: str, index: str, kind: str) -> None:
    for ended, kept in ((OLD, YOUNG), (YOUNG, OLD)):
        engine = small_engine(policy, index=index)
        serve(engine, session("old", OLD), session("young", YOUNG))
        assert status(engine, hints(kind, token_ids=list(ended))) == ("applied", 4)
        serve(engine, request("filler", FILLER, 1))
        assert (resident(engine, ended), resident(engine, kept)) == (0, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_expected_goes_last_under_every_policy(policy: str) -> None:
    for wanted, other in ((OLD, YOUNG), (YOUNG, OLD)):
        engine = small_engine(policy)
        serve(engine, session("old", OLD), session("young", YOUNG))
        assert status(engine, hints("kv.expect", token_ids=list(wanted))) == ("applied", 4)
        serve(engine, request("filler", FILLER, 1))
        assert (resident(engine, wanted), resident(engine, other)) == (4, 0)


@pytest.mark.parametrize("policy", sorted({*POLICIES} - IN_ORDER_OF_ARRIVAL))
def test_what_is_retained_stays(policy: str) -> None:
    engine = small_engine(policy)
    serve(engine, session("old", OLD), session("young", YOUNG))
    assert status(engine, hints("kv.retain", token_ids=list(OLD), priority=100)) == ("applied", 4)
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)


@pytest.mark.parametrize("index", INDEXES)
def test_a_request_does_its_hints_when_it_ends(index: str) -> None:
    engine = small_engine(index=index)
    serve(engine, session("old", OLD), session("young", YOUNG, kv_hints=hints("session.end")))
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)


def test_hints_of_an_aborted_request_are_done_too() -> None:
    engine = small_engine()
    serve(engine, session("old", OLD))
    engine.add(session("young", YOUNG, 20, kv_hints=hints("session.end")))
    engine.step()
    engine.abort("young")
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)


def test_a_session_that_goes_on_is_no_longer_ended() -> None:
    engine = small_engine()
    serve(engine, session("young", YOUNG), session("old", OLD))
    assert status(engine, hints("session.end", session_id="old"))[0] == "applied"
    serve(engine, session("old", OLD), request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (4, 0)


def test_hints_on_what_runs_break_nothing() -> None:
    backend = TokenMemoryBackend(num_blocks=12)
    engine = fake_engine(backend)
    engine.add(session("s", OLD, 8))
    for kind in ("session.end", "kv.retain", "kv.expect", "session.supersede"):
        engine.step()
        status(engine, hints(kind, token_ids=list(OLD)))
        check_books(engine)
    assert run_all(engine)["s"] == expected_tokens(backend, OLD, 8)[4:]


# -- sessions by meaning


CATS, DOGS = [1.0, 0.1, 0.0, 0.0], [0.0, 0.1, 1.0, 0.0]


def described(index: str = "radix") -> Engine:
    engine = small_engine(index=index)
    serve(engine, session("old", OLD), session("young", YOUNG))
    assert status(engine, hints("session.describe", session_id="old", embedding=CATS)) == ("applied", 0)
    assert status(engine, hints("session.describe", session_id="young", embedding=DOGS)) == ("applied", 0)
    return engine


@pytest.mark.parametrize("index", INDEXES)
def test_the_session_with_the_nearest_embedding_is_expected(index: str) -> None:
    for wanted, left in ((CATS, (4, 0)), (DOGS, (0, 4))):
        engine = described(index)
        near = [value + 0.05 for value in wanted]
        assert status(engine, hints("kv.expect", embedding=near)) == ("applied", 4)
        serve(engine, request("filler", FILLER, 1))
        assert (resident(engine, OLD), resident(engine, YOUNG)) == left


def test_what_is_not_similar_enough_is_not_found() -> None:
    engine = described()
    between = [1.0, 0.0, 1.0, 0.0]
    assert status(engine, hints("kv.expect", embedding=between))[0] == "not_found"
    assert status(engine, hints("kv.expect", embedding=between, min_similarity=0.3)) == ("applied", 4)
    assert status(engine, hints("kv.expect", embedding=[*CATS, 0.0]))[0] == "not_found", "other dimensions"
    assert status(engine, hints("kv.expect", embedding=CATS), TENANT_A)[0] == "not_found"


@pytest.mark.parametrize("kind", ["session.end", "session.supersede", "kv.retain"])
def test_an_embedding_ends_no_session(kind: str) -> None:
    [outcome] = described().hint(hints(kind, embedding=CATS), Namespace())
    assert outcome.status is HintStatus.INVALID
    assert outcome.reason == "an embedding can be the target of kv.expect only"


def test_a_session_is_described_while_it_is_known() -> None:
    engine = described()
    describe = hints("session.describe", session_id="old", embedding=CATS)
    assert status(engine, describe, TENANT_A)[0] == "not_found"
    assert status(engine, hints("session.describe", embedding=CATS))[0] == "not_found"
    assert status(engine, hints("session.describe", session_id="old", embedding="cats"))[0] == "invalid"
    told = KVHints(engine.kv.index, lambda namespace: namespace, lambda: 0.0, max_sessions=1)
    told.remember("old", Tokens(OLD), Namespace())
    told.apply(describe, Namespace())
    told.remember("young", Tokens(YOUNG), Namespace())
    [outcome] = told.apply(hints("kv.expect", embedding=CATS), Namespace())
    assert outcome.status is HintStatus.NOT_FOUND


def test_similar_sessions_change_no_token() -> None:
    """Two prompts of one meaning that differ: each is answered as if nothing were known of the other."""
    backend = TokenMemoryBackend(num_blocks=12)
    engine = fake_engine(backend)
    serve(engine, session("old", OLD, 8))
    status(engine, hints("session.describe", session_id="old", embedding=CATS))
    assert status(engine, hints("kv.expect", embedding=CATS))[0] == "applied"
    for name, prompt, cached in (("like", [*OLD[:8], *YOUNG], 8), ("other", YOUNG, 0)):
        engine.add(session(name, prompt, 8))
        outputs = run_all(engine)[name]
        assert outputs == expected_tokens(backend, prompt, 8)[-len(outputs) :]
        assert engine.kv.index.lookup(Tokens(prompt), Namespace()).num_blocks * 4 >= cached
        check_books(engine)


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("longer_first", [True, False])
def test_what_another_session_goes_on_from_is_not_ended(index: str, longer_first: bool) -> None:
    engine = small_engine(num_blocks=20, index=index)
    short, longer = session("short", OLD), session("longer", [*OLD[:16], *YOUNG])
    serve(engine, *((longer, short) if longer_first else (short, longer)))
    assert status(engine, hints("session.end", session_id="short"))[0] == "not_found"
    assert status(engine, hints("session.end", session_id="longer")) == ("applied", 8)


@pytest.mark.parametrize("index", INDEXES)
def test_what_sessions_share_is_not_ended_with_one_of_them(index: str) -> None:
    engine = small_engine(num_blocks=20, index=index)
    serve(engine, session("a", [*OLD[:16], *YOUNG]), session("b", [*OLD[:16], *FILLER[:17]]))
    assert status(engine, hints("session.end", session_id="a")) == ("applied", 4)


@pytest.mark.parametrize(
    ("limit", "forgets"), [({"max_sessions": 2}, True), ({"max_tokens": 36}, True), ({}, False)]
)
def test_sessions_are_bounded(limit: dict[str, int], forgets: bool) -> None:
    engine = small_engine(num_blocks=40)
    kv = engine.kv
    kv.hints = KVHints(
        kv.index, kv.namespace_of, engine.clock.now, checkpoints=None, tiers=None, loads=None, **limit
    )
    serve(engine, session("a", OLD), session("b", YOUNG), session("a", OLD), session("c", range(40, 57)))
    found = {name: status(engine, hints("session.end", session_id=name))[0] for name in "abc"}
    forgotten = HintStatus.NOT_FOUND if forgets else HintStatus.APPLIED
    assert found == {"a": "applied", "b": forgotten.value, "c": "applied"}


def test_tenants_of_a_sharing_group_keep_their_sessions_apart() -> None:
    engine = small_engine(sharing_groups={"friends": ["a", "b"]})
    serve(engine, session("s", OLD, namespace=TENANT_A))
    assert resident(engine, OLD, TENANT_B) == 4
    assert status(engine, hints("session.end", session_id="s"), TENANT_B)[0] == "not_found"
    assert status(engine, hints("session.end", session_id="s"), TENANT_A) == ("applied", 4)


def test_hints_through_the_llm() -> None:
    tokenizer = toy_tokenizer()
    backend = TokenMemoryBackend(num_blocks=12, vocab_size=tokenizer.vocab_size)
    llm = LLM(fake_engine(backend), tokenizer, model_name="toy", max_model_len=48)
    one = llm.sampling_params(max_tokens=1)
    list(llm.stream(list(OLD), RequestOptions(one, session_id="s", tenant="a")))
    message = {"actions": [{"action_id": "x", "action_type": "session.end", "payload": {"session_id": "s"}}]}
    assert [outcome.status for outcome in llm.hint(message)] == [HintStatus.NOT_FOUND]
    [outcome] = llm.hint(KVHintsEnvelope.parse(message), tenant="a")
    assert (outcome.action_id, outcome.status, outcome.num_blocks) == ("x", HintStatus.APPLIED, 4)
    for wrong in ({"actions": 3}, {"actions": [{"action_type": ""}]}):
        with pytest.raises(RequestError, match="kv_hints"):
            llm.hint(wrong)
        with pytest.raises(RequestError, match="kv_hints"):
            llm.submit("hi", RequestOptions(one, kv_hints=wrong))
    for session_id in ("", "x" * 257):
        with pytest.raises(RequestError, match="1 to 256 characters"):
            llm.submit("hi", RequestOptions(one, session_id=session_id))
    with pytest.raises(RequestError, match="NUL"):
        llm.hint(message, tenant="\0group:friends")
    assert not llm.has_work()


def test_hints_wait_for_the_end_where_a_request_is_preempted() -> None:
    passes = [Preempt("s", 19), PrefixCacheAwarePass(), PriorityBasedPass()]
    engine = small_engine(num_blocks=20, passes=passes)
    seen: list[int] = []
    apply = engine.kv.hints.apply

    def noted(
        envelope: KVHintsEnvelope, namespace: Namespace, own: Tokens | None = None,
        account: Account | None = None,
    ) -> Any:  # fmt: skip
        seen.append(len(own or ()))
        return apply(envelope, namespace, own, account)

    engine.kv.hints.apply = noted  # type: ignore[method-assign]
    serve(engine, session("s", OLD, 8, kv_hints=hints("session.end")))
    assert engine.stats().num_preemptions == 1
    assert len(seen) == 1


# -- who waits


def expecting(engine: Engine, *, expects: bool) -> int:
    """Blocks of OLD that are left when its next user, who had to wait for a row, gets in; meanwhile another
    request grew by as many blocks as OLD or YOUNG have."""
    if not expects:
        engine.kv.hints.expect = lambda hits: None  # type: ignore[method-assign]
    serve(engine, session("old", OLD), session("young", YOUNG))
    engine.add(request("grows", range(60, 75), 18))
    engine.step()
    engine.add(request("waits", OLD, 1))
    reused = 0
    while engine.has_work():
        for output in engine.step():
            if output.request_id == "waits":
                reused = output.num_cached_tokens // 4
        check_books(engine)
    return reused


@pytest.mark.parametrize("index", INDEXES)
def test_what_a_waiting_request_will_reuse_survives_pressure(index: str) -> None:
    def engine() -> Engine:
        backend = TokenMemoryBackend(num_blocks=12, max_num_seqs=1)
        return fake_engine(backend, eviction="lru", index=index)

    assert expecting(engine(), expects=True) == 4
    assert expecting(engine(), expects=False) < 4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_spares_what_is_waited_for(policy: str) -> None:
    backend = TokenMemoryBackend(num_blocks=12, max_num_seqs=1)
    assert expecting(fake_engine(backend, eviction=policy), expects=True) == 4


def test_a_session_stays_ended_when_a_waiting_user_of_it_leaves() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=12, max_num_seqs=1), eviction="lru")
    serve(engine, session("old", OLD), session("young", YOUNG))
    assert status(engine, hints("session.end", session_id="young")) == ("applied", 4)
    engine.add(request("short", range(60, 63), 2))
    engine.step()
    engine.add(request("waits", YOUNG, 1))
    engine.step()
    engine.abort("waits")
    run_all(engine)
    serve(engine, request("filler", FILLER, 1))
    assert (resident(engine, OLD), resident(engine, YOUNG)) == (3, 0)  # a block of the short one is younger


def test_what_nobody_waits_for_any_more_is_spared_no_longer() -> None:
    engine = fake_engine(TokenMemoryBackend(num_blocks=12, max_num_seqs=1), eviction="lru")
    serve(engine, session("old", OLD), session("young", YOUNG))
    engine.add(request("grows", range(60, 75), 18))
    engine.step()
    engine.add(request("waits", OLD, 1))
    engine.step()
    engine.abort("waits")
    run_all(engine)
    assert resident(engine, OLD) < 4
    assert resident(engine, YOUNG) == 4
