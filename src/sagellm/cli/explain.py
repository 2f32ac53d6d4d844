"""`sagellm explain`: what the scheduler does with a few requests, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sagellm.cli._options import argument, command, flag
from sagellm.cli._settings import Settings
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, nearest
from sagellm.core.types import SLO, Namespace, Request, SamplingParams, Tokens

if TYPE_CHECKING:
    from sagellm.core.config import Config
    from sagellm.kvmgr.scheduler_ir.explain import ScheduleLog, StepRecord

FORM = "NAME=PROMPT+OUTPUT[,KEY=VALUE...]"
KEYS = ("at", "priority", "ttft", "tpot", "tenant", "class", "prefix")
MOST_TOKENS = 1_000_000
LARGEST_TOKEN = (1 << 24) - 1
MAX_STEPS = 100_000
"""Steps after which requests that do not end are an error."""
_REQUESTS_HELP = f"{FORM}, lengths in tokens; keys: at (a step), priority, tenant, class, prefix, ttft, tpot."
_FILE_HELP = "Take requests from this file: JSON lines with id, prompt, output and the same keys, or a trace."
_STORY_HELP = "Show only what happened to this request; may be repeated."


@command
def explain(
    requests: list[str] | None = argument("[REQUEST]...", _REQUESTS_HELP),
    file: Path | None = flag("--requests -r FILE", _FILE_HELP),
    limit: int = flag("N", "Requests taken from a trace.", 32),
    steps: int = flag("N", "Steps shown.", 20),
    first: int = flag("--from N", "The first step shown.", 0),
    step_ms: float = flag("MS", "Duration of a step on the simulated clock.", 50.0),
    story: list[str] | None = flag("--request ID", _STORY_HELP),
    *,
    diff: bool = flag("--diff", "Show how each step differs from the one before it.", False),
    settings: Settings,
) -> None:
    """Schedule a few requests without a model, and show plans and reasons.

    Lines with // are decisions of passes, lines with # are changes without a recorded decision. Every plan is
    verified. There is memory for all requests unless --num-blocks limits it.

    Example: sagellm explain a=40+4 b=24+4,at=1,priority=1 --num-blocks 5 --max-batched-tokens 16
    --max-num-seqs 4
    """
    if steps < 1 or first < 0 or limit < 1:
        raise ConfigError("--steps and --limit begin with 1, --from with 0")
    if not 0 < step_ms < float("inf"):
        raise ConfigError(f"--step-ms {step_ms}: write milliseconds above 0")
    scenario = [parse_request(text) for text in requests or ()]
    if file is not None:
        scenario += read_requests(file, limit, step_ms / 1000)
    if not scenario:
        raise ConfigError(f"nothing to schedule: give requests as {FORM}, or --requests FILE")
    log = run_scenario(settings.load().config, scenario, step_ms / 1000)
    names = [request.name for request in scenario]
    for name in story or ():
        if name not in names:
            raise ConfigError(f"--request {name!r}: no such request.{nearest(name, names)}")
    if story:
        print("\n\n".join("\n".join((f"request {name}", *log.story(name))) for name in story))
        return
    for index, step in enumerate(log.steps[first : first + steps], first):
        print(step.title)
        print(f"step {step.plan.step}\n{log.diff_text(index)}" if diff else step.text)
    rest = len(log.steps) - first - steps
    if rest > 0:
        print(f"# {rest} more steps; --from {first + steps} shows them")


def run_scenario(config: Config, scenario: Sequence[ScenarioRequest], step_s: float) -> ScheduleLog:
    """Run the configured scheduler over a fake backend until all requests have ended.

    Verifies every plan. Without `kv.num_blocks` there is room for all requests at once.
    """
    from sagellm.core.clock import ManualClock
    from sagellm.engines.build import build_engine
    from sagellm.engines.simulator import TokenMemoryBackend
    from sagellm.kvmgr.scheduler_ir.explain import ScheduleLog

    size = config.kv.block_size
    arrivals = to_requests(scenario, step_s)
    num_blocks = config.kv.num_blocks or sum(cdiv(r.num_prompt + r.num_output, size) for r in scenario)
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
    moment = 0
    while arrivals or engine.has_work():
        arrived = [request for at, request in arrivals if at <= moment]
        arrivals = [pair for pair in arrivals if pair[0] > moment]
        for request in arrived:
            engine.add(request)
        if engine.has_work():
            outputs, plan = engine.step(), engine.last_plan
            if plan is not None:
                names = [request.request_id for request in arrived]
                step = log.record(plan, moment * step_s, names, outputs, engine.stats())
                _verify(step, engine.kv.block_size, engine.max_batched_tokens)
        moment += 1
        clock.advance(step_s)
        if moment > MAX_STEPS:
            raise ConfigError(f"the requests have not ended after {MAX_STEPS:,} steps")
    return log


def _verify(step: StepRecord, block_size: int, budget: int) -> None:
    """Raise for an invalid plan. Instances that the plan names count as present."""
    from sagellm.core.ir import LOCAL
    from sagellm.kvmgr.scheduler_ir.graph import IRGraph
    from sagellm.kvmgr.scheduler_ir.verify_graph import verify_graph

    peers = {sent.target_instance for sent in step.plan.transfers}
    for _, placement in step.plan.placements:
        peers |= {placement.prefill, placement.decode, placement.attention, placement.ffn}
    graph = IRGraph.of(step.plan, rows=step.before)
    verify_graph(graph, block_size, token_budget=budget, before={LOCAL: step.before}, peers=peers)


@dataclass(frozen=True, slots=True)
class ScenarioRequest:
    """A request to schedule: lengths in tokens, arrival in steps, goals in seconds.

    It arrives before step `at`. `prefix` is a name and a number of tokens: prompts with the same name share
    their first tokens. `tokens`: the prompt itself, where it is known.
    """

    name: str
    num_prompt: int
    num_output: int
    at: int = 0
    priority: int = 0
    tenant: str = ""
    service_class: str = ""
    prefix: tuple[str, int] | None = None
    slo: SLO = field(default_factory=SLO)
    tokens: tuple[int, ...] = ()


def parse_request(text: str) -> ScenarioRequest:
    """The request that `b=40+8,at=3,prefix=system:16` describes. Raises `ConfigError`."""
    head, *rest = text.split(",")
    name, equals, lengths = head.partition("=")
    prompt, plus, output = lengths.partition("+")
    if not (name and equals and plus):
        raise ConfigError(f"request {text!r}: write {FORM}, for example a=40+8,at=3,priority=1")
    values: dict[str, Any] = {"id": name, "prompt": prompt, "output": output}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"request {text!r}: {part!r} is not KEY=VALUE; keys are {', '.join(KEYS)}")
        values[key.strip()] = value
    return scenario_request(f"request {text!r}", values)


def scenario_request(where: str, values: Mapping[str, Any]) -> ScenarioRequest:
    """The request of fields `id`, `prompt` (a length, or the tokens), `output` and `KEYS`."""
    fields = ("id", "prompt", "output", *KEYS)
    for key in values.keys() - set(fields):
        raise ConfigError(f"{where}: no key {key!r}.{nearest(key, fields)}")
    for key in fields[:3]:
        if key not in values:
            raise ConfigError(f"{where}: {key!r} is missing")
    prompt = values["prompt"]
    tokens = tuple(prompt) if isinstance(prompt, list) else ()
    valid = all(type(token) is int and 0 <= token <= LARGEST_TOKEN for token in tokens)
    if isinstance(prompt, list) and not (tokens and valid):
        raise ConfigError(f"{where}: prompt must hold token ids from 0 to {LARGEST_TOKEN}, at least one")
    made = ScenarioRequest(
        name=str(values["id"]),
        num_prompt=len(tokens) or _whole(where, "prompt", prompt, least=1),
        num_output=_whole(where, "output", values["output"], least=1),
        at=_whole(where, "at", values.get("at", 0), least=0),
        priority=_whole(where, "priority", values.get("priority", 0)),
        tenant=str(values.get("tenant", "")),
        service_class=str(values.get("class", "")),
        prefix=_prefix(where, str(values["prefix"])) if "prefix" in values else None,
        slo=SLO(*(_seconds(where, key, values[key]) if key in values else None for key in ("ttft", "tpot"))),
        tokens=tokens,
    )
    if made.num_prompt + made.num_output > MOST_TOKENS:
        raise ConfigError(f"{where}: prompt and output are at most {MOST_TOKENS:,} tokens together here")
    if made.prefix is not None and (tokens or made.prefix[1] > made.num_prompt):
        shared = made.prefix[1]
        raise ConfigError(f"{where}: a prefix of {shared} tokens needs a prompt of so many, without tokens")
    return made


def read_requests(path: Path, limit: int, step_s: float) -> list[ScenarioRequest]:
    """The requests of a file.

    It holds a JSON object per line with the fields of `scenario_request`, or any trace. Of a trace the first
    `limit` requests are taken, and a step lasts `step_s` seconds.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), "null"))
    except OSError as error:
        raise ConfigError(f"cannot read the requests in {path}: {error.strerror}") from error
    except ValueError:
        first = None  # a compressed trace, or one of another format
    if isinstance(first, dict) and {"id", "prompt", "output"} <= first.keys():
        numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        return [_from_line(f"{path}, line {number}", line) for number, line in numbered if line.strip()]
    return _from_trace(path, limit, step_s)


