"""`sagellm bench`: measure this machine, alone or beside other engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from sagellm.benchmarks.reporting import Table, check_writable, environment, print_tables, write_json
from sagellm.cli._options import MODEL, App, Model, OptionGroup, command, flag
from sagellm.cli._settings import Settings
from sagellm.core.cores import usable_cores
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.engines.native import DEMO_NAME

if TYPE_CHECKING:
    from sagellm.benchmarks.micro.cases import MicroBenchmark

app = App(help="Measure this machine.")
micro = App(help="Time single operations, alone or in turns with other engines.")
app.add_typer(micro, name="micro")

_PEER_HELP = "Also measure vllm, sglang or lmdeploy, with the Python of its environment; may be repeated."
_SCRIPT_HELP = "The script that measures a peer in its environment."
_ONLY_HELP = (
    "Only these workloads, as a,b; prefill and decode mean all sizes of one; default: all but throughput."
)


@dataclass(frozen=True, slots=True)
class Output(OptionGroup):
    """`--out` and `--markdown`."""

    json_file: Path | None = flag("--out -o FILE", "Write the results to this file as JSON.")
    markdown: bool = flag("--markdown", "Print the tables as Markdown.", False)

    def check(self) -> None:
        """Raise `ConfigError` before a long measurement, if the file cannot be written."""
        if self.json_file is not None:
            check_writable(self.json_file)

    def show(self, tables: Iterable[Table], values: Mapping[str, Any]) -> None:
        """Write the values, if a file is given, then print the tables."""
        if self.json_file is not None:
            write_json(self.json_file, values)
        print_tables(tables, markdown=self.markdown)


@dataclass(frozen=True, slots=True)
class MicroOptions(OptionGroup):
    """What `bench micro` measures, how often, and beside which peers."""

    sections: str | None = flag("LETTERS", "Only these; default: all.")
    policy: str = flag("NAME", "Eviction policy; default: lru.", "lru")
    repeats: int = flag("N", "Samples per row; default: 100.", 100)
    seed: int = flag("N", "Seed of the random tokens; default: 0.", 0)
    quick: bool = flag("--quick", "Small sizes and few samples.", False)
    peers: tuple[str, ...] = flag("--peer NAME=PYTHON", _PEER_HELP, ())
    peer_script: Path | None = flag("--peer-script FILE", _SCRIPT_HELP, envvar="SAGELLM_PEER_SCRIPT")


def _add_micro(name: str, choice: str, variants: str, text: str) -> None:
    """Add `bench micro NAME`; its option --CHOICE names the variants to measure.

    `variants` is the help of that option, `text` the help of the command.
    """

    def measure(
        names: str | None = flag(f"--{choice} NAMES", variants), *, given: MicroOptions, output: Output
    ) -> None:
        if (
            name in ("fusion", "collectives", "interconnect", "parallel", "cot")
            and find_spec("torch") is None
        ):
            raise MissingExtraError(f"bench micro {name}", "native")
        from sagellm.benchmarks.micro.cases import MicroBenchPlan
        from sagellm.benchmarks.micro.peers import parse_peers
        from sagellm.benchmarks.micro.run import MicroBenchReport, run, tables

        benchmark: MicroBenchmark = import_module(f"sagellm.benchmarks.micro.{name}").BENCHMARK
        chosen = _split(names) if names is not None else tuple(benchmark.names())
        plan = MicroBenchPlan(chosen, policy=given.policy, repeats=given.repeats, seed=given.seed)
        output.check()
        report = MicroBenchReport(benchmark.name, environment(), plan.quick() if given.quick else plan)
        sections = "".join(benchmark.sections) if given.sections is None else given.sections
        peers = parse_peers(given.peers, given.peer_script)
        try:
            with Console(stderr=True).status("") as status:
                run(benchmark, report, sections, peers=peers, quick=given.quick, on_section=status.update)
        finally:
            if report.rows:
                output.show(tables(report, benchmark.tables), report.as_json())

    measure.__doc__ = text
    measure.__name__ = name
    micro.add(command(measure))


_add_micro(
    "prefix_cache",
    "index",
    "Prefix indexes, as a,b; default: all.",
    """Measure look-up, insertion and eviction, and the memory that a cached block costs.

    Sections: a, full hits; b, misses and half hits; c, a new prompt enters; f, metadata per cached block.
    """,
)
_add_micro(
    "kv_pool",
    "pool",
    "Block pools, as a,b; default: all.",
    """Measure a block pool, and the tiers below a device.

    Sections: d, allocation, freeing and eviction, with and without a quota; t, what calls of the tiers cost
    the engine's thread; m, bytes to and from host memory and a file in TMPDIR, beside memcpy and raw I/O.
    Section m takes 3 GB of memory and 1 GB of disk, with --quick a sixteenth.
    """,
)
_add_micro(
    "scheduler_ir",
    "strategy",
    "Scheduling strategies, as a,b; default: all.",
    """Measure planning and commit of a decode step, and the admission of many requests.

    Sections: e, a step with 64 to 1,024 requests in decode; n, up to 256 new requests at once.
    """,
)
_add_micro(
    "eviction",
    "policies",
    "Eviction policies, as a,b; default: all.",
    """Measure a policy: a hit, a new prompt in a full cache, eviction.

    Sections: u, a cached prompt is used; n, a new prompt enters; e, 1 to 512 blocks of a large cache.
    """,
)
_add_micro(
    "overlap",
    "executor",
    "Executors: simulated, waiting, working, as a,b; default: all.",
    """Measure how much communication is hidden behind computation, and what planning costs.

    Sections: h, matched tasks in the patterns of inference: hidden share, the most idle lane, time saved;
    p, to plan 64 to 8,192 tasks. Executors: the simulated clock, threads that wait, threads that work.
    """,
)
_add_micro(
    "interconnect",
    "chip",
    "Interconnects to measure, as a,b; default: emulated.",
    """Measure what the adapter of other vendors' chips adds to a call of torch.distributed.

    Section o: collectives of one rank, through the adapter and without it, and a reading of memory.
    """,
)
_add_micro(
    "kv_transfer",
    "transport",
    "shared_memory, tcp or both, as a,b; default: both.",
    """Measure KV transfers to another process, with checksums, beside plain copies.

    Sections, in GB/s of 1 MB blocks: b, in shared memory beside memcpy, and over TCP loopback beside a raw
    socket; c, over TCP loopback beside NIXL and Mooncake, where they are installed. e: size, speed and error
    of the codecs of KV. Takes 2 GB of memory, with --quick a sixteenth.
    """,
)
_add_micro(
    "fusion",
    "way",
    "kernels, torch or both, as a,b; default: both.",
    """Measure the CPU kernels and torch, on one thread, for a 184 M model.

    Sections: m, matrices by rows; a, attention by context; g, the operations between the matrices.
    """,
)
_add_micro(
    "topology",
    "manager",
    "Only system; default: system.",
    """Measure how long reading a topology takes, and choosing by it.

    Sections: d, this machine; r, texts of hosts with 8 and 72 accelerators; p, the best group and path.
    """,
)
_add_micro(
    "collectives",
    "ranks",
    "Numbers of ranks, 2 to 4, as a,b; default: 2.",
    """Measure collectives in shared memory beside gloo, from 1 KB to 64 MB, on ranks of this host.

    Sections: r, all_reduce, beside two copies of the buffer; o, the other operations. Times are wall time.
    """,
)
_add_micro(
    "parallel",
    "backend",
    "shared_memory, auto, torch_distributed or several, as a,b; default: all.",
    """Measure two ranks of one thread beside one process of two threads, for a 184 M model.

    Sections: p, prefill; d, decode steps. Both compute in turns. It takes three minutes.
    """,
)
_add_micro(
    "router",
    "router",
    "Routers, as a,b; default: cost.",
    """Measure a router's decision among 64 instances with a million blocks, and events absorbed.

    Sections: d, look-up and placement by prompt length; e, KV events, decoded and applied, in blocks per
    second of one core. Takes 1 GB of memory, with --quick little.
    """,
)
_add_micro(
    "speculative",
    "proposer",
    "Proposers, as a,b; default: all.",
    """Measure what proposers of speculative decoding cost, and how many tokens a step settles.

    Sections: p, a prompt is taken in; s, a step; e, an output comes to the shared ones; m, bytes per token;
    r, recorded answers, without a model, from the folder that SAGELLM_TRACES names; a, an engine with random
    weights, by acceptance, batch and number of proposed tokens, which takes ten minutes.
    """,
)
_add_micro(
    "cot",
    "model",
    "Models, as a,b; demo or a folder; default: demo.",
    """Measure what accelerations of reasoning save, with accuracy and cost beside the saving.

    Sections: b, budgets of reasoning; e, early exits by probes; s, samples that end once they agree, beside
    all of them; t, the first token of a chat's second turn, computed ahead and not; f, branches of an answer
    that runs, and the same as plain prompts. --repeats is the number of questions.
    """,
)


@command
def engine(
    model: str | None = MODEL,
    shape: str | None = flag("NAME", "Random weights: S (184 M), M, 8B, tiny, gemma3, qwen3-moe, gpt-oss."),
    only: str | None = flag("NAMES", _ONLY_HELP),
    repeats: int = flag("N", "Times that each workload runs.", 3),
    compare: list[Path] | None = flag("FILE", "Rows of the peers' harness to stand beside; may be repeated."),
    *,
    settings: Settings,
    output: Output,
) -> None:
    """Measure the whole engine on fixed workloads.

    They are prefill, decode by batch, offline throughput, conversations, long context and cold start. The
    engine uses every core unless --threads says otherwise. "others" is the share of the machine that other
    processes took: compare rows only where it is near 0.
    """
    from sagellm.benchmarks.engine.peer_rows import read_peers
    from sagellm.benchmarks.engine.run import EngineBenchPlan, EngineBenchReport, run, tables
    from sagellm.benchmarks.engine.shapes import shape_named, write_model
    from sagellm.benchmarks.engine.workloads import chosen_names

    names = chosen_names([word.strip() for word in only.split(",")] if only is not None else [])
    if shape is not None and model is not None:
        raise ConfigError("--shape makes a model of random weights: leave out --model, or --shape")
    random_shape = None if shape is None else shape_named(shape)
    label = random_shape.label if random_shape else Path(model).name if model else DEMO_NAME
    config = settings.load(model=model).config
    if config.engine.threads is None:
        every_core = config.engine.model_copy(update={"threads": usable_cores()})
        config = config.model_copy(update={"engine": every_core})
    plan = EngineBenchPlan(config, label, names, repeats)
    peers = read_peers(compare or [], label, plan.threads)
    output.check()
    with TemporaryDirectory(prefix="sagellm-bench-") if random_shape else nullcontext() as folder:
        if random_shape is not None and folder is not None:
            write_model(random_shape, Path(folder))
            on_disk = config.model.model_copy(update={"name": folder})
            plan = replace(plan, config=config.model_copy(update={"model": on_disk}))
        report = EngineBenchReport(plan, environment(), peers)
        try:
            with Console(stderr=True).status("") as status:
                run(report, on_run=status.update)
        finally:
            if report.measured:
                output.show(tables(report), report.as_json())
                for name, reason in report.left_out.items():
                    print(f"left out: {name} {reason}")
    if only is not None and report.left_out:
        [(name, reason), *_] = report.left_out.items()
        raise ConfigError(f"{name} {reason}")


@command
def fairness(
    policy: list[str] | None = flag("NAME", "Beside lru; may be repeated; default: qos."),
    capacity: list[str] | None = flag(
        "SIZE", "In blocks, or as a share of the unique ones as 1%; may be repeated; default: 0.5% to 5%."
    ),
    seed: int = flag("N", "Seed of the trace.", 0),
    *,
    output: Output,
) -> None:
    """Measure how fairly policies share one cache between three tenants.

    Their rates are 8:1:1, and they have no content in common. Jain's index is over the tenants' hit ratios,
    each divided by that of an infinite cache. The target: 0.9 or more where LRU has less than 0.7, for at
    most 3 points of all hits.
    """
    from sagellm.benchmarks.fairness import CAPACITIES, POLICIES, as_json, as_table, run, tenants_trace

    output.check()
    policies, capacities = policy or list(POLICIES), capacity or list(CAPACITIES)
    trace = tenants_trace(seed)
    with Console(stderr=True).status("") as status:
        outcomes = run(trace, policies, capacities, on_case=status.update)
    title = f"{trace.name}: hit ratio of each tenant, in brackets divided by that of an infinite cache"
    settings = {"seed": seed, "policies": policies, "capacities": capacities}
    output.show([as_table(outcomes, title)], as_json(outcomes, trace, environment(), settings))


@command
def http(
    url: str | None = flag("URL", "A server that runs already; default: ours, started for this."),
    key: str | None = flag("--key KEY", "API key of that server.", envvar="OPENAI_API_KEY", show_envvar=True),
    name: str | None = flag("NAME", "Name of the server in the report."),
    kinds: str = flag(
        "--answers NAMES", "Only these, as a,b: list, one-token, stream.", "list,one-token,stream"
    ),
    concurrency: str = flag("COUNTS", "Requests at a time, as 1,8,32.", "1,8,32"),
    requests: int = flag("N", "Requests in each run; of streams 1/8.", 400),
    tokens: int = flag("N", "Tokens of a stream.", 64),
    repeats: int = flag("N", "Times that each case runs.", 3),
    *,
    model: Model,
    output: Output,
) -> None:
    """Measure an HTTP server: latency and requests per second of small and streamed answers.

    Each case runs over kept connections and over new ones. "list" is GET /v1/models, which uses no engine.
    The client is a process of its own. Use a tiny model, so that the figures are the server's.
    """
    from sagellm.benchmarks.http import run as bench

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
        report = bench.HttpBenchReport(plan, target, environment())
        try:
            bench.run(report, on_run=status.update)
        finally:
            status.stop()
            if report.runs:
                output.show(report.tables(), report.as_json())


@command
def lifetime(
    traces: Path | None = flag("FOLDER", "The folder that holds the traces.", envvar="SAGELLM_TRACES"),
    workload: list[str] | None = flag("NAME", "Only this one; may be repeated; default: all."),
    predictor: list[str] | None = flag("NAME", "Of lengths; may be repeated; default: statistical."),
    part: str = flag("PART", "test; or validation, to choose settings by.", "test"),
    after: int = flag("N", "Ask for lengths when N tokens are generated.", 0),
    *,
    output: Output,
) -> None:
    """Predict output lengths and block reuse on traces, beside trivial baselines.

    Predictors learn during the run, from what has ended by then. "to constant" compares with the best
    constant for the same requests, "skill" with their base rate; neither can be known beforehand.
    """
    from sagellm.benchmarks.lifetime.run import NAMES, LifetimeBenchPlan, run

    predictors = tuple(predictor or ("statistical",))
    plan = LifetimeBenchPlan(tuple(workload or NAMES), predictors, cast("Any", part), after)
    plan.check()
    output.check()
    with Console(stderr=True).status("") as status:
        report = run(plan, traces, environment(), status.update)
    output.show(report.tables(), report.as_json())


@command
def conversation(
    policy: str = flag("NAME", "Eviction policy.", "lru"),
    index: str = flag("NAME", "Prefix index.", "radix"),
    blocks: str = flag("COUNTS", "Sizes of the pool in blocks.", "10000,1000,500"),
    seed: int = flag("N", "Seed of the trace.", 0),
    *,
    no_prefix_caching: bool = flag("--no-prefix-caching", "Reuse nothing, as a baseline.", False),
    per_request: bool = flag("--per-request", "Also print what each prompt found.", False),
    output: Output,
) -> None:
    """Count the KV that 100 prompts of conversations reuse, by size of the pool."""
    from sagellm.benchmarks import conversation as experiment

    output.check()
    settings: dict[str, Any] = {"policy": policy, "index": index, "seed": seed}
    settings["prefix_caching"] = not no_prefix_caching
    pools = _numbers("--blocks", blocks)
    outcomes = experiment.run(pools=pools, **settings)
    title = f"conversation experiment: index {index}, policy {policy}, block {experiment.BLOCK_SIZE}"
    title += ", no prefix caching" if no_prefix_caching else ""
    tables = [experiment.as_table(outcomes, title), experiment.match_table(outcomes)]
    tables += map(experiment.request_table, outcomes if per_request else ())
    output.show(tables, experiment.as_json(outcomes, environment(), settings))


app.add(engine, fairness, http, lifetime, conversation)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in _split(text) if part.isdecimal())
    if not numbers or len(numbers) != len(_split(text)) or not all(numbers):
        raise ConfigError(f"{name} {text!r}: write counts from 1 on, for example 10000,500")
    return numbers
