"""The workloads by name, each split into parts for training, validation and test.

A sample is a request whose output length is known. Reuse workloads are traces with block ids.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import sagellm
from sagellm.benchmarks.traces._parsing import json_object, text
from sagellm.benchmarks.traces.files import opened, read_trace
from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.core.errors import ConfigError, MissingExtraError, UnknownNameError, nearest
from sagellm.engines.native import DEMO_MODEL

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
TRAIN, VALIDATION = 0.6, 0.2
"""Shares of the first two parts; the rest is test."""
MIN_SHARED_BLOCKS = 2
"""A shared first block may be just a common system prompt."""
# The tools are part of a checkout and of no wheel.
TOOLS = Path(sagellm.__file__).resolve().parents[2] / "tools"
COUNTS = {"train": 16_000, "validation": 1000, "test": 1000}
TURNS, SHARES = (1, 2, 3), (6, 2, 2)
MAX_TOKENS = 512
"""Only the last tokens of a prompt are kept: predictors look at no others."""
TOKENS_PER_WORD = 1.3
"""An estimate for English; the lengths in AlpacaEval are words, not tokens."""
REUSE_WORKLOADS: Mapping[str, tuple[str, str]] = {
    "mooncake_conversation": ("mooncake_conversation", "mooncake"),
    "mooncake_synthetic": ("mooncake_synthetic", "mooncake"),
    "coding_agents": ("cc_agentic_sessions", "coding_agents"),
}
"""Name -> the beginning of the file's name, and its format."""


@dataclass(frozen=True, slots=True)
class LengthSample:
    """One request. `tokens` is the prompt, empty if a trace has no text; times are in seconds."""

    name: str
    time_s: float
    num_input: int
    num_output: int
    part: Part = "train"
    session_id: str | None = None
    category: str = ""
    tokens: Sequence[int] = ()

    @classmethod
    def of(cls, number: int, request: TraceRequest, **details: Any) -> LengthSample:
        """Returns request `number` of a trace as a sample."""
        lengths = request.num_input_tokens, request.num_output_tokens
        return cls(f"r{number}", request.time_s, *lengths, **details)


@dataclass(frozen=True, slots=True)
class LengthWorkload:
    """Samples in the order of the parts, and of time within a part. With `learns_in_test`, predictors
    learn outcomes of the tested part when requests end, as in service (split by time or by session). It is
    off where the split keeps prompts apart and one prompt has many answers."""

    name: str
    split: str
    samples: tuple[LengthSample, ...]
    learns_in_test: bool = True

    def of(self, part: Part) -> list[LengthSample]:
        return [sample for sample in self.samples if sample.part == part]


def split_by_time(samples: Iterable[LengthSample]) -> tuple[LengthSample, ...]:
    """Splits by time: 60 % training, then 20 % validation, then test."""
    ordered = sorted(samples, key=lambda sample: sample.time_s)
    return tuple(
        replace(sample, part=part_at((place + 0.5) / len(ordered))) for place, sample in enumerate(ordered)
    )


def split_by_hash(samples: Iterable[tuple[str, LengthSample]]) -> tuple[LengthSample, ...]:
    """Puts all samples of one key (a session, a prompt) into one part. Parts are in order of time."""
    parts = [replace(sample, part=part_of(key)) for key, sample in samples]
    return tuple(sorted(parts, key=lambda sample: (PARTS.index(sample.part), sample.time_s)))


def part_of(key: str) -> Part:
    """Returns the part of a key. Parts get 60, 20 and 20 % of all keys."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return part_at(int.from_bytes(digest, "big") / 2**32)


def part_at(place: float) -> Part:
    """Returns the part at a place from 0 to 1."""
    return "train" if place < TRAIN else "validation" if place < TRAIN + VALIDATION else "test"


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The session of a request, and its turn in it, from 1 on."""

    session_id: str
    turn: int


