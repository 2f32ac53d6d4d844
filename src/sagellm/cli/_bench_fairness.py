"""`sagellm bench fairness`: how policies divide one cache between tenants of unequal rates."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from sagellm.cli._bench_output import Output
from sagellm.cli._options import command


@command
def fairness(
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Beside lru; may be repeated; default: qos."),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="In blocks, or as a share of the unique ones as 1%; may be repeated; default: 0.5% to 5%.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the trace.")] = 0,
    *,
    output: Output,
) -> None:
    """Share one cache between three tenants, at rates of 8:1:1, who have no content in common.

    Jain's index is over the tenants' hit ratios, each divided by what an infinite cache would give. The
    target: 0.9 or more where LRU has less than 0.7, for at most 3 points of all hits.
    """
    from sagellm.benchmarks.fairness import CAPACITIES, POLICIES, as_json, as_table, run, tenants_trace
    from sagellm.benchmarks.reporting import environment

    output.check()
    policies, capacities = policy or list(POLICIES), capacity or list(CAPACITIES)
    trace = tenants_trace(seed)
    with Console(stderr=True).status("") as status:
        outcomes = run(trace, policies, capacities, on_case=status.update)
    title = f"{trace.name}: hit ratio of each tenant, in brackets divided by that of an infinite cache"
    settings = {"seed": seed, "policies": policies, "capacities": capacities}
    values = as_json(outcomes, trace, environment(datetime.now(UTC)), settings)
    output.show([as_table(outcomes, title)], values)
