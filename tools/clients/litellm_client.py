"""`litellm` against a server: `python litellm_client.py URL MODEL KEY`."""

from __future__ import annotations

import sys
from typing import Any

import litellm


def main(url: str, model: str, key: str) -> None:
    options: dict[str, Any] = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": key,
        "temperature": 0,
        "num_retries": 0,
    }
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = litellm.completion(messages=messages, **options)
    assert "42" in answer.choices[0].message.content, answer
    chunks = litellm.completion(messages=messages, stream=True, **options)
    assert "42" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    for stream in (False, True):
        found = ""
        try:
            litellm.completion(
                messages=[{"role": "user", "content": "word " * 100_000}], stream=stream, **options
            )
        except litellm.exceptions.ContextWindowExceededError as error:
            found = str(error)
        assert "maximum context length" in found


if __name__ == "__main__":
    main(*sys.argv[1:4])
