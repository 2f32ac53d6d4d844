"""`sagellm trace`: look into traces of requests, convert, generate and record them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sagellm.benchmarks.reporting import check_writable, print_tables, write_json
from sagellm.cli._loading import load_llm
from sagellm.cli._options import MODEL, App, OptionGroup, argument, command, flag, with_value
from sagellm.cli._settings import Settings
from sagellm.core.errors import ConfigError, RequestError
from sagellm.core.events import EventBus

if TYPE_CHECKING:
    from sagellm.benchmarks.traces import Trace
    from sagellm.engines.llm.llm import Prompt

app = App(help="Look into traces, convert, generate, record.")

TRACE_FILE = argument("FILE", "The trace; .xz, .gz and .zst are read as they are.", ...)
BLOCK_TOKENS = flag("N", "Tokens per block, for a trace of tokens; default: 16.")
_OUT_FILE = flag("--out -o FILE", "Where to write it.", ...)
MAX_SHOWN_LINES = 10
_ON_ERROR_HELP = "A broken line is the end (fail) or left out and listed (skip); default: fail."


@dataclass(frozen=True, slots=True)
class Reading(OptionGroup):
    """How a trace is read."""

    format: str | None = flag("NAME", "Format of the trace; default: what its first lines show.")
    on_error: str = flag("HOW", _ON_ERROR_HELP, "fail")
    option: tuple[str, ...] = flag(
        "KEY=VALUE", "Set an option of the format, such as every=1; may be repeated.", ()
    )

    def read(self, path: Path, **fallback: Any) -> Trace:
        """The trace. Skipped lines are listed on stderr.

        `fallback` is that of `read_trace`.
        """
        from sagellm.benchmarks.traces import read_trace

        how = cast("Any", self.on_error)
        trace = read_trace(path, self.format, on_error=how, fallback=fallback, **self.format_options())
        for line in trace.skipped[:MAX_SHOWN_LINES]:
            print(f"sagellm: {path}, line {line.number} is skipped: {line.reason}", file=sys.stderr)
        if len(trace.skipped) > MAX_SHOWN_LINES:
            print(f"sagellm: {len(trace.skipped)} lines are skipped in all", file=sys.stderr)
        return trace

    def format_options(self) -> dict[str, Any]:
        """The options of the format. Raises `ConfigError` for what is not KEY=VALUE."""
        return assignments("--option", self.option)


def assignments(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """The values of `key=value` texts: JSON where a value is JSON, else text."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{name} {text!r}: write KEY=VALUE")
        found[key.strip()] = _value(value.strip())
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@command
def info(
    file: Path = TRACE_FILE,
    block_tokens: int | None = BLOCK_TOKENS,
    out_file: Path | None = flag("--out -o FILE", "Write the figures there as JSON."),
    *,
    reading: Reading,
) -> None:
    """Count requests, tokens, sessions and blocks, and what an infinite cache would find."""
    from sagellm.benchmarks.traces.summary import as_table, summarize

    if out_file is not None:
        check_writable(out_file)
    summary = summarize(reading.read(file), block_tokens)
    print_tables([as_table(summary)])
    if out_file is not None:
        write_json(out_file, dataclasses.asdict(summary))


@command
def convert(
    file: Path = TRACE_FILE,
    out_file: Path = _OUT_FILE,
    to: str = flag("NAME", "sagellm or mooncake.", "sagellm"),
    block_tokens: int | None = flag("N", "Tokens per block where a trace of tokens is cut; default: 512."),
    *,
    reading: Reading,
) -> None:
    """Write a trace in another format. Mooncake's loses sessions, tenants and the size of a block."""
    from sagellm.benchmarks.traces import write_trace

    check_writable(out_file)
    trace = reading.read(file)
    write_trace(trace, out_file, to, **with_value(block_tokens=block_tokens))
    print(f"{out_file}: {len(trace.requests):,} requests, {to}")


@command
def synth(
    out_file: Path = _OUT_FILE,
    kind: str = flag("NAME", "chat, agents, shared_prompts or tenants.", "chat"),
    seed: int = flag("N", "The same seed gives the same trace.", 0),
    duration: float = flag("SECONDS", "Span of the arrivals.", 3600.0),
    block_tokens: int = flag("N", "Prompt tokens per block id.", 64),
    tenants: str | None = flag("SHARES", "Their rates, one to another, as 8,1,1."),
    fields: list[str] | None = flag("--set -s KEY=VALUE", "Change the kind's profile; may be repeated."),
    to: str = flag("NAME", "sagellm or mooncake.", "sagellm"),
) -> None:
    """Generate a trace: Poisson arrivals of sessions whose prompts grow turn by turn."""
    from sagellm.benchmarks.traces import write_trace
    from sagellm.benchmarks.traces.synth import synthesize

    check_writable(out_file)
    changes = assignments("--set", fields or ())
    for name in {"kind", "seed", "duration_s", "block_tokens", "tenants"} & changes.keys():
        raise ConfigError(f"--set '{name}={changes[name]}': it has an option of its own")
    try:
        shares = None if tenants is None else [float(part) for part in tenants.split(",")]
    except ValueError as error:
        raise ConfigError(f"--tenants {tenants!r}: write shares, for example 8,1,1") from error
    trace = synthesize(
        kind, seed=seed, duration_s=duration, block_tokens=block_tokens, tenants=shares, **changes
    )
    write_trace(trace, out_file, to)
    print(f"{out_file}: {len(trace.requests):,} requests, {to}")


@command
def record(
    prompts: Path = argument(
        "PROMPTS", 'One prompt per line: a text, {"prompt": text} or {"messages": [...]}.', ...
    ),
    out_file: Path = _OUT_FILE,
    model: str | None = MODEL,
    max_tokens: int = flag("N", "Longest answer in tokens.", 128),
    *,
    tokens: bool = flag("--tokens", "Keep the prompts' tokens, not only ids of their blocks.", False),
    settings: Settings,
) -> None:
    """Answer prompts, all at once, and record the requests.

    A server records with serve --record-trace.
    """
    from sagellm.benchmarks.traces.recorder import TraceRecorder

    check_writable(out_file)
    asked, config, events = read_prompts(prompts), settings.load(model=model).config, EventBus()
    with (
        closing(load_llm(config, events)) as llm,
        TraceRecorder(out_file, events, block_tokens=config.kv.block_size, keep_tokens=tokens) as recorder,
    ):
        for completion in llm.generate(asked, llm.sampling_params(max_tokens=max_tokens)):
            if completion.error:
                raise RequestError(completion.error)
    print(f"{out_file}: {recorder.num_requests:,} requests, sagellm")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, a line each, without empty lines. `ConfigError` names a wrong line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}") from error
    found: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("{"):
            found += [line] if line.strip() else []
            continue
        record = _value(line)
        prompt = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
        if not isinstance(prompt, str | list) or not prompt:
            where = f"{path}, line {number}"
            raise ConfigError(f'{where}: a JSON line has a "prompt" (a text) or "messages" (a list)')
        found.append(cast("Prompt", prompt))
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    return found


app.add(info, convert, synth, record)
