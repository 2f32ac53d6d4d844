"""Log-probabilities of prompt tokens are those of transformers, whatever the chunks, cache, batch, memory and
preemption; requests that ask for none cost nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.errors import UnsupportedParameterError
from sagellm.core.plan import ExecutionPlan
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import Request, RequestOutput, SamplingParams, TokenLogprob, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.native import sampler as scoring
from sagellm.engines.native.rows import BatchRows
from sagellm.engines.native.sampler import ScoredPrompt
from sagellm.kvmgr.scheduler_ir import strategies
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from tests.builders import PreemptAtRandom, check_books, fake_engine
from tests.effort import examples, usual
from tests.engines.native.test_same_tokens import alone, backend, engine, prompt
from tests.tiny_models import DISTINCT, RECURRENT, TINY_MODELS, make_tiny

TOLERANCE = 1e-5
"""transformers computes norms and rotations in float32, whatever the dtype of the model."""
TOP = 3


@cache
def reference(name: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [n - 1, vocab] after each token but the last, by transformers in float64."""
    with torch.inference_mode():
        logits = _reference_model(name)(torch.tensor([tokens])).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1)
    return found


@cache
def _reference_model(name: str) -> torch.nn.Module:
    tiny = make_tiny(name)
    tiny.set_experts_implementation("eager")  # the others have no float64
    model: torch.nn.Module = tiny.to(torch.float64)
    return model


def compare(name: str, tokens: Sequence[int], found: Sequence[TokenLogprob], top: int) -> None:
    expected = reference(name, tuple(tokens))
    assert [entry.token_id for entry in found] == list(tokens[1:])
    for row, entry in zip(expected, found, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
        assert [value for _, value in entry.top] == pytest.approx(
            row.topk(top).values.tolist(), abs=TOLERANCE
        )
        for token_id, value in entry.top:
            assert value == pytest.approx(float(row[token_id]), abs=TOLERANCE)


def outputs_of(busy: Engine) -> list[RequestOutput]:
    """All outputs until nothing is left; books are checked after each step."""
    found: list[RequestOutput] = []
    while busy.has_work():
        found += busy.step()
        check_books(busy)
    return found


def ask(busy: Engine, name: str, tokens: Sequence[int], max_tokens: int = 2, top: int | None = TOP) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=top)
    busy.add(Request(name, Tokens(tokens), params))


@pytest.mark.filterwarnings("ignore:Casting complex values")  # of the part for images
@pytest.mark.parametrize("name", usual(set(DISTINCT) - RECURRENT, sorted(TINY_MODELS.keys() - RECURRENT)))
def test_they_are_those_of_transformers(name: str) -> None:
    """In chunks, in a batch with requests that ask for none, and with the prompt in the cache."""
    busy = engine(name, 100, 13, strategies.make("fifo"), caching=True)
    prompts = {"a": prompt(0, 30, 1), "b": prompt(0, 22, 2), "c": prompt(1, 1, 0), "d": prompt(1, 2, 0)}
    ask(busy, "warm", prompts["a"], top=None)
    outputs_of(busy)
    for key, tokens in prompts.items():
        ask(busy, key, tokens)
        ask(busy, f"plain {key}", tokens, top=None)
    outputs = outputs_of(busy)
    for key, tokens in prompts.items():
        first, *others = [one for one in outputs if one.request_id == key]
        assert first.prompt_logprobs is not None
        compare(name, tokens, first.prompt_logprobs, TOP)
        assert first.num_cached_tokens == 0
        assert [one.prompt_logprobs for one in others] == [None] * len(others)
        plain = [one for one in outputs if one.request_id == f"plain {key}"]
        assert all(one.prompt_logprobs is None for one in plain)
        drawn = tuple(token for one in (first, *others) for token in one.new_token_ids)
        assert drawn == alone(name, tuple(tokens), 2, 0, "reference")
    assert next(one for one in outputs if one.request_id == "plain a").num_cached_tokens > 0


