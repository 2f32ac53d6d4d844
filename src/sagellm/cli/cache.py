"""`sagellm cache`, and its command `explain`.

`explain` says why a prompt is, or is not, in a server's cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx2
from pydantic import BaseModel, ValidationError

from sagellm.benchmarks.reporting import Table, print_tables
from sagellm.cli import cache_folder
from sagellm.cli._options import App, Command, argument, command, flag
from sagellm.cli.cache_overlap import overlap
from sagellm.cli.cache_server import DEFAULT_URL, TIMEOUT_S, base_url, refusal
from sagellm.core.errors import ConfigError

app = App(help="Look into the KV cache of a server or of its folder, and move it.")
API_KEY_VARIABLE = "OPENAI_API_KEY"
_MESSAGES_HELP = "A JSON list of messages, in place of PROMPT."


class ShownSpan(BaseModel):
    """What the command shows of `cache_facts.CacheSpan`."""

    start: int
    stop: int
    state: str
    tier: str | None
    cause: str | None
    evicted_by: str | None
    seconds_ago: float | None
    blocks_needed: int | None
    gib_needed: float | None


class ShownDifference(BaseModel):
    """Of `cache_facts.SessionDifference`."""

    token: int
    before: str
    now: str
    then: str


class ShownExplanation(BaseModel):
    """Of `cache_facts.Explanation`."""

    num_tokens: int
    block_size: int
    spans: list[ShownSpan]
    session: ShownDifference | None


@command
def explain(
    prompt: str | None = argument("PROMPT", "The prompt, as for /v1/completions.", None),
    url: str = flag("--url URL", "The server.", DEFAULT_URL),
    messages: Path | None = flag("FILE", _MESSAGES_HELP),
    cache_salt: str | None = flag("SALT", "The tenant whose cache is meant."),
    session_id: str | None = flag("ID", "Compare with the last request of this session."),
    api_key: str | None = flag("--api-key KEY", f"Default: the environment variable {API_KEY_VARIABLE}."),
) -> None:
    """Explain span by span what the cache of a server knows of a prompt.

    The server needs --set kv.miss_attribution=true.
    """
    if (prompt is None) == (messages is None):
        raise ConfigError("name a PROMPT, or --messages FILE in place of it")
    body = {"prompt": prompt, "cache_salt": cache_salt, "session_id": session_id}
    if messages is not None:
        body["messages"] = _json_list(messages)
    asked = {name: value for name, value in body.items() if value is not None}
    found = _post(f"{base_url(url)}/v1/kv/explain", asked, api_key or os.environ.get(API_KEY_VARIABLE))
    print_tables([_table(found)])
    difference = found.session
    if difference is not None:
        print(f"\nThe session's last request differs from token {difference.token} on.")
        print(f"  before: {difference.before!r}")
        print(f"  now:    {difference.now!r}")
        print(f"  then:   {difference.then!r}")


def _json_list(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no JSON list of messages: {error}") from error


def _post(url: str, body: dict[str, Any], api_key: str | None) -> ShownExplanation:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx2.post(url, json=body, headers=headers, timeout=TIMEOUT_S)
        if answer.status_code == 200:
            return ShownExplanation.model_validate_json(answer.content)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ConfigError(f"no sageLLM server answers at {url}: {error}; name it with --url") from error
    except ValidationError as error:
        raise ConfigError(f"{url} explains nothing: name a sageLLM server with --url") from error
    raise ConfigError(f"{url}: {refusal(answer)}")


def _table(found: ShownExplanation) -> Table:
    columns = ("state", "why", "tokens", "from", "to", "seconds ago", "blocks needed", "GiB needed")
    title = f"{found.num_tokens:,} tokens in blocks of {found.block_size}"
    return Table(title, columns, [_row(span) for span in found.spans], num_names=2)


def _row(span: ShownSpan) -> tuple[str, ...]:
    why = span.tier or span.cause or ""
    if span.state == "evicted":
        why += f", for {span.evicted_by or 'another tenant or no request'}"
    ago, blocks, gib = span.seconds_ago, span.blocks_needed, span.gib_needed
    return (
        span.state.replace("_", " "),
        why,
        f"{span.stop - span.start:,}",
        f"{span.start:,}",
        f"{span.stop:,}",
        "" if ago is None else f"{ago:.1f}",
        "" if blocks is None else f"{blocks:,}",
        "" if gib is None else f"{gib:.3g}",
    )


app.add(explain, cache_folder.stat, cache_folder.ls, cache_folder.verify, cache_folder.export)
app.command("import", cls=Command)(cache_folder.import_)
app.add(cache_folder.clear, overlap)
