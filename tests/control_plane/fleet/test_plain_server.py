"""`PlainServer` against servers that speak vLLM's and SGLang's protocols, and break them."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sagellm.control_plane.fleet import plain_server
from sagellm.control_plane.fleet.plain_server import PlainServer, PlainServers, PlainTerms
from sagellm.control_plane.kv_events import salt_digest
from sagellm.core.blocks import cdiv
from sagellm.core.clock import MonotonicClock
from sagellm.core.fleet_config import PlainServerConfig
from sagellm.core.kv_hints import HintStatus, KVHintsEnvelope
from sagellm.core.protocols.fleet import (
    CallResult,
    Connected,
    HandOver,
    HandOverPart,
    InstanceEvent,
    InstanceLost,
    KVChanges,
    RequestRefused,
)
from sagellm.core.protocols.router import ExecutionInstance
from sagellm.core.types import FinishReason, Namespace, Request, RequestOutput, SamplingParams, Tokens
from tests.control_plane.fleet.plain_stand_in import (
    EOS,
    MAX_LEN,
    METRICS,
    MODEL,
    VOCAB,
    StandIn,
    continued,
    score,
    standing_in,
    wait_until,
)
from tests.control_plane.fleet.test_plain_events import Publisher, stored

KINDS = ("vllm", "sglang")
PROMPT = [5, 9, 11, 13, 400, 3]


class Seen:
    """A client, and all that it has said."""

    def __init__(self, servers: PlainServers, server: StandIn, **config: Any) -> None:
        key = config.pop("api_key", None)
        self.client: PlainServer = servers.add("plain-0", PlainServerConfig(url=server.url, **config), key)
        self.events: list[InstanceEvent] = []

    def poll(self) -> None:
        self.events += self.client.poll()

    def until(self, is_so: Callable[[], Any], what: str = "") -> None:
        def look() -> Any:
            self.poll()
            return is_so()

        wait_until(look, what)

    def connected(self) -> Seen:
        self.until(lambda: self.client.facts is not None and self.of(ExecutionInstance), "connected")
        return self

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def tokens(self, request_id: str = "r") -> list[int]:
        outputs = [each for each in self.of(RequestOutput) if each.request_id == request_id]
        return [token for output in outputs for token in output.new_token_ids]

    def ended(self, request_id: str = "r") -> Any:
        """The last word about a request; None before it."""
        for event in self.of(RequestOutput) + self.of(RequestRefused):
            if event.request_id == request_id and getattr(event, "finish_reason", "refused") is not None:
                return event
        return None

    def ask(self, given: Request) -> Any:
        self.client.submit(given)
        self.until(lambda: self.ended(given.request_id), "the answer")
        return self.ended(given.request_id)


@pytest.fixture(autouse=True)
def _sockets_of_cancelled_connects() -> Iterator[None]:
    """Found here: anyio leaves the socket of a connect that is cancelled at the moment it succeeds."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def servers() -> Iterator[PlainServers]:
    made = PlainServers(terms(), MonotonicClock(), lambda: None)
    yield made
    made.close()


def terms(**given: Any) -> PlainTerms:
    return PlainTerms(MODEL, VOCAB, **{"interval_s": 0.02, "lease_s": 20.0, **given})


def request(
    num: int = 8, prompt: list[int] = PROMPT, *, request_id: str = "r", tenant: str = "", **params: Any
) -> Request:
    generated = tuple(params.pop("generated", ()))
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": num, **params})
    return Request(
        request_id, Tokens(prompt), chosen, frozenset({EOS}), namespace=Namespace(tenant), generated=generated
    )


# ------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_message", [1, 3])
def test_tokens_in_and_tokens_out(servers: PlainServers, kind: str, per_message: int) -> None:
    with standing_in(kind, per_message=per_message, cached=4) as server:
        seen = Seen(servers, server).connected()
        last = seen.ask(request(8))
        assert seen.tokens() == continued(PROMPT, 8)
        assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == (
            FinishReason.LENGTH,
            6,
            8,
        )
        assert last.num_cached_tokens == 4
        assert len(seen.of(RequestOutput)) == cdiv(8, per_message)
        facts = seen.client.facts
        assert facts is not None
        assert (facts.max_model_len, facts.capability.block_size, facts.capability.num_blocks) == (
            MAX_LEN,
            4,
            1000,
        )