def infer_sessions(requests: Sequence[TraceRequest]) -> list[SessionTurn]:
    """Infers sessions from block ids. A prompt that continues the whole prompt of an earlier request is
    the next turn of its session. The earlier prompt's last block does not count, since it may be partial.
    If several prompts continue the same request, each of them is its next turn."""
    last_user: dict[tuple[object, int], int] = {}
    places: list[SessionTurn] = []
    for number, request in enumerate(requests):
        parent = _parent(request, requests, last_user)
        if parent is None:
            places.append(SessionTurn(f"s{number}", 1))
        else:
            places.append(SessionTurn(places[parent].session_id, places[parent].turn + 1))
        for block in request.ids:
            last_user[request.namespace, block] = number
    return places


def _parent(
    request: TraceRequest, requests: Sequence[TraceRequest], last_user: dict[tuple[object, int], int]
) -> int | None:
    """Returns the earlier request that this one continues, if there is one. It is the one that used the
    deepest shared block."""
    ids = request.ids.tolist()
    for depth in range(len(ids), MIN_SHARED_BLOCKS - 1, -1):
        number = last_user.get((request.namespace, ids[depth - 1]))
        if number is not None:
            return number if depth >= len(requests[number].ids) - 1 else None
    return None


def demo_tasks(seed: int = 0, tools: Path = TOOLS) -> LengthWorkload:
    """Conversations of one to three turns. The last answer is predicted, its end token included.
    `tools/demo_data.py` makes the tasks; prompts and answers are in tokens of the demo model's tokenizer.
    The parts are those of the demo model's data: no question occurs in two of them."""
    data, text = _import_generator(tools)
    try:
        from sagellm.engines.native.tokenizer import Tokenizer
    except ImportError as error:
        raise MissingExtraError("the demo model's tokenizer", "native") from error
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    samples = []
    for part in PARTS:
        chance = random.Random(f"{part}:{seed}")
        for number in range(COUNTS[part]):
            made = data.conversation(chance, part, chance.choices(TURNS, SHARES)[0])
            prompt = tokenizer.encode(text.prompt_text(made)).tolist()
            num_output = len(tokenizer.encode(made.turns[-1].answer)) + 1
            name, tokens = f"{part}-{number}", prompt[-MAX_TOKENS:]
            samples.append(
                LengthSample(name, float(number), len(prompt), num_output, part=part, tokens=tokens)
            )
    return LengthWorkload("demo_tasks", "by content", tuple(samples), learns_in_test=False)


def _import_generator(tools: Path) -> tuple[Any, Any]:
    if not (tools / "demo_data.py").is_file():
        raise ConfigError("the workload demo_tasks needs a checkout of sageLLM, whose tools make the tasks")
    sys.path.insert(0, str(tools))
    try:
        return importlib.import_module("demo_data"), importlib.import_module("demo_text")
    finally:
        sys.path.remove(str(tools))


Loader = Callable[[Path | None], LengthWorkload]


def find_trace(folder: Path | None, stem: str) -> Path:
    """Returns the file of the folder whose name starts with `stem`. Raises `ConfigError` naming the
    missing file."""
    if folder is None:
        raise ConfigError(f"this workload needs --traces FOLDER, a folder with {stem}*")
    found = sorted(folder.glob(f"{stem}*"))
    if not found:
        raise ConfigError(f"{folder} has no file {stem}*: name the folder that holds the traces")
    return found[0]


def load_azure(folder: Path | None, kind: str) -> LengthWorkload:
    trace = read_trace(find_trace(folder, f"azure2023_{kind}"), "azure")
    samples = [LengthSample.of(number, request) for number, request in enumerate(trace.requests)]
    return LengthWorkload(f"azure_{kind}", "by time", split_by_time(samples))


def load_mooncake(folder: Path | None, kind: str) -> LengthWorkload:
    """Infers sessions from the block ids."""
    trace = read_trace(find_trace(folder, f"mooncake_{kind}"), "mooncake")
    samples = [
        LengthSample.of(number, request, session_id=turn.session_id)
        for number, (request, turn) in enumerate(
            zip(trace.requests, infer_sessions(trace.requests), strict=True)
        )
    ]
    return LengthWorkload(f"mooncake_{kind}", "by time", split_by_time(samples))