def to_requests(scenario: Sequence[ScenarioRequest], step_s: float) -> list[tuple[int, Request]]:
    """The requests with the steps before which they arrive, by arrival.

    Prompts share tokens only where they share a prefix.
    """
    names = [request.name for request in scenario]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two requests are named {name!r}: name each once")
    fresh = 1 + max((max(request.tokens, default=0) for request in scenario), default=0)
    lengths: dict[str, int] = {}
    for label, length in (request.prefix for request in scenario if request.prefix is not None):
        lengths[label] = max(length, lengths.get(label, 0))
    starts: dict[str, int] = {}
    for label, length in lengths.items():
        starts[label], fresh = fresh, fresh + length
    made = []
    for request in scenario:
        label, shared = request.prefix or ("", 0)
        head = range(starts[label], starts[label] + shared) if shared else range(0)
        tail = range(fresh, fresh + request.num_prompt - shared)
        fresh += len(tail)
        engine_request = Request(
            request.name,
            Tokens(request.tokens or (*head, *tail)),
            SamplingParams(temperature=0.0, max_tokens=request.num_output),
            arrival_s=request.at * step_s,
            priority=request.priority,
            namespace=Namespace(tenant=request.tenant),
            slo=request.slo,
            service_class=request.service_class,
        )
        made.append((request.at, engine_request))
    return sorted(made, key=lambda pair: pair[0])


