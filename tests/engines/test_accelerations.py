"""The controller of accelerations: what is on, what is switched, and what it reports."""

from __future__ import annotations

import pytest

from sagellm.core.errors import RequestError
from sagellm.core.protocols.cot import EarlyExit, EarlyStop
from sagellm.core.types import FinishReason, SamplingParams
from sagellm.engines.llm import LLM, RequestOptions
from sagellm.engines.llm.accelerations import EARLY_EXIT, EARLY_STOP, SPECULATION
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from tests.builders import fake_engine
from tests.engines.test_early_exit import Muses, demo_tokenizer
from tests.engines.test_early_stop import llm_of, vote
from tests.engines.test_speculation import Scripted
from tests.scripted_engine import toy_tokenizer

TOKENIZER = toy_tokenizer()


def speculating() -> tuple[LLM, Speculation]:
    speculation = Speculation(Scripted([1, 2, 3]), 3)
    backend = TokenMemoryBackend(vocab_size=TOKENIZER.vocab_size)
    engine = fake_engine(backend, speculation=speculation)
    return LLM(engine, TOKENIZER, model_name="toy", max_model_len=100), speculation


def generated(llm: LLM) -> list[int]:
    [completion] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, ignore_eos=True))
    return completion.choices[0].token_ids


def test_early_stop_reports_samples_and_off_means_that_all_run() -> None:
    llm, engine = llm_of(["7"] * 8)
    vote(llm, 8, EarlyStop(3))
    report = llm.accelerations.report()[0]
    assert (report.name, report.is_on, report.is_exact) == (EARLY_STOP, True, False)
    assert (report.saved, report.spent) == ({"samples": 5}, {"aborted samples": 0})
    llm.accelerations.switch(EARLY_STOP, on=False)
    engine.added.clear()
    completion = vote(llm, 8, EarlyStop(3))
    assert len(engine.added) == 8
    assert [choice.finish_reason for choice in completion.choices] == [FinishReason.STOP] * 8
    assert completion.consensus is not None
    assert (completion.consensus.num_votes, completion.consensus.num_used) == (8, 8)
    report = llm.accelerations.report()[0]
    assert (report.is_on, report.saved) == (False, {"samples": 5})
    llm.accelerations.switch(EARLY_STOP, on=True)
    assert vote(llm, 8, EarlyStop(3)).consensus != completion.consensus


def test_speculation_is_switched_between_steps_and_changes_no_token() -> None:
    llm, speculation = speculating()
    on = generated(llm)
    num_proposed = speculation.num_proposed
    assert num_proposed > 0
    llm.accelerations.switch(SPECULATION, on=False)
    assert not llm.accelerations.is_on(SPECULATION)
    llm.clear_cache()
    assert generated(llm) == on
    assert speculation.num_proposed == num_proposed
    report = llm.accelerations.report()[2]
    assert (report.name, report.is_exact) == (SPECULATION, True)
    assert report.saved["tokens"] + report.spent["tokens"] == num_proposed
    llm.accelerations.switch(SPECULATION, on=True)
    generated(llm)
    assert speculation.num_proposed > num_proposed


def test_what_is_not_configured_is_off_and_cannot_be_switched() -> None:
    llm, _ = llm_of(["7"])
    assert not llm.accelerations.is_on(SPECULATION)
    for name in (SPECULATION, "earlystop", ""):
        with pytest.raises(RequestError, match="early_stop"):
            llm.accelerations.switch(name, on=True)


def test_early_exit_off_computes_the_reasoning_in_full() -> None:
    engine = fake_engine(Muses(num_blocks=200), max_batched_tokens=256)
    llm = LLM(engine, demo_tokenizer(), model_name="toy", max_model_len=engine.max_model_len)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    rule = EarlyExit(None, 2, every=4, at="token", probe="", max_probe_tokens=8)
    probed = RequestOptions(params, early_exit=rule)
    prompts = [[2, *range(30, 30 + number), 766] for number in range(12)]
    choices = [completion.choices[0] for completion in llm.generate(prompts, probed)]
    exits = [choice.exit for choice in choices if choice.exit is not None]
    assert len(exits) == 12
    closed = sum(found.ended_at is not None for found in exits)
    assert closed > 0
    report = {each.name: each for each in llm.accelerations.report()}[EARLY_EXIT]
    assert report.saved == {"reasoning closed": closed}
    assert report.spent == {"tokens": sum(found.num_probe_tokens for found in exits)}
    llm.accelerations.switch(EARLY_EXIT, on=False)
    plain = [completion.choices[0].text for completion in llm.generate(prompts, params)]
    assert [completion.choices[0].text for completion in llm.generate(prompts, probed)] == plain
    assert plain != [choice.text for choice in choices]
