"""`sagellm verify`: tests from outside whether a server's cache hits are correct."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from sagellm.benchmarks.reporting import check_writable
from sagellm.cli._options import argument, command, completing, flag
from sagellm.diagnostics.verify import PRESETS, Finding, VerifyReport

_PRESET_HELP = "minute or hour; default: minute."
_RESTART_HELP = "Shell command that restarts the server: prompts are asked before and after it."
API_KEY_VARIABLE = "OPENAI_API_KEY"


@command
def verify(
    url: str = argument("URL", "Address of the server, as http://HOST:PORT.", ...),
    preset: str = flag("--preset NAME", _PRESET_HELP, "minute", autocompletion=completing(PRESETS)),
    model: str | None = flag("--model -m NAME", "Model to test; default: the first of /v1/models."),
    api_key: str | None = flag("--api-key KEY", f"Default: the environment variable {API_KEY_VARIABLE}."),
    seed: int = flag("--seed N", "Draws the prompts; default: 0.", 0),
    concurrency: int = flag("--concurrency N", "Requests at once in a batch; default: 8.", 8),
    restart_command: str | None = flag("--restart-command COMMAND", _RESTART_HELP),
    html: Path | None = flag("--html FILE", "Write the report as a self-contained page."),
    json_file: Path | None = flag("--json FILE", "Write the report as JSON; - for standard output."),
) -> None:
    """Test whether a server answers alike with and without cache hits.

    Works with any OpenAI-compatible server. Exit status: 0 clean, 1 findings, 2 it could not be tested.
    """
    from sagellm.diagnostics.verify import verify as run_verify
    from sagellm.diagnostics.verify.page import render

    for file in (html, json_file):
        if file is not None and str(file) != "-":
            check_writable(file)
    report = asyncio.run(
        run_verify(
            url,
            preset,
            model=model,
            api_key=api_key or os.environ.get(API_KEY_VARIABLE),
            seed=seed,
            concurrency=concurrency,
            restart_command=restart_command,
        )
    )
    if html is not None:
        html.write_text(render(report), encoding="utf-8")
    if json_file is not None and str(json_file) != "-":
        json_file.write_text(report.to_json() + "\n", encoding="utf-8")
    if str(json_file) == "-":
        print(report.to_json())
    else:
        _print(report)
    sys.stdout.flush()
    raise typer.Exit(report.exit_code)


def _print(report: VerifyReport) -> None:
    """The report for a terminal."""
    console = Console(highlight=False, markup=False)
    if report.server is not None:
        facts = report.server
        console.print(
            f"{facts.model} at {facts.url}: granularity {facts.granularity or 'unknown'}, "
            f"hits from {facts.hits_from}, cold by {facts.cold_by}, "
            f"log-probabilities: {'yes' if facts.logprobs else 'no'}"
        )
    if report.families:
        console.print(_table(report))
    if report.noise is not None:
        noise = report.noise
        text = f"cold answers differ by at most {noise.largest:.3g} nats in {noise.scenarios} scenarios"
        if report.server is None or not report.server.logprobs:
            text = f"the texts of cold answers differ in {noise.divergences} of {noise.scenarios} scenarios"
        console.print(text)
    for finding in report.findings:
        console.print(f"FINDING {finding.family}: {finding.message}{_evidence(finding)}")
    for limit in report.limits:
        console.print(f"note: {limit}")
    if report.reason:
        console.print(f"reason: {report.reason}")
    console.print(f"{report.outcome}: {report.requests} requests in {report.duration_s:.0f} s")


def _table(report: VerifyReport) -> Table:
    table = Table(box=None)
    for name in ("family", "scenarios", "with a hit", "largest difference", "above noise"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for family in report.families:
        if not family.not_tested:
            hits = "?" if family.hits is None else str(family.hits)
            table.add_row(
                family.name, str(family.scenarios), hits, f"{family.largest:.3g}", str(family.above_noise)
            )
    return table


def _evidence(finding: Finding) -> str:
    """The first diverging token of the worst answer."""
    shown = "" if finding.p_value is None else f" (p = {finding.p_value:.1g})"
    evidence = finding.evidence
    if evidence is None or evidence.position is None:
        return shown
    margin = "unknown" if evidence.margin is None else f"{evidence.margin:.3g} nats"
    return (
        f"{shown}\n  token {evidence.position}: {evidence.cold_token!r} cold, {evidence.warm_token!r} warm, "
        f"margin {margin}; {evidence.cached_tokens} of {evidence.prompt_tokens} prompt tokens cached; "
        f"{evidence.steps}"
    )
