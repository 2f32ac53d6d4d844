"""`sagellm trace`: look into traces of requests, convert, generate and record them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import typer

from sagellm.cli._options import App, ModelOption, OptionGroup, command, option
from sagellm.cli._settings import Settings
from sagellm.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from sagellm.benchmarks.traces import Trace
    from sagellm.engines.llm import LLM
    from sagellm.engines.llm.llm import Prompt

app = App(help="Look into traces, convert, generate, record.")

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="The trace; .xz, .gz and .zst are read as they are.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write it.")]
BlockTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens per block, for a trace of tokens; default: 16.")
]
MAX_SHOWN_LINES = 10


@dataclass(frozen=True, slots=True)
class Reading(OptionGroup):
    """How a file is read."""

    format: str | None
    on_error: str
    options: Mapping[str, Any]

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        errors = "A broken line is the end (fail) or left out and listed (skip); default: fail."
        return [
            option("format_", str, typer.Option("--format", metavar="NAME", help=_FORMAT_HELP)),
            option("on_error", str, typer.Option("--on-error", metavar="HOW", help=errors)),
            option("options", list[str], typer.Option("--option", metavar="KEY=VALUE", help=_OPTION_HELP)),
        ]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        options = assignments("--option", given.pop("options") or ())
        return cls(given.pop("format_"), given.pop("on_error") or "fail", options)

    def read(self, path: Path) -> Trace:
        """The trace; what was skipped is told on stderr."""
        from sagellm.benchmarks.traces import read_trace

        trace = read_trace(path, self.format, on_error=cast("Any", self.on_error), **self.options)
        for line in trace.skipped[:MAX_SHOWN_LINES]:
            print(f"sagellm: {path}, line {line.number} is skipped: {line.reason}", file=sys.stderr)
        if len(trace.skipped) > MAX_SHOWN_LINES:
            print(f"sagellm: {len(trace.skipped)} lines are skipped in all", file=sys.stderr)
        return trace


_FORMAT_HELP = "Format of the trace; default: told by its first lines."
_OPTION_HELP = "Set an option of the format, such as every=1; may be repeated."


def assignments(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` texts; a value that is JSON is that, another is a text."""
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


@app.command("info")
@command
def info(
    file: FileArgument,
    block_tokens: BlockTokens = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the figures there as JSON.")
    ] = None,
    *,
    reading: Reading,
) -> None:
    """Count requests, tokens, sessions and blocks, and what an infinite cache would find."""
    from sagellm.benchmarks.reporting import check_writable, print_tables, write_json
    from sagellm.benchmarks.traces.summary import as_table, summarize

    if out is not None:
        check_writable(out)
    summary = summarize(reading.read(file), block_tokens)
    print_tables([as_table(summary)])
    if out is not None:
        write_json(out, dataclasses.asdict(summary))


@app.command("convert")
@command
def convert(
    file: FileArgument,
    out: OutOption,
    to: Annotated[str, typer.Option(metavar="NAME", help="sagellm or mooncake.")] = "sagellm",
    block_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens per block where a trace of tokens is cut; default: 512."),
    ] = None,
    *,
    reading: Reading,
) -> None:
    """Write a trace in another format. Mooncake's loses sessions, tenants and the size of a block."""
    from sagellm.benchmarks.reporting import check_writable
    from sagellm.benchmarks.traces import write_trace

    check_writable(out)
    trace = reading.read(file)
    given = {} if block_tokens is None else {"block_tokens": block_tokens}
    write_trace(trace, out, to, **given)
    print(f"{out}: {len(trace.requests):,} requests, {to}")


@app.command("synth")
@command
def synth(
    out: OutOption,
    kind: Annotated[
        str, typer.Option(metavar="NAME", help="chat, agents, shared_prompts or tenants.")
    ] = "chat",
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same trace.")] = 0,
    duration: Annotated[float, typer.Option(metavar="SECONDS", help="Span of the arrivals.")] = 3600.0,
    block_tokens: Annotated[int, typer.Option(metavar="N", help="Prompt tokens per block id.")] = 64,
    tenants: Annotated[
        str | None, typer.Option(metavar="SHARES", help="Their rates, one to another, as 8,1,1.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change the kind's profile; may be repeated."),
    ] = None,
    to: Annotated[str, typer.Option(metavar="NAME", help="sagellm or mooncake.")] = "sagellm",
) -> None:
    """Generate a trace: Poisson arrivals of sessions whose prompts grow turn by turn."""
    from sagellm.benchmarks.reporting import check_writable
    from sagellm.benchmarks.traces import write_trace
    from sagellm.benchmarks.traces.synth import synthesize

    check_writable(out)
    changes = assignments("--set", fields or ())
    for name in {"kind", "seed", "duration_s", "block_tokens", "tenants"} & changes.keys():
        raise ConfigError(f"--set '{name}={changes[name]}': it has an option of its own")
    trace = synthesize(
        kind,
        seed=seed,
        duration_s=duration,
        block_tokens=block_tokens,
        tenants=_shares(tenants),
        **changes,
    )
    write_trace(trace, out, to)
    print(f"{out}: {len(trace.requests):,} requests, {to}")


def _shares(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--tenants {text!r}: write shares, for example 8,1,1") from error


@app.command("record")
@command
def record(
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS", help='One prompt per line: a text, {"prompt": text} or {"messages": [...]}.'
        ),
    ],
    out: OutOption,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer in tokens.")] = 128,
    *,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Keep the prompts' tokens, not only ids of their blocks.")
    ] = False,
    settings: Settings,
) -> None:
    """Answer prompts, all at once, and record what the engine was asked. A server records with
    serve --record-trace."""
    from sagellm.benchmarks.reporting import check_writable
    from sagellm.benchmarks.traces.recorder import TraceRecorder
    from sagellm.cli._loading import load_llm
    from sagellm.core.events import EventBus

    check_writable(out)
    asked, config, events = read_prompts(prompts), settings.load(model=model).config, EventBus()
    llm = load_llm(config, events)
    block_tokens = config.kv.block_size
    try:
        with TraceRecorder(out, events, block_tokens=block_tokens, keep_tokens=tokens) as recorder:
            _answer(llm, asked, max_tokens)
    finally:
        llm.close()
    print(f"{out}: {recorder.num_requests:,} requests, sagellm")


def _answer(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> None:
    for completion in llm.generate(prompts, llm.sampling_params(max_tokens=max_tokens)):
        if completion.error:
            raise RequestError(completion.error)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, a line each; empty lines are none. Raises `ConfigError` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}") from error
    found = [_prompt(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} holds no prompt")
    return found


def _prompt(where: str, line: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return line
    record = _value(line)
    prompt = record.get("prompt", record.get("messages")) if isinstance(record, dict) else None
    if not isinstance(prompt, str | list) or not prompt:
        raise ConfigError(f'{where}: a JSON line has a "prompt" (a text) or "messages" (a list)')
    return cast("Prompt", prompt)
