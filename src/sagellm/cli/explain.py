"""`sagellm explain`: what the scheduler does with a few requests, step by step, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sagellm.cli._options import command
from sagellm.cli._scenario import FORM, ScenarioRequest, parse_request, read_requests, to_requests
from sagellm.cli._settings import Settings
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.core.types import Request
    from sagellm.engines.engine import Engine
    from sagellm.kvmgr.scheduler_ir.explain import ScheduleLog, StepRecord

MAX_STEPS = 100_000
"""Steps after which requests that do not end are given up."""
_REQUESTS_HELP = f"{FORM}, lengths in tokens; keys: at (a step), priority, tenant, class, prefix, ttft, tpot."
_FILE_HELP = "Take requests from there: JSON lines with id, prompt, output and the same keys, or a trace."
_STORY_HELP = "Tell the story of this request instead; may be repeated."
_STEP_MS_HELP = "What a step takes on the simulated clock."


@command
def explain(
    requests: Annotated[list[str] | None, typer.Argument(metavar="[REQUEST]...", help=_REQUESTS_HELP)] = None,
    file: Annotated[Path | None, typer.Option("--requests", "-r", metavar="FILE", help=_FILE_HELP)] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Requests taken from a trace.")] = 32,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps shown.")] = 20,
    first: Annotated[int, typer.Option("--from", metavar="N", help="The first step shown.")] = 0,
    step_ms: Annotated[float, typer.Option(metavar="MS", help=_STEP_MS_HELP)] = 50.0,
    story: Annotated[list[str] | None, typer.Option("--request", metavar="ID", help=_STORY_HELP)] = None,
    *,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what each step does otherwise than the one before it.")
    ] = False,
    settings: Settings,
) -> None:
    """Schedule a few requests without a model, and show each step's plan and what each pass did, and why.

    Lines with // are decisions of passes, lines with # what a pass changed without saying so. Every plan is
    verified. Memory is no bottleneck unless --num-blocks makes it one.

    Example: sagellm explain a=40+4 b=24+4,at=1,priority=1 --num-blocks 5 --max-batched-tokens 16
    --max-num-seqs 4
    """
    if steps < 1 or first < 0 or limit < 1:
        raise ConfigError("--steps and --limit begin with 1, --from with 0")
    if not 0 < step_ms < float("inf"):
        raise ConfigError(f"--step-ms {step_ms}: write milliseconds above 0")
    scenario = _scenario(requests or (), file, limit, step_ms / 1000)
    log = run_scenario(settings.load().config, scenario, step_ms / 1000)
    names = [one.name for one in scenario]
    for name in story or ():
        if name not in names:
            raise ConfigError(f"--request {name!r}: no such request.{nearest(name, names)}")
    if story:
        print("\n\n".join("\n".join((f"request {name}", *log.story(name))) for name in story))
    else:
        _show(log, first, steps, diff=diff)


def _scenario(texts: Sequence[str], file: Path | None, limit: int, step_s: float) -> list[ScenarioRequest]:
    found = [parse_request(text) for text in texts]
    if file is not None:
        found += read_requests(file, limit, step_s)
    if not found:
        raise ConfigError(f"nothing to schedule: give requests as {FORM}, or --requests FILE")
    return found


def run_scenario(config: Config, scenario: Sequence[ScenarioRequest], step_s: float) -> ScheduleLog:
    """Run the configured scheduler over a fake backend until all requests have ended; every plan is verified.
    Without `kv.num_blocks` there is room for all of them at once."""
    from sagellm.core.clock import ManualClock
    from sagellm.engines.build import build_engine
    from sagellm.engines.simulator import TokenMemoryBackend
    from sagellm.kvmgr.scheduler_ir.explain import ScheduleLog

    size = config.kv.block_size
    arrivals = to_requests(scenario, step_s)
    num_blocks = config.kv.num_blocks or sum(cdiv(one.num_prompt + one.num_output, size) for one in scenario)
    backend = TokenMemoryBackend(
        num_blocks=num_blocks,
        block_size=size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=num_blocks * size + 1,
        vocab_size=1 + max(max(request.tokens.view()) for _, request in arrivals),
    )
    clock, log = ManualClock(), ScheduleLog()
    engine = build_engine(config, backend, clock=clock)
    engine.scheduler.use(log.watch(engine.scheduler.order))
    _run(engine, log, clock.advance, arrivals, step_s)
    return log


def _run(
    engine: Engine,
    log: ScheduleLog,
    advance: Callable[[float], None],
    arrivals: Sequence[tuple[int, Request]],
    step_s: float,
) -> None:
    waiting, moment = list(arrivals), 0
    budget = engine.max_batched_tokens
    while waiting or engine.has_work():
        arrived = [request for at, request in waiting if at <= moment]
        waiting = [pair for pair in waiting if pair[0] > moment]
        for request in arrived:
            engine.add(request)
        if engine.has_work():
            outputs, plan = engine.step(), engine.last_plan
            if plan is not None:
                names = [request.request_id for request in arrived]
                step = log.record(plan, moment * step_s, names, outputs, engine.stats())
                _verify(step, engine.kv.block_size, budget)
        moment += 1
        advance(step_s)
        if moment > MAX_STEPS:
            raise ConfigError(f"the requests have not ended after {MAX_STEPS:,} steps")


def _verify(step: StepRecord, block_size: int, budget: int) -> None:
    """Instances that the plan itself names are there."""
    from sagellm.core.ir import LOCAL
    from sagellm.kvmgr.scheduler_ir.graph import IRGraph
    from sagellm.kvmgr.scheduler_ir.verify_graph import verify_graph

    peers = {sent.target_instance for sent in step.plan.transfers}
    for _, one in step.plan.placements:
        peers |= {one.prefill, one.decode, one.attention, one.ffn}
    graph = IRGraph.of(step.plan, rows=step.before)
    verify_graph(graph, block_size, token_budget=budget, before={LOCAL: step.before}, peers=peers)


def _show(log: ScheduleLog, first: int, count: int, *, diff: bool) -> None:
    shown = log.steps[first : first + count]
    for index, step in enumerate(shown, first):
        print(step.title)
        print(f"step {step.plan.step}\n{log.diff_text(index)}" if diff else step.text)
    rest = len(log.steps) - first - len(shown)
    if rest > 0:
        print(f"# {rest} more steps; --from {first + count} shows them")
