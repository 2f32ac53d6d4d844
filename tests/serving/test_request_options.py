"""What the parameters of a request over HTTP become for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.core.config import ServerConfig
from sagellm.core.errors import RequestError
from sagellm.core.types import SLO, Retention, SamplingParams
from sagellm.engines.llm import RequestOptions
from sagellm.serving.schema import ChatRequest, CompletionRequest, GenerationFields, checked
from tests.scripted_engine import scripted_llm

CLIENT = ("key a", "user b")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def options_of(model: type[GenerationFields], **fields: Any) -> RequestOptions:
    return checked(model, fields).options(scripted_llm(), ServerConfig(), CLIENT)


def test_every_parameter_of_the_engine_is_in_one_object() -> None:
    options = options_of(
        ChatRequest,
        **CHAT,
        max_completion_tokens=5,
        temperature=0.5,
        logprobs=True,
        top_logprobs=2,
        stop="end",
        logit_bias={"3": -1},
        priority=-2,
        service_tier="gold",
        cache_salt="tenant",
        session_id="s",
        slo={"ttft_s": 0.5},
        retention=[{"stop": 8, "priority": 80}],
    )
    assert options == RequestOptions(
        SamplingParams(temperature=0.5, max_tokens=5, logprobs=2, stop=("end",), logit_bias={3: -1}),
        priority=-2,
        tenant="tenant",
        service_class="gold",
        session_id="s",
        slo=SLO(ttft_s=0.5),
        retention=(Retention(stop=8, priority=80),),
        client=CLIENT,
    )


def test_what_is_not_sent_is_the_default() -> None:
    assert options_of(ChatRequest, **CHAT) == RequestOptions(SamplingParams(), client=CLIENT)
    completion = options_of(CompletionRequest, prompt="hi", echo=True, logprobs=1, service_tier="auto")
    assert completion.params == SamplingParams(max_tokens=16, logprobs=1, prompt_logprobs=1)
    assert completion.service_class == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"priority": 1}, "priority"), ({"retention": [{"start": 4, "stop": 4}]}, "retention")],
)
def test_what_a_client_may_not_ask_for_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        options_of(ChatRequest, **CHAT, **fields)
    assert caught.value.param == param
