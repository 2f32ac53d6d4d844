"""The `openai` client against a server: `python openai_client.py URL MODEL KEY`."""

from __future__ import annotations

import sys

import openai


def main(url: str, model: str, key: str) -> None:
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
        assert model in [served.id for served in client.models.list()]
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is 17 + 25?"}],
            temperature=0,
            reasoning_effort="none",
            extra_body={"enable_thinking": False, "num_ctx": 4096},
        )
        assert "42" in (answer.choices[0].message.content or ""), answer
        pieces = client.completions.create(model=model, prompt="1 + 1", max_tokens=4, stream=True)
        assert [chunk.choices[0].text for chunk in pieces]
        scored = client.completions.create(
            model=model, prompt="1 + 1 = 2", max_tokens=0, echo=True, logprobs=1
        )
        assert scored.choices[0].logprobs is not None
        assert scored.choices[0].text == "1 + 1 = 2"
        check_context(client, model)


def check_context(client: openai.OpenAI, model: str) -> None:
    found: openai.BadRequestError | None = None
    try:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 100_000}])
    except openai.BadRequestError as error:
        found = error
    assert found is not None
    assert found.code == "context_length_exceeded"
    assert "maximum context length" in str(found)


if __name__ == "__main__":
    main(*sys.argv[1:4])
