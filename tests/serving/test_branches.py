"""`branch_from`: what a completion goes on from, what of that it reuses, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from sagellm.core.errors import RequestError
from sagellm.core.types import FinishReason, SamplingParams, Tokens
from sagellm.engines.build import load
from sagellm.engines.llm import LLM, RequestOptions, TextDelta, Usage
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.serving.branches import BranchFields, RecentCompletions
from tests.builders import check_books, fake_engine
from tests.scripted_engine import toy_tokenizer
from tests.serving.live import Live, serving, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "What is 123 + 456? " * 4
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(load(None, {"kv.num_blocks": 512})) as running:
        yield running


def complete(live: Live, prompt: object = "", **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = live.http.post(COMPLETIONS, json=ASKED | {"prompt": prompt} | fields).json()
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_branch_has_the_tokens_of_a_prompt_with_the_same_tokens(live: Live) -> None:
    first = complete(live, PROMPT)
    prompt = live.llm.encode(PROMPT).tolist()
    with load(None, {"kv.num_blocks": 512}) as fresh:
        params = fresh.sampling_params(temperature=0, max_tokens=40, ignore_eos=True)
        drawn = fresh.generate(PROMPT, params)[0].choices[0].token_ids
        for count in (0, 1, 17, 40):
            begun = [*prompt, *drawn[:count]]
            expected = fresh.generate([begun], params)[0].text
            found = complete(live, branch_from={"id": first["id"], "num_tokens": count})
            assert found["choices"][0]["text"] == expected
            assert found["usage"]["prompt_tokens"] == len(begun)
            assert cached(found) >= (len(begun) - 1) // 16 * 16
        tail = fresh.tokenizer.encode(" So", add_special_tokens=False)
        expected = fresh.generate([[*prompt, *drawn[:9], *tail]], params)[0].text
        found = complete(live, " So", branch_from={"id": first["id"], "num_tokens": 9})
        assert found["choices"][0]["text"] == expected
        again = complete(live, tail.tolist(), branch_from={"id": first["id"], "num_tokens": 9})
        assert again["choices"][0]["text"] == expected


def test_choices_and_chats_are_branched_from_by_index(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 3, "max_tokens": 8}
    chat = live.http.post(CHAT, json=body).json()
    prompt = chat["usage"]["prompt_tokens"]
    for index in (0, 1):
        branch = {"id": chat["id"], "index": index, "num_tokens": 1}
        assert complete(live, branch_from=branch)["usage"]["prompt_tokens"] == prompt + 1
    several = complete(live, ["one", "two three"], n=2, max_tokens=3)
    branch = {"id": several["id"], "index": 2, "num_tokens": 0}
    expected = len(live.llm.encode("two three"))
    assert complete(live, branch_from=branch)["usage"]["prompt_tokens"] == expected


def test_a_branch_of_an_answer_that_runs_shares_it_at_once(live: Live) -> None:
    body = ASKED | {"prompt": PROMPT, "max_tokens": 900, "stream": True}
    with live.http.stream("POST", COMPLETIONS, json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        name = next(lines).split('"id":"')[1].split('"')[0]
        for _ in range(60):
            next(lines)
        branch = complete(live, max_tokens=4, branch_from={"id": name, "num_tokens": 50})
        assert live.gateway.num_open == 1, "it still runs"
    assert cached(branch) >= (branch["usage"]["prompt_tokens"] - 1) // 16 * 16
    wait_until(lambda: live.gateway.num_open == 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"branch_from": {"id": "cmpl-unknown"}},
        {"branch_from": {"index": 0}},
        {"branch_from": {"id": "x", "more": 1}},
        {"branch_from": "x"},
        {"branch_from": {"id": "KNOWN", "index": 1}},
        {"branch_from": {"id": "KNOWN", "num_tokens": 41}},
        {"branch_from": {"id": "KNOWN", "num_tokens": -1}},
        {"branch_from": {"id": "KNOWN"}, "cache_salt": "other"},
        {"branch_from": {"id": "KNOWN"}, "echo": True},
        {"branch_from": {"id": "KNOWN"}, "prompt": ["a", "b"]},
    ],
)
def test_what_cannot_be_branched_from_is_refused(live: Live, fields: dict[str, Any]) -> None:
    branch = fields["branch_from"]
    if isinstance(branch, dict) and branch.get("id") == "KNOWN":
        fields = fields | {"branch_from": branch | {"id": complete(live, PROMPT)["id"]}}
    answer = live.http.post(COMPLETIONS, json=ASKED | {"prompt": ""} | fields)
    assert answer.status_code == 400
    assert "branch_from" in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])


def test_with_nothing_remembered_it_says_what_would_work() -> None:
    recent = RecentCompletions(0)
    recent.open("a", "", 1, [Tokens([1])], ["http-0"])
    with pytest.raises(RequestError, match="send its tokens as a prompt"):
        recent.find(BranchFields(id="cmpl-a"), "")


def delta(token_ids: tuple[int, ...], index: int = 0) -> TextDelta:
    return TextDelta("x", index, "", token_ids, Usage())


@pytest.mark.parametrize("seed", range(20))
def test_only_the_last_tokens_are_remembered(seed: int) -> None:
    draw, recent = random.Random(seed), RecentCompletions(100)
    texts: dict[str, list[int]] = {}
    for step in range(60):
        if not texts or draw.random() < 0.3:
            name = str(step)
            texts[name] = [draw.randrange(9) for _ in range(draw.randrange(1, 20))]
            recent.open(name, "", 1, [Tokens(texts[name])], [name])
        name = draw.choice([*texts])
        more = tuple(draw.randrange(9) for _ in range(draw.randrange(6)))
        texts[name] += more
        recent.add(name, 0, delta(more))
        recent.check()
    known = [name for name in texts if name in recent._known]
    assert 0 < len(known) < len(texts)
    assert sum(len(texts[name]) for name in known) <= 100
    for name in known:
        assert recent.find(BranchFields(id=f"cmpl-{name}"), "").tokens.tolist() == texts[name]


# -- what a running request shares, to the token


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_a_running_request_shares_its_partial_block(count: int, *, overlap: bool) -> None:
    tokenizer = toy_tokenizer()
    backend = TokenMemoryBackend(vocab_size=tokenizer.vocab_size)
    engine = fake_engine(backend, overlap=overlap)
    llm = LLM(engine, tokenizer, model_name="toy", max_model_len=100)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    parent, drawn = llm.submit([5, 6, 7, 8, 9, 10], params), list[int]()
    while len(drawn) < count + 3:
        drawn += [token for each in llm.step() for token in each.token_ids]
    options = RequestOptions(SamplingParams(max_tokens=6, ignore_eos=True), branch_of=(parent, 0))
    child = llm.submit([5, 6, 7, 8, 9, 10, *drawn[:count], 3], options)
    usage, found = Usage(), list[int]()
    while llm.has_work():
        for each in llm.step():
            if each.request_id == child:
                usage = each.usage
                found += each.token_ids
            assert each.finish_reason in (None, FinishReason.LENGTH)
        check_books(engine)
    assert usage.cached_tokens == 6 + count
    plain = LLM(fake_engine(backend), tokenizer, model_name="toy", max_model_len=100)
    [expected] = plain.generate([[5, 6, 7, 8, 9, 10, *drawn[:count], 3]], options.params)
    assert found == expected.choices[0].token_ids
