"""An answer that another engine has begun goes on with the same tokens, and only these are handed out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.clock import ManualClock
from sagellm.core.errors import ContextLengthError, RequestError
from sagellm.core.events import EventBus, RequestFinished
from sagellm.core.plan import RequestState
from sagellm.core.types import SLO, FinishReason, Request, RequestStatus, Tokens
from sagellm.engines.build import build_engine
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir.passes.admission import AdmissionPass
from sagellm.kvmgr.scheduler_ir.passes.fairness import FairnessPass
from sagellm.kvmgr.scheduler_ir.passes.lifetime_aware import LifetimeAwarePass
from sagellm.kvmgr.scheduler_ir.passes.slo_aware import SLOAwarePass
from sagellm.kvmgr.scheduler_ir.strategies import STRATEGIES, make
from tests.builders import (
    TENANT_A,
    PreemptAtRandom,
    RandomProposer,
    check_books,
    expected_tokens,
    fake_engine,
    request,
    run_all,
)
from tests.effort import examples
from tests.engines.simulator import test_backend as simulated
from tests.engines.simulator.worlds import config

PROMPT = list(range(11))


@dataclass
class Said:
    """What an engine said of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    num_output_tokens: int = 0


def say(engine: Engine, one: Request) -> Said:
    """Serve one request; books are checked after each step."""
    said = Said()
    engine.add(one)
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            said.tokens += output.new_token_ids
            said.logprobs += [entry.logprob for entry in output.logprobs]
            said.reason, said.num_output_tokens = output.finish_reason, output.num_output_tokens
        check_books(engine)
    return said