requests = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 40), st.integers(0, 2), st.sampled_from([None, 0, 1, 4])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(40))
@given(
    name=st.sampled_from(sorted(TINY_MODELS.keys() - RECURRENT)),
    specs=requests,
    num_blocks=st.integers(14, 60),
    budget=st.integers(3, 64),
    chunk=st.one_of(st.none(), st.integers(1, 17)),
    overlap=st.booleans(),
    preempt=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 99),
    grouped=st.booleans(),
)
def test_each_token_has_its_own_whatever_happens(
    name: str,
    specs: list[tuple[int, int, int, int | None]],
    num_blocks: int,
    budget: int,
    chunk: int | None,
    overlap: bool,
    preempt: float,
    seed: int,
    grouped: bool,
) -> None:
    passes: list[SchedulerPass] = [PrefixCacheAwarePass(), PreemptAtRandom(seed, preempt, 6)]
    passes.append(ChunkedPrefillPass(chunk))
    busy = engine(name, num_blocks, budget, passes, caching=True, overlap=overlap)
    for turn in range(2):
        asked = {}
        for index, (family, length, own, top) in enumerate(specs):
            tokens, key = prompt(family, length, own), f"{index}.{turn}"
            asked[key] = (tokens, top)
            params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=top)
            busy.add(Request(key, Tokens(tokens), params, group=f"group {family}" if grouped else None))
        outputs = outputs_of(busy)
        for key, (tokens, top) in asked.items():
            found = [one.prompt_logprobs for one in outputs if one.request_id == key]
            if top is None:
                assert found == [None] * len(found)
            else:
                assert found[0] is not None
                compare(name, tokens, found[0], top)
                assert found[1:] == [None] * len(found[1:])
            drawn = tuple(t for one in outputs if one.request_id == key for t in one.new_token_ids)
            assert drawn == alone(name, tuple(tokens), 3, 0, "reference")


def test_logits_are_held_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llama"
    busy = engine(name, 60, 64, [], caching=True)
    vocab_size = backend(name, False).capability().vocab_size
    monkeypatch.setattr(scoring, "MAX_LOGITS", 5 * vocab_size)
    heads: list[int] = []
    head = backend(name, False)._model.head

    def counted(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        heads.append(len(hidden))
        return head(hidden, out)

    monkeypatch.setattr(backend(name, False)._model, "head", counted)
    tokens = prompt(0, 38, 1)
    ask(busy, "a", tokens, max_tokens=3)
    [first, *_] = outputs_of(busy)
    assert first.prompt_logprobs is not None
    compare(name, tokens, first.prompt_logprobs, TOP)
    assert heads == [1, *[5] * 7, 2, 1, 1]


def test_without_them_a_step_does_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of the sampled rows a step, and steps that only decode are not even looked at."""
    name = "llama"
    busy = engine(name, 60, 64, [], caching=True)
    native = backend(name, False)
    looked: list[int] = []
    scored = BatchRows.scored

    def counted(rows: BatchRows, plan: ExecutionPlan) -> list[ScoredPrompt]:
        looked.append(plan.step)
        return scored(rows, plan)

    monkeypatch.setattr(BatchRows, "scored", counted)
    monkeypatch.setattr(native, "_logits_and_scores", None)
    ask(busy, "a", prompt(0, 38, 1), max_tokens=8, top=None)
    outputs_of(busy)
    assert looked == [0]


def test_a_backend_without_them_refuses() -> None:
    busy = fake_engine()
    with pytest.raises(UnsupportedParameterError, match="prompt_logprobs"):
        ask(busy, "a", [1, 2, 3])
    assert not busy.has_work()


def test_in_float32_and_for_the_kernels(tmp_path: Path) -> None:
    """As the demo model runs: packed matrices, recorded steps, bfloat16 values."""
    from sagellm.engines.build import load
    from sagellm.engines.native import DEMO_MODEL

    llm = load(str(DEMO_MODEL), {"scheduler.max_num_seqs": 8, "scheduler.max_batched_tokens": 16})
    try:
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2)
        text = "User: 17 + 25\n"
        plain = llm.generate(text, replace(params, max_tokens=4, prompt_logprobs=None))[0].text
        scored = llm.generate(text, replace(params, max_tokens=4))[0]
        only = llm.generate(text, params)[0]
    finally:
        llm.close()
    assert plain == scored.text
    entries = scored.choices[0].prompt_logprobs
    assert [one.token_id for one in entries] == llm.encode(text).tolist()
    assert entries[0].logprob is None
    assert entries == only.choices[0].prompt_logprobs
    assert (only.text, only.usage.completion_tokens, only.choices[0].logprobs) == ("", 0, [])
    model = _transformers_demo()
    ids = llm.encode(text).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    for row, entry in zip(expected, entries[1:], strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)


def _transformers_demo() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    from sagellm.engines.native import DEMO_MODEL

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float32)
    return model


def test_a_fork_shares_the_kv_of_a_scored_prompt() -> None:
    name = "llama"
    busy = engine(name, 60, 64, [], caching=True)
    ask(busy, "a", prompt(0, 20, 1), max_tokens=6)
    busy.step()
    busy.fork("a", "b")
    fork = [one for one in outputs_of(busy) if one.request_id == "b"]
    assert fork[0].num_cached_tokens == 20
    assert {one.prompt_logprobs for one in fork} == {None}
