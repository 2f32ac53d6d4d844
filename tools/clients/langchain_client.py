"""`langchain-openai` against a server: `python langchain_client.py URL MODEL KEY`."""

from __future__ import annotations

import sys

from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def main(url: str, model: str, key: str) -> None:
    chat = ChatOpenAI(base_url=url, model=model, api_key=SecretStr(key), temperature=0, max_retries=0)
    question = "What is 17 + 25?"
    assert "42" in chat.invoke(question).text
    assert "42" in "".join(chunk.text for chunk in chat.stream(question))
    assert "42" in chat.invoke([("system", "You are a helpful assistant."), ("human", question)]).text
    for ask in (chat.invoke, lambda text: list(chat.stream(text))):
        found = ""
        try:
            ask("word " * 100_000)
        except ContextOverflowError as error:
            found = str(error)
        assert "maximum context length" in found


if __name__ == "__main__":
    main(*sys.argv[1:4])