@pytest.mark.parametrize("info", [{}, {"incremental_streaming_output": True}])
def test_sglang_sends_all_tokens_so_far_or_the_new_ones(servers: PlainServers, info: dict[str, Any]) -> None:
    with standing_in("sglang", info=info, per_message=2) as server:
        seen = Seen(servers, server).connected()
        last = seen.ask(request(9, logprobs=2))
        assert seen.tokens() == continued(PROMPT, 9)
        scored = [each for output in seen.of(RequestOutput) for each in output.logprobs]
        assert [each.token_id for each in scored] == seen.tokens()
        assert last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_is_given_and_ends_it(servers: PlainServers, kind: str) -> None:
    with standing_in(kind, eos_at=3) as server:
        seen = Seen(servers, server).connected()
        assert seen.ask(request(8)).finish_reason is FinishReason.STOP
        assert seen.tokens() == [*continued(PROMPT, 3), EOS]
        assert seen.ask(request(8, request_id="s", ignore_eos=True)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_of_answer_and_prompt(servers: PlainServers, kind: str) -> None:
    with standing_in(kind) as server:
        seen = Seen(servers, server).connected()
        seen.ask(request(4, logprobs=2, prompt_logprobs=1))
        outputs = seen.of(RequestOutput)
        scored = [each for output in outputs for each in output.logprobs]
        assert [(each.token_id, each.logprob) for each in scored] == [
            (token, score(token)) for token in seen.tokens()
        ]
        assert all(each.top == ((0, score(0)), (1, score(1))) for each in scored)
        [prompt] = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert [(each.token_id, each.logprob) for each in prompt] == [(t, score(t)) for t in PROMPT[1:]]
        assert all(each.top == ((0, score(0)),) for each in prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_for_no_tokens_gets_none(servers: PlainServers, kind: str) -> None:
    with standing_in(kind) as server:
        seen = Seen(servers, server).connected()
        last = seen.ask(request(0, prompt_logprobs=0))
        assert (last.finish_reason, last.num_output_tokens, seen.tokens()) == (FinishReason.LENGTH, 0, [])
        assert last.prompt_logprobs is not None


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_with_the_context(servers: PlainServers, kind: str) -> None:
    with standing_in(kind) as server:
        seen = Seen(servers, server).connected()
        long = [*PROMPT, *[1] * (MAX_LEN - len(PROMPT) - 3)]
        assert seen.ask(request(100, long)).num_output_tokens == 3
        refused = seen.ask(request(4, [1] * MAX_LEN, request_id="s"))
        assert "maximum context length" in str(refused.error)


def test_each_sampling_parameter_goes_to_vllm(servers: PlainServers) -> None:
    with standing_in("vllm") as server:
        seen = Seen(servers, server).connected()
        seen.ask(
            request(
                8, tenant="acme", temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1,
                presence_penalty=0.2, frequency_penalty=0.3, logit_bias={5: -2.0}, seed=2**64 - 1, logprobs=3,
                min_tokens=2, stop_token_ids=(21,),
            )
        )  # fmt: skip
        assert server.bodies == [
            {
                "model": MODEL, "prompt": PROMPT, "n": 1, "stream": True, "return_token_ids": True,
                "stream_options": {"include_usage": True}, "max_tokens": 8, "min_tokens": 2,
                "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
                "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop_token_ids": [EOS, 21],
                "ignore_eos": False, "logit_bias": {"5": -2.0}, "seed": 2**63 - 1, "logprobs": 3,
                "return_tokens_as_token_ids": True, "cache_salt": salt_digest("acme"),
            }
        ]  # fmt: skip


def test_each_sampling_parameter_goes_to_sglang(servers: PlainServers) -> None:
    with standing_in("sglang", info={"enable_deterministic_inference": True}) as server:
        seen = Seen(servers, server).connected()
        seen.ask(
            request(
                8, tenant="acme", temperature=1.0, top_p=0.9, min_p=0.1, presence_penalty=0.2,
                frequency_penalty=0.3, logit_bias={5: -2.0}, seed=3, logprobs=3, min_tokens=2,
                stop_token_ids=(21,), ignore_eos=True,
            )
        )  # fmt: skip
        assert server.bodies == [
            {
                "input_ids": PROMPT, "stream": True, "return_logprob": True, "logprob_start_len": -1,
                "top_logprobs_num": 3, "cache_salt": salt_digest("acme"),
                "sampling_params": {
                    "n": 1, "max_new_tokens": 8, "min_new_tokens": 2, "temperature": 1.0, "top_p": 0.9,
                    "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.0, "presence_penalty": 0.2,
                    "frequency_penalty": 0.3, "stop_token_ids": [21], "ignore_eos": True,
                    "logit_bias": {"5": -2.0}, "sampling_seed": 3,
                },
            }
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("vllm", {"temperature": 0.001}, "from 0.01 to 2"),
        ("vllm", {"temperature": 3.0}, "from 0.01 to 2"),
        ("vllm", {"n": 2}, "one sequence"),
        ("sglang", {"repetition_penalty": 1.2}, "answer alone"),
        ("sglang", {"temperature": 1.0, "seed": 1}, "--enable-deterministic-inference"),
        ("sglang", {"temperature": 0.5, "logprobs": 1}, "temperature 0 or 1"),
        ("vllm", {"generated": (1, 2), "presence_penalty": 1.0}, "count them as prompt"),
        ("sglang", {"generated": (1, 2), "frequency_penalty": 1.0}, "count them as prompt"),
        ("vllm", {"generated": (1, 2), "temperature": 1.0, "seed": 4}, "send the request again"),
    ],
)
def test_what_cannot_be_asked_is_refused_unsent(
    servers: PlainServers, kind: str, params: dict[str, Any], words: str
) -> None:
    with standing_in(kind) as server:
        refused = Seen(servers, server).connected().ask(request(8, **params))
        assert isinstance(refused, RequestRefused)
        assert words in str(refused.error)
        assert not refused.again
        assert not server.bodies


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_goes_on_behind_its_tokens(servers: PlainServers, kind: str) -> None:
    with standing_in(kind, info={"enable_deterministic_inference": True}) as server:
        seen = Seen(servers, server).connected()
        whole = continued(PROMPT, 10)
        last = seen.ask(request(10, generated=whole[:4], min_tokens=6, prompt_logprobs=1))
        assert seen.tokens() == whole[4:]
        assert (last.num_prompt_tokens, last.num_output_tokens) == (6, 10)
        body = server.bodies[0]
        given = body if kind == "vllm" else body["sampling_params"]
        assert min(given.get("min_tokens", 9), given.get("min_new_tokens", 9)) == 2
        assert "prompt_logprobs" not in body
        assert not body.get("return_logprob")
        ended = seen.ask(request(10, generated=whole, request_id="s"))
        assert (ended.finish_reason, ended.num_output_tokens, len(server.bodies)) == (
            FinishReason.LENGTH,
            10,
            1,
        )
        if kind == "sglang":
            sampled = request(10, generated=whole[:4], request_id="t", temperature=1.0, seed=1)
            assert seen.ask(sampled).finish_reason is FinishReason.LENGTH


def test_an_abort_closes_the_stream(servers: PlainServers) -> None:
    with standing_in("vllm", delay_s=0.01) as server:
        seen = Seen(servers, server).connected()
        seen.client.submit(request(200))
        seen.until(lambda: len(seen.tokens()) > 3)
        seen.client.abort("r")
        seen.client.abort("r")
        seen.client.abort("never")
        seen.until(lambda: server.num_aborted == 1 and not server.num_running, "the abort")
        assert seen.ended() is None
        assert seen.ask(request(3, request_id="s")).finish_reason is FinishReason.LENGTH


# ---------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ends_early", [False, True])
def test_a_stream_that_is_cut_may_be_tried_again(servers: PlainServers, kind: str, ends_early: bool) -> None:
    with standing_in(kind, cut_after=3, ends_early=ends_early) as server:
        seen = Seen(servers, server).connected()
        refused = seen.ask(request(8))
        assert isinstance(refused, RequestRefused)
        assert refused.again
        assert seen.tokens() == continued(PROMPT, 3)
        seen.ask(request(8, generated=seen.tokens(), request_id="s"))
        assert seen.tokens() + seen.tokens("s") == continued(PROMPT, 8)
        assert not seen.of(InstanceLost)


@pytest.mark.parametrize("kind", KINDS)
def test_a_busy_server_is_asked_again(servers: PlainServers, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(plain_server, "FIRST_PAUSE_S", 0.001)
    with standing_in(kind, statuses=[503, 429, 500]) as server:
        seen = Seen(servers, server).connected()
        assert seen.ask(request(4)).finish_reason is FinishReason.LENGTH
        assert seen.tokens() == continued(PROMPT, 4)
        server.statuses = [500] * 50
        refused = seen.ask(request(4, request_id="s"))
        assert refused.again
        assert "told to say 500" in str(refused.error)
        assert not seen.of(InstanceLost)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_the_server_refuses_is_not_tried_again(servers: PlainServers, kind: str) -> None:
    with standing_in(kind, statuses=[400]) as server:
        refused = Seen(servers, server).connected().ask(request(4))
        assert not refused.again
        assert "told to say 400" in str(refused.error)
        assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_serves_us_no_more_is_lost(servers: PlainServers, status: int) -> None:
    with standing_in("vllm", statuses=[status]) as server:
        seen = Seen(servers, server).connected()
        seen.client.submit(request(4))
        seen.until(lambda: len(seen.of(Connected)) == 2)
        assert f"status {status}" in seen.of(InstanceLost)[0].reason


WRONG: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("vllm", lambda m: m["choices"] and m["choices"][0].pop("token_ids") and m, "no token ids"),
    ("vllm", lambda m: {"error": {"message": "out of memory", "code": 500}}, "out of memory"),
    ("vllm", lambda m: {"choices": [{"token_ids": [VOCAB]}]}, "vocabulary of 1000"),
    ("vllm", lambda m: {"choices": [{"token_ids": [1] * 9}]}, "9 tokens, 8 were asked"),
    ("vllm", lambda m: {"choices": [{"token_ids": "no"}]}, "unexpected form"),
    ("vllm", lambda m: {"choices": [{"token_ids": [1], "finish_reason": "abort"}]}, "'abort'"),
    ("sglang", lambda m: {"error": {"message": "no page", "code": 500}}, "no page"),
    ("sglang", lambda m: {"output_ids": [1]}, "no meta_info"),
    ("sglang", lambda m: m | {"output_ids": [-1]}, "vocabulary of 1000"),
    ("sglang", lambda m: m | {"meta_info": {"finish_reason": {"type": "abort", "message": "gone"}}}, "gone"),
    (
        "sglang",
        lambda m: m | {"meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 5}},
        "sent 1",
    ),
]


@pytest.mark.parametrize(("kind", "change", "words"), WRONG)
def test_a_wrong_message_ends_the_attempt(
    servers: PlainServers, kind: str, change: Callable[[dict[str, Any]], Any], words: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(plain_server, "FIRST_PAUSE_S", 0.001)
    with standing_in(kind, change=change) as server:
        seen = Seen(servers, server).connected()
        refused = seen.ask(request(8))
        assert isinstance(refused, RequestRefused)
        assert refused.again
        assert words in str(refused.error)
        server.change = lambda message: message
        assert seen.ask(request(8, request_id="s")).finish_reason is FinishReason.LENGTH
        assert seen.tokens("s") == continued(PROMPT, 8)


def test_an_error_of_the_request_within_the_stream_is_final(servers: PlainServers) -> None:
    with standing_in("sglang", change=lambda m: {"error": {"message": "too long", "code": 400}}) as server:
        refused = Seen(servers, server).connected().ask(request(8))
        assert not refused.again
        assert "too long" in str(refused.error)


def test_an_answer_that_is_whole_is_given_although_the_stream_breaks(servers: PlainServers) -> None:
    with standing_in("vllm", cut_after=4) as server:  # after the finish reason, before the usage
        seen = Seen(servers, server).connected()
        assert seen.ask(request(4)).finish_reason is FinishReason.LENGTH
        assert seen.tokens() == continued(PROMPT, 4)


def test_a_slow_server_is_waited_for_and_a_stalled_answer_is_not() -> None:
    servers = PlainServers(terms(stall_s=0.3), MonotonicClock(), lambda: None)
    with standing_in("vllm", delay_s=0.1) as server:
        seen = Seen(servers, server).connected()
        assert seen.ask(request(5)).finish_reason is FinishReason.LENGTH
        seen.client.submit(request(20, request_id="s"))
        seen.until(lambda: seen.tokens("s"))
        server.delay_s = 5.0
        seen.until(lambda: seen.ended("s"))
        assert seen.ended("s").again
        assert not seen.of(InstanceLost)
    servers.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_is_lost_and_found_again(servers: PlainServers, kind: str) -> None:
    with standing_in(kind, delay_s=0.01) as server:
        seen = Seen(servers, server).connected()
        for number in range(3):
            seen.client.submit(request(200, request_id=f"r{number}"))
        seen.until(lambda: all(len(seen.tokens(f"r{number}")) > 2 for number in range(3)))
        port = server.port
        server.kill()
        seen.until(lambda: seen.of(InstanceLost), "the loss")
        assert seen.client.facts is None
        assert seen.client.fault
        num_before = len(seen.of(RequestOutput))
    with standing_in(kind, port=port) as server:
        seen.until(lambda: len(seen.of(Connected)) == 2, "the return")
        assert not seen.of(RequestRefused)  # a `InstanceLost` stands for all requests
        seen.ask(request(5, request_id="s"))
        assert seen.tokens("s") == continued(PROMPT, 5)
        assert {each.request_id for each in seen.of(RequestOutput)[num_before:]} == {"s"}


@pytest.mark.parametrize("settings", [{"health": 503}, {"health_s": 3.0}])
def test_a_server_whose_health_fails_is_lost(settings: dict[str, Any]) -> None:
    servers = PlainServers(terms(lease_s=0.5), MonotonicClock(), lambda: None)
    with standing_in("vllm", delay_s=10.0) as server:
        seen = Seen(servers, server).connected()
        seen.client.submit(request(200))
        seen.until(lambda: server.num_running)
        vars(server).update(settings)
        seen.until(lambda: seen.of(InstanceLost))
        assert "/health" in seen.of(InstanceLost)[0].reason
        seen.until(lambda: server.num_aborted == 1, "its requests are aborted")
    servers.close()


def test_a_server_that_sends_tokens_lives_although_its_health_is_late() -> None:
    servers = PlainServers(terms(lease_s=0.5), MonotonicClock(), lambda: None)
    with standing_in("vllm", delay_s=0.05) as server:
        seen = Seen(servers, server).connected()
        seen.client.submit(request(40))
        seen.until(lambda: seen.tokens())
        server.health_s = 100.0
        seen.until(lambda: seen.ended())
        assert seen.tokens() == continued(PROMPT, 40)
        seen.until(lambda: seen.of(InstanceLost))
    servers.close()


def test_a_server_that_was_started_again_is_lost(servers: PlainServers) -> None:
    with standing_in("vllm") as server:
        seen = Seen(servers, server).connected()
        server.metrics = METRICS.replace("1.7e+09", "1.8e+09")
        seen.until(lambda: len(seen.of(Connected)) == 2)
        first, second = (each.facts.start_id for each in seen.of(Connected))
        assert first != second


@pytest.mark.parametrize(
    ("kind", "settings", "config", "words"),
    [
        ("vllm", {"models": ["other", "more"]}, {}, "it serves other, more, not tiny"),
        ("sglang", {}, {"model": "mine"}, "it serves tiny, not mine"),
        ("vllm", {"key": "secret"}, {"api_key": "wrong"}, "set api_key_variable"),
        ("vllm", {"owner": "sagellm"}, {}, "by `addresses`"),
        ("vllm", {"owner": "someone"}, {}, "neither vLLM nor SGLang"),
        ("vllm", {"version": "0.9.1"}, {}, "0.10.2 or a later one"),
        ("vllm", {"tokenize": lambda text: [1, 2, 3]}, {}, "its tokenizer is another one"),
        ("sglang", {"info": {"is_embedding": True}}, {}, "embeddings"),
        ("vllm", {}, {"events": "5557"}, "KV events cannot be read from '5557'"),
        ("sglang", {"health": 503}, {}, "/ready gives status 503"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(
    kind: str, settings: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    servers = PlainServers(terms(sample=("ab", (1, 2))), MonotonicClock(), lambda: None)
    with standing_in(kind, **settings) as server:
        seen = Seen(servers, server, **config)
        seen.until(lambda: words in seen.client.fault, words)
        seen.client.submit(request(1))
        call_id = seen.client.call("stats")
        seen.poll()
        assert [event.call_id for event in seen.of(CallResult)] == [call_id]
        assert words in str(seen.of(CallResult)[0].error)
        assert not seen.of(Connected)
        assert not server.bodies
    servers.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_with_our_tokenizer_and_key_is_connected(kind: str) -> None:
    servers = PlainServers(terms(sample=("ab", (1, 2))), MonotonicClock(), lambda: None)
    with standing_in(kind, key="secret", tokenize=lambda text: [1, 2]) as server:
        seen = Seen(servers, server, api_key="secret").connected()
        assert seen.ask(request(2)).finish_reason is FinishReason.LENGTH
    servers.close()


# --------------------------------------------------------------------------------- load, questions


@pytest.mark.parametrize("kind", KINDS)
def test_its_load_is_reported(servers: PlainServers, kind: str) -> None:
    with standing_in(kind) as server:
        seen = Seen(servers, server, max_num_seqs=9).connected()
        load = seen.of(ExecutionInstance)[0]
        assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (3, 2, 0.25)
        assert (load.num_blocks, load.num_free_blocks, load.max_num_seqs) == (1000, 750, 9)
        assert load.num_queued_tokens == (0 if kind == "vllm" else 77)
        assert not load.is_fresh
        server.metrics = METRICS.replace('_sum{engine="0",model_name="tiny"} 2.0', "_sum{} 4.0").replace(
            "1000.0", "2000.0"
        )
        seen.ask(request(4))
        seen.until(
            lambda: seen.of(ExecutionInstance)[-1].prefill_token_s * seen.of(ExecutionInstance)[-1].step_s
        )
        load = seen.of(ExecutionInstance)[-1]
        assert load.prefill_token_s == pytest.approx(0.002)
        assert load.utilization > 0


def test_without_metrics_the_load_is_what_was_sent(servers: PlainServers) -> None:
    with standing_in("vllm", metrics=None, delay_s=0.02) as server:
        seen = Seen(servers, server).connected()
        facts = seen.client.facts
        assert facts is not None
        assert facts.capability.num_blocks * facts.capability.block_size >= MAX_LEN
        seen.client.submit(request(100))
        seen.until(lambda: seen.of(ExecutionInstance)[-1].num_running == 1)


def test_what_a_plain_server_can_be_asked(servers: PlainServers) -> None:
    with standing_in("vllm") as server:
        seen = Seen(servers, server).connected()
        envelope = KVHintsEnvelope.parse({"actions": [{"action_id": "a", "action_type": "pin_prefix"}]})
        calls = {
            name: seen.client.call(name, given)
            for name, given in (
                ("stats", ()), ("diagnostics", ()), ("hint", (envelope, Namespace())),
                ("clear_cache", (False,)), ("pin", (Tokens(PROMPT), Namespace())),
                ("explain", (Tokens(PROMPT), Namespace(), None)),
            )
        }  # fmt: skip
        seen.until(lambda: len(seen.of(CallResult)) == len(calls))
        answers = {event.call_id: event for event in seen.of(CallResult)}
        stats = answers[calls["stats"]].result
        assert (stats.num_running, stats.blocks_active, stats.blocks_free) == (3, 250, 750)
        assert answers[calls["hint"]].result[0].status is HintStatus.UNSUPPORTED
        assert answers[calls["clear_cache"]].result == 0
        assert server.num_cleared == 1
        assert answers[calls["diagnostics"]].error is None
        for name in ("pin", "explain"):
            assert "plain server" in str(answers[calls[name]].error)


def test_its_kv_events_come_between_connection_and_loss(servers: PlainServers) -> None:
    publisher = Publisher()
    with standing_in("vllm") as server:
        seen = Seen(servers, server, events=publisher.endpoint)
        publisher.wait_for_reader()
        publisher.send(0, stored(1))
        publisher.send(1, stored(2))
        seen.connected().until(lambda: sum(len(each.events) for each in seen.of(KVChanges)) == 2)
        seen.until(lambda: seen.of(ExecutionInstance)[-1].is_fresh)
        server.metrics = METRICS.replace("1.7e+09", "1.8e+09")
        seen.until(lambda: len(seen.of(Connected)) == 2)
        kinds = [type(event) for event in seen.events if not isinstance(event, ExecutionInstance)]
        assert kinds[0] is Connected
        assert kinds[-2:] == [InstanceLost, Connected]
    publisher.close()


def test_it_takes_part_in_no_hand_over(servers: PlainServers) -> None:
    with standing_in("vllm") as server:
        seen = Seen(servers, server).connected()
        seen.client.submit(request(4), HandOver(HandOverPart.DECODE, "other"))
        seen.poll()
        assert "no KV" in str(seen.ended().error)


def test_the_bell_rings_for_what_happens() -> None:
    rung = threading.Event()
    servers = PlainServers(terms(), MonotonicClock(), rung.set)
    with standing_in("vllm") as server:
        seen = Seen(servers, server).connected()
        for _ in range(20):
            seen.poll()
            rung.clear()
            while not seen.client.has_events:
                assert rung.wait(5.0)
    servers.close()
