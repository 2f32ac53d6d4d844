"""`sagellm bench http`: an OpenAI-compatible server beside its engine, ours or another."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from sagellm.cli._bench_output import Output
from sagellm.cli._options import Model, command
from sagellm.core.errors import ConfigError


@command
def http(
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server that runs already; default: ours, started for this."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", metavar="KEY", envvar="OPENAI_API_KEY", show_envvar=True, help="API key of that server."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the server in the report.")
    ] = None,
    kinds: Annotated[
        str, typer.Option("--answers", metavar="NAMES", help="Only these, as a,b: list, one-token, stream.")
    ] = "list,one-token,stream",
    concurrency: Annotated[
        str, typer.Option(metavar="COUNTS", help="Requests at a time, as 1,8,32.")
    ] = "1,8,32",
    requests: Annotated[int, typer.Option(metavar="N", help="Requests in each run; of streams 1/8.")] = 400,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a stream.")] = 64,
    repeats: Annotated[int, typer.Option(metavar="N", help="Times that each case runs.")] = 3,
    *,
    model: Model,
    output: Output,
) -> None:
    """Measure an HTTP server: latency and requests per second of small and streamed answers.

    Each over kept connections and new ones; "list" is GET /v1/models, in which no engine takes part. The
    client is a process of its own. Use a tiny model: then the figures are the server's.
    """
    from sagellm.benchmarks.http import run as bench
    from sagellm.benchmarks.reporting import environment

    counts = [int(part) if part.strip().isdecimal() else 0 for part in concurrency.split(",")]
    plan = bench.HttpBenchPlan([part.strip() for part in kinds.split(",")], counts, requests, tokens, repeats)
    if url is not None and model.name is not None:
        raise ConfigError("--url measures the model that is served there: leave out the model, or --url")
    output.check()
    headers = {} if url is None or key is None else {"Authorization": f"Bearer {key}"}
    started = bench.our_server([] if model.name is None else ["--model", model.name])
    address = nullcontext(url.rstrip("/").removesuffix("/v1")) if url is not None else started
    with Console(stderr=True).status("starting the server") as status, address as base:
        served_name = name or ("sagellm" if url is None else base)
        target = bench.HttpTarget(served_name, base, bench.served_model(base, headers), headers)
        report = bench.HttpBenchReport(plan, target, environment(datetime.now(UTC)))
        try:
            bench.run(report, on_run=status.update)
        finally:
            status.stop()
            if report.runs:
                output.show(report.tables(), report.as_json())
