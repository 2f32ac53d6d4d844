"""The next turn of a chat, without reasoning that templates leave out: computed while idle, and hit."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sagellm.core.clock import ManualClock
from sagellm.core.types import SamplingParams, Tokens
from sagellm.engines.build import load
from sagellm.engines.llm import LLM, Completion, RequestOptions
from sagellm.engines.llm.next_turns import (
    CHUNK_S,
    MAX_TURNS,
    MIN_CHUNK_TOKENS,
    NEXT_TURN,
    NextTurn,
    NextTurns,
    turn_behind,
)
from sagellm.engines.simulator import TokenMemoryBackend
from tests.builders import fake_engine
from tests.scripted_engine import toy_tokenizer
from tests.serving.live import Live, serving, wait_until

CHAT = "/v1/chat/completions"
STRIPS = """{% for message in messages %}{% set said = message['content'] %}\
{% if message['role'] == 'assistant' and '</think>' in said and not loop.last %}\
{% set said = said.split('</think>')[-1] %}{% endif %}\
{{ '<|im_start|>' + message['role'] + '\n' + said + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QUESTION: dict[str, Any] = {"role": "user", "content": "What is 1234567 + 7654321?"}
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "seed": 1}
FOLLOWING: dict[str, Any] = {"role": "user", "content": "What is 55 + 66?"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("template") / "strips.jinja"
    path.write_text(STRIPS)
    return str(path)


@pytest.fixture
def live(template: str) -> Iterator[Live]:
    llm = load(None, {"model.chat_template": template, "kv.block_size": 4, "kv.num_blocks": 512})
    with serving(llm, prefill_next_turn=True) as running:
        yield running


def ask(live: Live, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = live.http.post(CHAT, json=ASKED | {"messages": messages} | fields).json()
    return answer


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


class Counted(NamedTuple):
    """Tokens."""

    saved: float
    spent: float


def counted(llm: LLM) -> Counted:
    [found] = [each for each in llm.accelerations.report() if each.name == NEXT_TURN]
    return Counted(found.saved.get("tokens", 0), found.spent.get("tokens", 0))


def turns_of(live: Live) -> NextTurns:
    assert live.gateway.next_turns is not None
    return live.gateway.next_turns


def wait_for_turn(live: Live) -> None:
    wait_until(lambda: counted(live.llm).spent > 0 and not turns_of(live).has_work)


@pytest.mark.parametrize("streams", [False, True])
def test_the_next_turn_hits_the_answer_and_has_the_tokens_of_a_fresh_run(
    live: Live, template: str, streams: bool
) -> None:
    if streams:
        text = live.http.post(CHAT, json=ASKED | {"messages": [QUESTION], "stream": True}).text
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        answer = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        answer = said(ask(live, [QUESTION]))
    assert "</think>" in answer
    wait_for_turn(live)
    messages = [QUESTION, {"role": "assistant", "content": answer}, FOLLOWING]
    second = ask(live, messages)
    stripped = [QUESTION, {"role": "assistant", "content": answer.split("</think>")[-1]}]
    prefix = live.llm.tokenizer.encode_chat(stripped, add_generation_prompt=False)
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(prefix) // 4 * 4, "the answer itself is a hit"
    saved, spent = counted(live.llm)
    assert 0 < saved <= spent
    assert live.metric("sagellm_acceleration_saved", acceleration="next_turn", unit="tokens") == saved
    assert live.metric("sagellm_acceleration_spent", acceleration="next_turn", unit="tokens") >= spent
    settings = {"model.chat_template": template, "kv.num_blocks": 512, "kv.prefix_caching": False}
    with load(None, settings) as fresh:
        params = fresh.sampling_params(temperature=0, max_tokens=200, seed=1)
        assert fresh.chat(messages, params).text == said(second)


def test_without_the_setting_the_answer_is_a_miss(template: str) -> None:
    llm = load(None, {"model.chat_template": template, "kv.block_size": 4, "kv.num_blocks": 512})
    with serving(llm, prefill_next_turn=False) as live:
        answer = said(ask(live, [QUESTION]))
        second = ask(live, [QUESTION, {"role": "assistant", "content": answer}, FOLLOWING])
        prompt = llm.tokenizer.encode_chat([QUESTION])
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] <= len(prompt)
        with pytest.raises(KeyError):
            live.metric("sagellm_acceleration_saved", acceleration="next_turn", unit="tokens")


@pytest.mark.parametrize("fields", [{"n": 2}, {"messages": [{"role": "user", "content": "hi"}]}])
def test_what_has_no_reasoning_or_several_answers_is_left_alone(live: Live, fields: dict[str, Any]) -> None:
    live.http.post(CHAT, json=ASKED | {"messages": [QUESTION]} | fields)
    live.http.get("/metrics")  # a command of the engine's thread
    time.sleep(0.05)
    assert counted(live.llm).spent == 0


# -- without a server


TOKENIZER = toy_tokenizer()


class Clocked:
    """A scheduler of chunks over an engine whose steps take `step_s`."""

    def __init__(self, num_blocks: int = 400, **options: Any) -> None:
        self.clock, self.step_s = ManualClock(), 0.01
        backend = TokenMemoryBackend(
            num_blocks=num_blocks, vocab_size=TOKENIZER.vocab_size, max_model_len=1000
        )
        self.engine = fake_engine(backend, max_batched_tokens=2048, **options)
        self.llm = LLM(self.engine, TOKENIZER, model_name="toy", max_model_len=1000)
        self.turns = NextTurns(self.llm, self.clock)
        self.chunks: list[float] = []

    def step(self) -> None:
        self.turns.begin_chunk()
        self.clock.advance(self.step_s)
        before = counted(self.llm).spent
        self.turns.take(self.llm.step())
        self.engine.check()
        if counted(self.llm).spent > before:
            self.chunks.append(counted(self.llm).spent - before)

    def finish(self) -> None:
        for _ in range(200):
            if not self.turns.has_work:
                return
            self.step()
        raise AssertionError("the turns are not computed")


def turn(size: int, first: int = 1, known: int = 0, tenant: str = "") -> NextTurn:
    tokens = Tokens([first, *(2 + i % 50 for i in range(size - 1))])
    params = SamplingParams(temperature=0, max_tokens=0)
    return NextTurn(tokens, Tokens([first]), known, RequestOptions(params, tenant=tenant), known)


def test_chunks_grow_to_what_the_time_allows() -> None:
    world = Clocked()
    world.step_s = CHUNK_S / 4
    world.turns.add(turn(900))
    world.finish()
    assert world.chunks[0] == MIN_CHUNK_TOKENS
    assert world.chunks[1] <= 2 * world.chunks[0] + 4
    assert max(world.chunks) > 2 * MIN_CHUNK_TOKENS
    slow = Clocked()
    slow.step_s = 10 * CHUNK_S
    slow.turns.add(turn(300))
    slow.finish()
    assert max(slow.chunks) <= MIN_CHUNK_TOKENS + 4, "with the last block, which is computed again"


def test_a_busy_engine_computes_no_turn_and_a_request_aborts_the_chunk() -> None:
    world = Clocked()
    world.turns.add(turn(500))
    running = world.llm.submit([7, 8, 9], SamplingParams(max_tokens=5, ignore_eos=True))
    for _ in range(4):
        world.step()
    assert world.chunks == []
    while world.llm.has_work():
        world.turns.take(world.llm.step())
    world.turns.begin_chunk()
    assert world.llm.stats().num_waiting == 1
    world.turns.make_way()
    assert not world.llm.has_work()
    world.turns.make_way()
    assert running not in world.turns._hits
    world.finish()
    assert counted(world.llm).spent >= 500


def test_a_prompt_that_begins_with_a_turn_counts_as_hit_once() -> None:
    world = Clocked()
    expected = turn(120, known=8)  # so little that it counts as cached in any case
    world.turns.add(expected)
    world.finish()
    prompt = Tokens([*expected.tokens, 3, 4, 5])
    for name, tenant in (("other", "x"), ("first", ""), ("second", "")):
        world.llm.submit(prompt, RequestOptions(SamplingParams(max_tokens=1), tenant=tenant), request_id=name)
        world.turns.arrived(name, prompt, tenant)
        while world.llm.has_work():
            world.turns.take(world.llm.step())
    assert counted(world.llm).saved == 120 - 8


def test_a_turn_that_comes_before_it_is_computed_is_not_computed_any_more() -> None:
    world = Clocked()
    expected = turn(120)
    world.turns.add(expected)
    world.turns.arrived("early", Tokens([*expected.tokens, 3]), "")
    assert not world.turns.has_work
    world.turns.begin_chunk()
    assert not world.llm.has_work()


def test_the_oldest_of_too_many_turns_goes() -> None:
    world = Clocked()
    for first in range(MAX_TURNS + 1):
        world.turns.add(turn(4, first))
    world.turns.arrived("late", turn(4, 0).tokens, "")
    world.turns.arrived("known", turn(4, 1).tokens, "")
    world.finish()
    assert counted(world.llm).spent == 4 * (MAX_TURNS - 1)


def test_a_turn_whose_beginning_is_not_cached_is_dropped() -> None:
    world = Clocked(prefix_caching=False)
    world.turns.add(turn(400, known=100))
    world.finish()
    assert counted(world.llm).spent == 0
    assert not world.turns.has_work


def test_a_turn_that_does_not_fit_the_model_is_dropped() -> None:
    world = Clocked()
    world.turns.add(turn(1500))
    world.finish()
    assert 900 < counted(world.llm).spent < 1100


def test_the_old_answer_is_evicted_before_what_others_have_cached() -> None:
    world = Clocked(num_blocks=26)
    index, fresh = world.engine.kv.index, Tokens([1, 2, 3, 4, *range(20, 40)])
    other, old, filler = (
        Tokens(range(100, 124)),
        Tokens([1, 2, 3, 4, *range(60, 100)]),
        Tokens(range(200, 240)),
    )

    def serve(tokens: Tokens) -> None:
        world.llm.submit(tokens, SamplingParams(max_tokens=1))
        while world.llm.has_work():
            world.clock.advance(1)
            world.llm.step()

    serve(other)
    serve(old)
    params = SamplingParams(temperature=0, max_tokens=0)
    world.turns.add(NextTurn(fresh, old, 4, RequestOptions(params), 4))
    world.finish()
    serve(filler)
    assert index.lookup(old).num_tokens < len(old)
    assert index.lookup(other).num_tokens == len(other)
    assert index.lookup(fresh).num_tokens == len(fresh)


def completion(text: str, token_ids: Iterable[int]) -> Completion:
    answer = Completion.empty("x", 1)
    answer.choices[0].text, answer.choices[0].token_ids = text, list(token_ids)
    return answer


@pytest.fixture(scope="module")
def stripping(template: str) -> Iterator[LLM]:
    with load(None, {"model.chat_template": template, "kv.num_blocks": 32, "kv.block_size": 64}) as llm:
        yield llm


def behind(llm: LLM, text: str, output: str = "", prompt: str = "") -> NextTurn | None:
    """The turn behind `text`; the model drew `output`, and the template ended the prompt with `prompt`."""
    encode = llm.tokenizer.encode
    tokens = Tokens([*llm.encode([QUESTION]), *encode(prompt)])
    options = RequestOptions(llm.sampling_params(), tenant="a")
    return turn_behind(llm, tokens, [QUESTION], {}, completion(text, encode(output or text)), options)


def test_only_an_answer_whose_reasoning_is_left_out_has_a_turn(stripping: LLM) -> None:
    reasoning, answer = "<think>" + "1 2 3 " * 9 + "</think>", "12 " * 40
    found = behind(stripping, reasoning + answer)
    assert found is not None
    assert found.options.tenant == "a"
    assert found.num_known == len(stripping.encode([QUESTION]))
    text = stripping.tokenizer.decode(found.tokens)
    assert (text.count("12 "), text.count("1 2 3 ")) == (40, 0)
    assert behind(stripping, answer) is None, "it has no reasoning"
    assert behind(stripping, "<think>1 2</think>") is None, "no block is left of it"
    emptied = behind(stripping, answer, prompt="<think></think>")
    assert emptied is not None, "the template had closed the reasoning itself"
    assert emptied.tokens == found.tokens
