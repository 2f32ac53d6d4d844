"""`sagellm bench`: measure this machine, alone or beside other engines."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console

from sagellm.cli._bench_engine import engine
from sagellm.cli._bench_fairness import fairness
from sagellm.cli._bench_http import http
from sagellm.cli._bench_lifetime import lifetime
from sagellm.cli._bench_output import Output
from sagellm.cli._options import App, OptionGroup, command, option
from sagellm.core.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from sagellm.benchmarks.micro.cases import MicroBenchmark

app = App(help="Measure this machine.")
micro = App(help="Time single operations, alone or in turns with other engines.")
app.add_typer(micro, name="micro")
app.command("engine")(engine)
app.command("fairness")(fairness)
app.command("http")(http)
app.command("lifetime")(lifetime)

REPEATS = 100
_PEER_HELP = "Also measure vllm, sglang or lmdeploy, with the Python of its environment; may be repeated."


@dataclass(frozen=True, slots=True)
class Measuring(OptionGroup):
    """What, how often, beside whom, and where to."""

    sections: str | None
    policy: str
    repeats: int
    seed: int
    quick: bool
    peers: tuple[str, ...]
    peer_script: Path | None

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        script = typer.Option(
            "--peer-script",
            metavar="FILE",
            envvar="SAGELLM_PEER_SCRIPT",
            help="The script that measures a peer in its environment.",
        )
        return [
            option("sections", str, typer.Option(metavar="LETTERS", help="Only these; default: all.")),
            option("policy", str, typer.Option(metavar="NAME", help="Eviction policy; default: lru.")),
            option("repeats", int, typer.Option(metavar="N", help=f"Samples per row; default: {REPEATS}.")),
            option("seed", int, typer.Option(metavar="N", help="Seed of the random tokens; default: 0.")),
            option("quick", bool, typer.Option("--quick", help="Small sizes and few samples.")),
            option("peers", list[str], typer.Option("--peer", metavar="NAME=PYTHON", help=_PEER_HELP)),
            option("peer_script", Path, script),
        ]

    @classmethod
    def take(cls, given: dict[str, Any]) -> Self:
        return cls(
            sections=given.pop("sections"),
            policy=given.pop("policy") or "lru",
            repeats=_or(given.pop("repeats"), REPEATS),
            seed=_or(given.pop("seed"), 0),
            quick=bool(given.pop("quick")),
            peers=tuple(given.pop("peers") or ()),
            peer_script=given.pop("peer_script"),
        )


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


@micro.command("prefix_cache")
@command
def prefix_cache(
    index: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Prefix indexes, as a,b; default: all.")
    ] = None,
    *,
    measuring: Measuring,
    output: Output,
) -> None:
    """Look up, insert, evict; and the memory that a cached block costs.

    Sections: a, full hits; b, misses and half hits; c, a new prompt enters; f, metadata per cached block.
    """
    from sagellm.benchmarks.micro.prefix_cache import BENCHMARK

    _measure(BENCHMARK, index, measuring, output)


@micro.command("kv_pool")
@command
def kv_pool(
    pool: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Block pools, as a,b; default: all.")
    ] = None,
    *,
    measuring: Measuring,
    output: Output,
) -> None:
    """Allocate, grow and free, with and without a quota; evict and allocate (all of it section d)."""
    from sagellm.benchmarks.micro.kv_pool import BENCHMARK

    _measure(BENCHMARK, pool, measuring, output)


@micro.command("scheduler_ir")
@command
def scheduler_ir(
    strategy: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Scheduling strategies, as a,b; default: all.")
    ] = None,
    *,
    measuring: Measuring,
    output: Output,
) -> None:
    """Plan and commit a decode step; let many new requests in.

    Sections: e, a step with 64 to 1,024 requests in decode; n, up to 256 new requests at once.
    """
    from sagellm.benchmarks.micro.scheduler_ir import BENCHMARK

    _measure(BENCHMARK, strategy, measuring, output)


@micro.command("eviction")
@command
def eviction(
    policies: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Eviction policies, as a,b; default: all.")
    ] = None,
    *,
    measuring: Measuring,
    output: Output,
) -> None:
    """Follow a hit, let a prompt enter a full cache, evict.

    Sections: u, a cached prompt is used; n, a new prompt enters; e, 1 to 512 blocks of a large cache.
    """
    from sagellm.benchmarks.micro.eviction import BENCHMARK

    _measure(BENCHMARK, policies, measuring, output)


@micro.command("fusion")
@command
def fusion(
    way: Annotated[
        str | None, typer.Option(metavar="NAMES", help="kernels, torch or both, as a,b; default: both.")
    ] = None,
    *,
    measuring: Measuring,
    output: Output,
) -> None:
    """Compute with the CPU kernels and with torch, on one thread, in the shapes of a model of 184 M.

    Sections: m, matrices by rows; a, attention by context; g, what is between the matrices.
    """
    if find_spec("torch") is None:
        raise MissingExtraError("bench micro fusion", "native")
    from sagellm.benchmarks.micro.fusion import BENCHMARK

    _measure(BENCHMARK, way, measuring, output)


@app.command("conversation")
@command
def conversation(
    policy: Annotated[str, typer.Option(metavar="NAME", help="Eviction policy.")] = "lru",
    index: Annotated[str, typer.Option(metavar="NAME", help="Prefix index.")] = "radix",
    blocks: Annotated[
        str, typer.Option(metavar="COUNTS", help="Sizes of the pool in blocks.")
    ] = "10000,1000,500",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the trace.")] = 0,
    *,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Reuse nothing: what the others are compared with.")
    ] = False,
    per_request: Annotated[
        bool, typer.Option("--per-request", help="Also print what each prompt found.")
    ] = False,
    output: Output,
) -> None:
    """Count what 100 prompts of conversations reuse of each other's KV, by size of the pool."""
    from sagellm.benchmarks import conversation as experiment
    from sagellm.benchmarks.reporting import environment

    output.check()
    settings = {"policy": policy, "index": index, "seed": seed, "prefix_caching": not no_prefix_caching}
    outcomes = experiment.run(
        policy=policy,
        index=index,
        pools=_numbers("--blocks", blocks),
        seed=seed,
        prefix_caching=not no_prefix_caching,
    )
    title = f"conversation experiment: index {index}, policy {policy}, block {experiment.BLOCK_SIZE}"
    title += ", no prefix caching" if no_prefix_caching else ""
    tables = [experiment.as_table(outcomes, title), experiment.match_table(outcomes)]
    tables += map(experiment.request_table, outcomes if per_request else ())
    output.show(tables, experiment.as_json(outcomes, environment(datetime.now(UTC)), settings))


