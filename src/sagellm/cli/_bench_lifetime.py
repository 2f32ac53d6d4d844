"""`sagellm bench lifetime`: how well output lengths and block reuse are predicted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from sagellm.cli._bench_output import Output
from sagellm.cli._options import command


@command
def lifetime(
    traces: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", envvar="SAGELLM_TRACES", help="The folder that holds the traces."),
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated; default: all.")
    ] = None,
    predictor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of lengths; may be repeated; default: statistical."),
    ] = None,
    part: Annotated[
        str, typer.Option(metavar="PART", help="test; or validation, to choose settings by.")
    ] = "test",
    after: Annotated[int, typer.Option(metavar="N", help="Ask for lengths when N tokens are generated.")] = 0,
    *,
    output: Output,
) -> None:
    """Predict output lengths and block reuse on traces, beside trivial baselines.

    Predictors learn as they go, from what has ended by then. "to constant" compares with the best constant of
    the same requests, "skill" with their base rate; neither can be known beforehand.
    """
    from sagellm.benchmarks.lifetime.run import NAMES, LifetimeBenchPlan, run
    from sagellm.benchmarks.reporting import environment

    plan = LifetimeBenchPlan(
        tuple(workload or NAMES), tuple(predictor or ("statistical",)), cast("Any", part), after
    )
    plan.check()
    output.check()
    with Console(stderr=True).status("") as status:
        report = run(plan, traces, environment(datetime.now(UTC)), status.update)
    output.show(report.tables(), report.as_json())
