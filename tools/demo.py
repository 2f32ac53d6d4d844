"""Runs `make demo`: the demo model, the real server and the `openai` client.

    python tools/demo.py [--port N]

A conversation of four turns, ten requests at once, and what that left in the KV pool. Ends by itself: 0 when
all went well, 1 with the server's last log lines when anything failed.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console
from rich.markup import escape
from rich.table import Table

LOCALHOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 60.0
NUM_LOG_LINES = 30
SYSTEM = "You are a helpful assistant."
TURNS = (
    "Here is a table:\nname | city\nAnna | Paris\nBen | Oslo\nClara | Rome\nWhat is the city of Ben?",
    "And the city of Clara?",
    "What is 347 + 586?",
    "Now add 40.",
)
PARALLEL = (
    "What is 128 + 256?",
    "What is 905 - 47?",
    "What is 34 * 6?",
    "Sort these numbers: 42, 7, 19, 3",
    "Sort from largest to smallest: 5, 88, 23",
    "Reverse this list: pen, lamp, chair",
    "Repeat: fox, owl, bear",
    "Extract name, age as JSON: Maria is 31 years old and lives in Milan.",
    "Which number is the largest: 12, 91, 45?",
    "Who are you?",
)


class DemoError(Exception):
    """The demo cannot go on; the message says what was expected."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer with its times as the client saw them."""

    question: str
    text: str
    ttft_s: float
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the whole time, the first token's included. Short answers may come in one piece."""
        return self.num_tokens / self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The demo model behind the HTTP server, asked over HTTP.")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    port = parser.parse_args(arguments).port or free_port()
    console = Console()
    began_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        try:
            with running_server(port, log.fileno()) as url, client_of(url) as client:
                console.print(f"[bold]sageLLM[/] serves the demo model at {url}/v1\n")
                show(console, client, url)
        except Exception as error:
            console.print(f"[bold red]the demo failed:[/] {escape(f'{type(error).__name__}: {error}')}")
            console.print("the server's last lines:\n" + escape(last_lines(log.fileno())), highlight=False)
            raise SystemExit(1) from error
    console.print(f"\nDone in {time.monotonic() - began_s:.1f} s.")


def show(console: Console, client: OpenAI, url: str) -> None:
    """The whole demonstration; raises `DemoError` where the server does not do what it promises."""
    model = next(iter(client.models.list())).id
    turns = converse(client, model)
    console.print(table_of("A conversation: each turn finds the ones before it in the KV cache", turns))
    if not any(answer.num_cached_tokens for answer in turns[1:]):
        raise DemoError("no turn after the first found cached tokens")
    began_s = time.monotonic()
    with ThreadPoolExecutor(len(PARALLEL)) as pool:
        answers = list(pool.map(lambda question: ask(client, model, opening(question)), PARALLEL))
    seconds = time.monotonic() - began_s
    console.print(table_of(f"{len(PARALLEL)} requests at once", answers))
    total = sum(answer.num_tokens for answer in answers)
    console.print(f"together {total} tokens in {seconds:.2f} s: [bold]{total / seconds:.0f} tokens/s[/]\n")
    console.print(pool_table(kv_blocks(url)))


def converse(client: OpenAI, model: str) -> list[Answer]:
    """Four turns; every answer becomes part of the next prompt."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        answers.append(ask(client, model, messages))
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def opening(question: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def ask(client: OpenAI, model: str, messages: list[ChatCompletionMessageParam]) -> Answer:
    """Stream one answer and take its times."""
    began_s = time.monotonic()
    first_s: float | None = None
    pieces: list[str] = []
    usage = None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first_s = first_s or time.monotonic()
            pieces.append(piece)
    if usage is None or usage.prompt_tokens_details is None or first_s is None:
        raise DemoError(f"no text or no usage came for {messages[-1]!r}")
    return Answer(
        question=str(messages[-1].get("content")),
        text="".join(pieces),
        ttft_s=first_s - began_s,
        seconds=time.monotonic() - began_s,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=usage.prompt_tokens_details.cached_tokens or 0,
        num_tokens=usage.completion_tokens,
    )


def table_of(title: str, answers: Sequence[Answer]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_lines=True)
    table.add_column("question", max_width=36, overflow="fold")
    table.add_column("answer", max_width=44, overflow="fold")
    for heading in ("TTFT", "tokens/s", "prompt", "cached"):
        table.add_column(heading, justify="right")
    for answer in answers:
        table.add_row(
            escape(answer.question),
            escape(answer.text),
            f"{1000 * answer.ttft_s:.0f} ms",
            f"{answer.tokens_per_s:.0f}",
            str(answer.num_prompt_tokens),
            str(answer.num_cached_tokens),
        )
    return table


def pool_table(blocks: dict[str, int]) -> Table:
    table = Table(title="The KV pool", title_justify="left", title_style="bold")
    for heading in ("state", "blocks"):
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for state, count in blocks.items():
        table.add_row(state, str(count))
    table.add_row("total", str(sum(blocks.values())), style="bold")
    return table


def kv_blocks(url: str) -> dict[str, int]:
    """Blocks by state, from the server's own metrics."""
    blocks = {}
    for line in fetch(f"{url}/metrics").splitlines():
        if line.startswith("sagellm_kv_blocks{"):
            state = line.split('state="')[1].split('"')[0]
            blocks[state] = int(float(line.rpartition(" ")[2]))
    if set(blocks) != {"active", "cached", "free"} or blocks["active"]:
        raise DemoError(f"all requests have ended and the pool says {blocks}")
    return blocks


@contextmanager
def running_server(port: int, log: int, *options: str) -> Iterator[str]:
    """Yields the address of a ready server. On exit it stops the server within a time limit."""
    command = [sys.executable, "-m", "sagellm", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[1])
    url = f"http://{LOCALHOST}:{port}"
    try:
        wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit code {process.returncode}")
        try:
            fetch(f"{url}/ready")
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
        else:
            return
    raise DemoError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return str(response.read().decode())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


def last_lines(log: int) -> str:
    """The end of what the server wrote."""
    with open(log, encoding="utf-8", errors="replace", closefd=False) as lines:
        lines.seek(0)
        return "".join(lines.readlines()[-NUM_LOG_LINES:]) or "(none)"


if __name__ == "__main__":
    main()