def _from_line(where: str, line: str) -> ScenarioRequest:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: write a JSON object with id, prompt and output")
    return scenario_request(where, record)


def _from_trace(path: Path, limit: int, step_s: float) -> list[ScenarioRequest]:
    from sagellm.benchmarks.traces import block_ids, block_size, read_trace

    whole = read_trace(path)
    trace = dataclasses.replace(whole, requests=whole.requests[:limit])
    size = block_size(trace)
    blocks = list(block_ids(trace))
    fresh = 1 + max((max(ids, default=0) for ids in blocks), default=0)
    made = []
    for number, (traced, ids) in enumerate(zip(trace.requests, blocks, strict=True)):
        length = max(1, traced.num_input_tokens)
        missing = cdiv(length, size) - len(ids)  # of a format that has lengths only
        ids = [*ids, *range(fresh, fresh + max(0, missing))]
        fresh += max(0, missing)
        tokens = [block * size + i for block in ids for i in range(size)][:length]
        at = int(traced.time_s / step_s)
        output = max(1, traced.num_output_tokens)
        tenant = traced.tenant
        made.append(ScenarioRequest(f"r{number}", length, output, at, tenant=tenant, tokens=tuple(tokens)))
    return made


def _whole(where: str, key: str, value: Any, least: int | None = None) -> int:
    try:
        number = int(value) if isinstance(value, str | int) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" from {least} on"
        raise ConfigError(f"{where}: {key} is {value!r}; write a whole number{bound}")
    return number


def _seconds(where: str, key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"{where}: {key} is {value!r}; write seconds above 0")
    return number


def _prefix(where: str, text: str) -> tuple[str, int]:
    label, _, length = text.rpartition(":")
    if not label:
        raise ConfigError(f"{where}: prefix is {text!r}; write NAME:TOKENS, for example system:16")
    return label, _whole(where, "the prefix's length", length, least=1)