def load_coding_agents(folder: Path | None) -> LengthWorkload:
    """Counts a session's sub-agents as one more session. The category is the model and the kind of input."""
    trace = read_trace(find_trace(folder, "cc_agentic_sessions"), "coding_agents", every=1024)
    keyed = []
    for number, request in enumerate(trace.requests):
        meta = request.meta
        subagent = "sub-agents" if meta.get("subagent") else "main"
        inputs = "+".join(sorted(meta.get("input_types") or ()))
        session_id, category = f"{request.session}/{subagent}", f"{meta.get('model')}/{subagent}/{inputs}"
        sample = LengthSample.of(number, request, session_id=session_id, category=category)
        keyed.append((str(request.session), sample))
    return LengthWorkload("coding_agents", "by session", split_by_hash(keyed))


def load_lmcache(folder: Path | None, agent: str) -> LengthWorkload:
    """A token is 4 bytes of text, as in the reader of that format."""
    trace = read_trace(find_trace(folder, f"lmcache_{agent}"), "lmcache_agents")
    keyed = []
    for number, request in enumerate(trace.requests):
        tokens = request.ids.tolist()
        sample = LengthSample.of(number, request, session_id=request.session, tokens=tokens)
        keyed.append((str(request.session), sample))
    return LengthWorkload(f"lmcache_{agent}", "by session", split_by_hash(keyed))


def load_alpaca_eval(folder: Path | None) -> LengthWorkload:
    """Answers of many models to each prompt. The category is the model. A prompt is in one part only.
    Lengths are words x 1.3; the tokens of a prompt are hashes of its words."""
    with opened(find_trace(folder, "alpaca_eval_outputs")) as lines:
        records = [json_object(line.decode()) for line in lines]
    keyed = []
    for number, record in enumerate(records):
        model, prompt = text(record, "generator"), text(record, "instruction")
        words = prompt.split()
        sample = LengthSample(
            name=f"r{number}",
            time_s=float(zlib.crc32(f"{model}:{prompt}".encode())),  # models and prompts well mixed
            num_input=round(TOKENS_PER_WORD * len(words)),
            num_output=round(TOKENS_PER_WORD * len(text(record, "output").split())),
            category=model,
            tokens=[zlib.crc32(word.lower().encode()) % 2**31 for word in words],
        )
        keyed.append((prompt, sample))
    return LengthWorkload("alpaca_eval", "by prompt", split_by_hash(keyed), learns_in_test=False)


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
    """A trace of block uses, and which turn of its session each request is."""

    name: str
    trace: Trace
    turns: tuple[int, ...]


def load_reuse(name: str, folder: Path | None) -> ReuseTrace:
    """Raises `UnknownNameError` with the known names if `name` is not in `REUSE_WORKLOADS`."""
    if name not in REUSE_WORKLOADS:
        raise UnknownNameError(f"unknown reuse workload {name!r}.{nearest(name, REUSE_WORKLOADS)}")
    stem, format_ = REUSE_WORKLOADS[name]
    trace = read_trace(find_trace(folder, stem), format_)
    if format_ != "coding_agents":
        return ReuseTrace(name, trace, tuple(turn.turn for turn in infer_sessions(trace.requests)))
    counts: Counter[tuple[str | None, bool]] = Counter()
    turns = []
    for request in trace.requests:
        session = request.session, bool(request.meta.get("subagent"))
        counts[session] += 1
        turns.append(counts[session])
    return ReuseTrace(name, trace, tuple(turns))


def load_lengths(name: str, folder: Path | None) -> LengthWorkload:
    """Raises `UnknownNameError` with the known names if `name` is not in `LENGTH_WORKLOADS`."""
    if name not in LENGTH_WORKLOADS:
        raise UnknownNameError(f"unknown workload {name!r}.{nearest(name, LENGTH_WORKLOADS)}")
    return LENGTH_WORKLOADS[name](folder)