@settings(max_examples=examples(150))
@given(
    length=st.integers(1, 24),
    max_tokens=st.sampled_from([1, 2, 9, 20, None]),
    min_tokens=st.integers(0, 9),
    num_ends=st.integers(0, 2),
    scripted=st.sampled_from([None, 3, 12]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
    overlap=st.booleans(),
    proposes=st.booleans(),
    preempt=st.sampled_from([0.0, 0.3]),
    is_cached=st.booleans(),
    preset=st.sampled_from(["", *sorted(STRATEGIES)]),
    seed=st.integers(0, 99),
)
def test_every_part_of_an_answer_is_gone_on_from(
    length: int,
    max_tokens: int | None,
    min_tokens: int,
    num_ends: int,
    scripted: int | None,
    ignore_eos: bool,
    logprobs: int | None,
    overlap: bool,
    proposes: bool,
    preempt: float,
    is_cached: bool,
    preset: str,
    seed: int,
) -> None:
    draw = random.Random(seed)
    prompt = [draw.randrange(97) for _ in range(length)]
    drawn = expected_tokens(TokenMemoryBackend(), prompt, 20)
    one = request(
        "a",
        prompt,
        max_tokens,  # type: ignore[arg-type]
        min_tokens=min(min_tokens, max_tokens or 20),
        stop_token_ids=tuple(draw.sample(drawn, num_ends)),
        eos_token_ids=frozenset(draw.sample(drawn, num_ends)),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    one = replace(one, scripted_output=scripted)
    whole = say(fake_engine(TokenMemoryBackend(max_model_len=length + 30)), one)
    for num in range(len(whole.tokens)):
        backend = TokenMemoryBackend(max_model_len=length + 30)
        passes = None if not preset else make(preset)
        if preempt:
            passes = [PreemptAtRandom(seed, preempt, 4), *(passes or make("fifo"))]
        engine = fake_engine(
            backend,
            passes=passes,
            overlap=overlap,
            speculation=Speculation(RandomProposer(backend, seed, trees=bool(seed % 2)), 3)
            if proposes
            else None,
        )
        if is_cached:
            say(engine, request("before", [*prompt, *whole.tokens[: num // 2]], 1))
        said = say(engine, replace(one, generated=tuple(whole.tokens[:num])))
        assert said.tokens == whole.tokens[num:]
        assert said.logprobs == whole.logprobs[num if logprobs is not None else 0 :]
        assert (said.reason, said.num_output_tokens) == (whole.reason, whole.num_output_tokens)
        assert engine.kv.block_states().active == 0
        engine.close()


@pytest.mark.parametrize("preset", ["default", "vllm-like"])
def test_in_simulated_time(preset: str) -> None:
    clock, events = ManualClock(), EventBus()
    ended: list[RequestFinished] = []
    events.subscribe(RequestFinished, ended.append)
    made = simulated.backend(clock, num_blocks=40)
    engine = build_engine(config(preset), made, clock=clock, events=events)
    token = made.token_of("a")
    for num in (0, 1, 7):
        one = replace(request("a", range(50), 30), generated=(token,) * num, scripted_output=8)
        said = say(engine, one)
        assert said.tokens == [token] * (8 - num)
        assert (said.reason, said.num_output_tokens) == (FinishReason.STOP, 8)
    assert [event.first_token_s is None for event in ended] == [False, True, True]


def test_what_is_no_beginning_of_an_answer_is_refused() -> None:
    engine = fake_engine()
    one = request("a", PROMPT, 4, stop_token_ids=(5,), eos_token_ids=frozenset({6}), min_tokens=2)
    for generated, message in (
        ((1, 97), "token id 97 is not in the vocabulary of 97"),
        ((1, -1), "token id -1 is not in the vocabulary"),
        ((1, 2, 3, 4), "4 tokens are given, max_tokens is 4"),
        ((1, 5, 2), "ends with its token 2, 5, and 3 are given"),
        ((1, 2, 6), "ends with its token 3, 6"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add(replace(one, generated=generated))
    with pytest.raises(RequestError, match="generated must be several token ids"):
        replace(one, generated=("x",))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="ends with its token 2"):
        engine.add(replace(one, generated=(1, 2), scripted_output=2))
    long = request("a", [1] * 100, None)  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError, match="has 100, 28 are generated already and at least one"):
        engine.add(replace(long, generated=(1,) * 28))
    engine.add(replace(one, generated=(5, 1)))  # a stop token before min_tokens ends nothing
    assert run_all(engine)["a"]


def test_a_fork_of_it_has_no_other_beginning() -> None:
    engine = fake_engine()
    answer = expected_tokens(TokenMemoryBackend(), PROMPT, 8)
    engine.add(replace(request("a", PROMPT, 8), generated=tuple(answer[:3])))
    first = list(engine.step()[0].new_token_ids)
    engine.fork("a", "b")
    found = run_all(engine)
    assert first + found["a"] == answer[3:]
    assert found["b"] == expected_tokens(TokenMemoryBackend(), [*PROMPT, *answer[:4]], 8)


# -- requests that move


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("options", "num_given", "reason"),
    [
        ({"max_tokens": 9}, 0, FinishReason.MOVED),
        ({"max_tokens": 9, "min_tokens": 5}, 0, FinishReason.MOVED),
        ({"max_tokens": None}, 2, FinishReason.MOVED),
        ({"max_tokens": 1}, 0, FinishReason.LENGTH),
        ({"max_tokens": 3}, 2, FinishReason.LENGTH),
        ({"max_tokens": 9, "stops": True}, 1, FinishReason.STOP),
        ({"max_tokens": 9, "stops": True, "min_tokens": 5}, 1, FinishReason.MOVED),
    ],
)
def test_a_request_that_moves_leaves_with_its_next_token(
    options: dict[str, Any], num_given: int, reason: FinishReason, overlap: bool
) -> None:
    answer = expected_tokens(TokenMemoryBackend(), PROMPT, 4)
    own = dict(options)
    if own.pop("stops", False):
        own["stop_token_ids"] = (answer[num_given],)
    engine = fake_engine(overlap=overlap, max_batched_tokens=4)
    one = replace(request("a", PROMPT, **own), generated=tuple(answer[:num_given]), moves=True)
    said = say(engine, one)
    engine.close()
    assert (said.tokens, said.reason) == ([answer[num_given]], reason)
    assert engine.kv.index.lookup(Tokens(PROMPT)).num_tokens == 8


def test_no_pass_learns_from_an_answer_that_goes_on_elsewhere() -> None:
    admission = AdmissionPass(min_samples=1)
    engine = fake_engine(passes=[admission, *make("fifo")])
    for number in range(4):
        say(engine, replace(request(f"m{number}", PROMPT, 9), moves=True))
    say(engine, request("w", PROMPT, 9))
    engine.add(request("x", PROMPT, 9))
    engine.step()
    assert list(admission._recent) == [9]
    moving = RequestState.of(replace(request("y", PROMPT, 90), moves=True, generated=(1, 2)))
    assert admission.remaining(moving) == 1.0


# -- what passes see of it


@pytest.mark.parametrize("preset", ["slo", "throughput", "lifetime"])
def test_it_goes_before_requests_that_have_not_begun(preset: str) -> None:
    passes = make(preset) if preset in STRATEGIES else [LifetimeAwarePass(), *make("fifo")]
    engine = fake_engine(TokenMemoryBackend(max_num_seqs=1), passes=passes)
    engine.add(request("run", range(60, 70), 8))
    engine.step()
    engine.add(request("new", range(20, 30), 4, slo=SLO(ttft_s=1e9)))
    engine.add(replace(request("begun", range(40, 50), 4), generated=(1,), arrival_s=1.0))
    order: list[str] = []
    while engine.has_work():
        order += [output.request_id for output in engine.step() if output.finish_reason is not None]
    assert order == ["run", "begun", "new"]


def test_a_tenant_pays_for_what_is_computed_here() -> None:
    """13 tokens that it comes with, and two that are drawn, at twice the price."""
    fair = FairnessPass()
    engine = fake_engine(passes=[fair, *make("fifo")])
    say(engine, replace(request("a", range(10), 5, namespace=TENANT_A), generated=(1, 2, 3)))
    fair._charge_outputs()
    assert fair.counters == {"a": 13 + 2 * 2.0}


def test_its_first_token_was_not_late() -> None:
    slo = SLOAwarePass()
    late = replace(request("a", range(10), 5, slo=SLO(ttft_s=0.5, tpot_s=0.1)), generated=(1,))
    state = RequestState.of(late)
    state.status = RequestStatus.RUNNING
    assert slo._counts(state, now_s=9.0)
    state = RequestState.of(replace(late, generated=()))
    state.status = RequestStatus.RUNNING
    assert not slo._counts(state, now_s=9.0)