def _measure(benchmark: MicroBenchmark, names: str | None, given: Measuring, output: Output) -> None:
    """Run, then show; what was measured before an error is shown and written, too."""
    from sagellm.benchmarks.micro.cases import MicroBenchPlan
    from sagellm.benchmarks.micro.peers import parse_peers
    from sagellm.benchmarks.micro.run import MicroBenchReport, run, tables
    from sagellm.benchmarks.reporting import environment

    variants = _split(names) if names is not None else tuple(benchmark.known.names())
    plan = MicroBenchPlan(variants, policy=given.policy, repeats=given.repeats, seed=given.seed)
    output.check()
    report = MicroBenchReport(
        benchmark.name, environment(datetime.now(UTC)), plan.quick() if given.quick else plan
    )
    sections = "".join(benchmark.sections) if given.sections is None else given.sections
    peers = parse_peers(given.peers, given.peer_script)
    try:
        with Console(stderr=True).status("") as status:
            run(benchmark, report, sections, peers=peers, quick=given.quick, on_section=status.update)
    finally:
        if report.rows:
            output.show(tables(report), report.as_json())


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in _split(text) if part.isdecimal())
    if not numbers or len(numbers) != len(_split(text)) or not all(numbers):
        raise ConfigError(f"{name} {text!r}: write counts from 1 on, for example 10000,500")
    return numbers
