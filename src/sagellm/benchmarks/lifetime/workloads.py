"""The workloads by name: which files they need, how their requests are split, what is known of a request."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagellm.benchmarks.lifetime.demo_tasks import demo_tasks
from sagellm.benchmarks.lifetime.samples import LengthSample, LengthWorkload, split_by_hash, split_by_time
from sagellm.benchmarks.lifetime.sessions import Place, infer_sessions
from sagellm.benchmarks.traces._parsing import json_object, text
from sagellm.benchmarks.traces.reading import opened, read_trace
from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.core.errors import ConfigError, UnknownNameError, nearest

Loader = Callable[[Path | None], LengthWorkload]
TOKENS_PER_WORD = 1.3
"""About what English words come to; the answers of that collection are words, not tokens."""


def find_trace(folder: Path | None, stem: str) -> Path:
    """The file of the folder whose name begins so; raises `ConfigError` naming what was looked for."""
    if folder is None:
        raise ConfigError(f"this workload needs --traces FOLDER, a folder with {stem}*")
    found = sorted(folder.glob(f"{stem}*"))
    if not found:
        raise ConfigError(f"{folder} has no file {stem}*: name the folder that holds the traces")
    return found[0]


def load_azure(folder: Path | None, kind: str) -> LengthWorkload:
    trace = read_trace(find_trace(folder, f"azure2023_{kind}"), "azure")
    return LengthWorkload(f"azure_{kind}", "by time", split_by_time(_plain(trace.requests)))


def load_mooncake(folder: Path | None, kind: str) -> LengthWorkload:
    """Sessions are inferred from the block ids."""
    trace = read_trace(find_trace(folder, f"mooncake_{kind}"), "mooncake")
    samples = _plain(trace.requests, infer_sessions(trace.requests))
    return LengthWorkload(f"mooncake_{kind}", "by time", split_by_time(samples))


def load_coding_agents(folder: Path | None) -> LengthWorkload:
    """A session's sub-agents count as one more session of their own. The category is model and kind of
    input."""
    trace = read_trace(find_trace(folder, "cc_agentic_sessions"), "coding_agents", every=1024)
    keyed = []
    for number, request in enumerate(trace.requests):
        meta = request.meta
        subagent = "sub-agents" if meta.get("subagent") else "main"
        inputs = "+".join(sorted(meta.get("input_types") or ()))
        sample = _sample(
            f"r{number}",
            request,
            session_id=f"{request.session}/{subagent}",
            category=f"{meta.get('model')}/{subagent}/{inputs}",
        )
        keyed.append((str(request.session), sample))
    return LengthWorkload("coding_agents", "by session", split_by_hash(keyed))


def load_lmcache(folder: Path | None, agent: str) -> LengthWorkload:
    """A token is 4 bytes of text, as the reader of that format says."""
    trace = read_trace(find_trace(folder, f"lmcache_{agent}"), "lmcache_agents")
    keyed = [
        (
            str(request.session),
            _sample(f"r{n}", request, session_id=request.session, tokens=request.ids.tolist()),
        )
        for n, request in enumerate(trace.requests)
    ]
    return LengthWorkload(f"lmcache_{agent}", "by session", split_by_hash(keyed))


def load_alpaca_eval(folder: Path | None) -> LengthWorkload:
    """Many models' answers to one prompt: the category is the model, a prompt is in one part alone. Lengths
    are words x 1.3; the tokens of a prompt are hashes of its words."""
    keyed = []
    for number, (model, prompt, answer) in enumerate(_answers(find_trace(folder, "alpaca_eval_outputs"))):
        words = prompt.split()
        sample = LengthSample(
            name=f"r{number}",
            time_s=float(zlib.crc32(f"{model}:{prompt}".encode())),  # models and prompts well mixed
            num_input=round(TOKENS_PER_WORD * len(words)),
            num_output=round(TOKENS_PER_WORD * len(answer.split())),
            category=model,
            tokens=[zlib.crc32(word.lower().encode()) % 2**31 for word in words],
        )
        keyed.append((prompt, sample))
    return LengthWorkload("alpaca_eval", "by prompt", split_by_hash(keyed), learns_in_test=False)


def _answers(path: Path) -> Iterator[tuple[str, str, str]]:
    with opened(path) as stream:
        for line in stream:
            record = json_object(line.decode())
            yield text(record, "generator"), text(record, "instruction"), text(record, "output")


def _plain(requests: Sequence[TraceRequest], places: Sequence[Place] = ()) -> list[LengthSample]:
    sessions: list[str | None] = [place.session_id for place in places]
    sessions = sessions or [None] * len(requests)
    return [
        _sample(f"r{n}", request, session_id=session)
        for n, (request, session) in enumerate(zip(requests, sessions, strict=True))
    ]


def _sample(
    name: str,
    request: TraceRequest,
    session_id: str | None = None,
    category: str = "",
    tokens: Sequence[int] = (),
) -> LengthSample:
    return LengthSample(
        name,
        request.time_s,
        request.num_input_tokens,
        request.num_output_tokens,
        session_id=session_id,
        category=category,
        tokens=tokens,
    )


LENGTH_WORKLOADS: Mapping[str, Loader] = {
    "demo_tasks": lambda folder: demo_tasks(),
    "azure_conv": lambda folder: load_azure(folder, "conv"),
    "azure_code": lambda folder: load_azure(folder, "code"),
    "mooncake_conversation": lambda folder: load_mooncake(folder, "conversation"),
    "mooncake_synthetic": lambda folder: load_mooncake(folder, "synthetic"),
    "coding_agents": load_coding_agents,
    "lmcache_miniswe": lambda folder: load_lmcache(folder, "miniswe"),
    "lmcache_magagent": lambda folder: load_lmcache(folder, "magagent"),
    "alpaca_eval": load_alpaca_eval,
}


@dataclass(frozen=True, slots=True)
class ReuseTrace:
    """Block uses to learn from: the trace, and which turn of its session each request is."""

    name: str
    trace: Trace
    turns: tuple[int, ...]


def load_reuse(name: str, folder: Path | None) -> ReuseTrace:
    """Raises `UnknownNameError` with the names for one that is none of `REUSE_WORKLOADS`."""
    if name not in REUSE_WORKLOADS:
        raise UnknownNameError(f"unknown reuse workload {name!r}.{nearest(name, REUSE_WORKLOADS)}")
    stem, format_ = REUSE_WORKLOADS[name]
    trace = read_trace(find_trace(folder, stem), format_)
    if format_ == "coding_agents":
        turns = _turns_by_session(trace.requests)
    else:
        turns = tuple(place.turn for place in infer_sessions(trace.requests))
    return ReuseTrace(name, trace, turns)


def _turns_by_session(requests: Sequence[TraceRequest]) -> tuple[int, ...]:
    counts: Counter[tuple[str | None, bool]] = Counter()
    turns = []
    for request in requests:
        key = request.session, bool(request.meta.get("subagent"))
        counts[key] += 1
        turns.append(counts[key])
    return tuple(turns)


REUSE_WORKLOADS: Mapping[str, tuple[str, str]] = {
    "mooncake_conversation": ("mooncake_conversation", "mooncake"),
    "mooncake_synthetic": ("mooncake_synthetic", "mooncake"),
    "coding_agents": ("cc_agentic_sessions", "coding_agents"),
}
"""Name -> the beginning of the file's name, and its format."""


def load_lengths(name: str, folder: Path | None) -> LengthWorkload:
    """Raises `UnknownNameError` with the names for one that is none of `LENGTH_WORKLOADS`."""
    if name not in LENGTH_WORKLOADS:
        raise UnknownNameError(f"unknown workload {name!r}.{nearest(name, LENGTH_WORKLOADS)}")
    return LENGTH_WORKLOADS[name](folder)
