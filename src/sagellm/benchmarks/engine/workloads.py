"""The workloads of the peers' harness: same prompts, same seeds, same counting.

Prompts are random tokens drawn from the seed `code/repeat`; answers are greedy. In the conversations an
engine's own answers become part of the history.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import ClassVar

from sagellm.benchmarks.engine.session import PromptAnswer, PromptJob, Session
from sagellm.core.errors import ConfigError

FIRST_TOKEN = 300
"""Below it are special and byte tokens, in the harness's models."""

Values = Mapping[str, float]
"""The figures of one repeat under the harness's names: seconds, tokens per second, shares."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The figure by which a workload is judged."""

    key: str
    unit: str
    higher_is_better: bool


PREFILL_RATE = Metric("prefill_tps", "tok/s", higher_is_better=True)
DECODE_RATE = Metric("decode_tps", "tok/s", higher_is_better=True)
OUTPUT_RATE = Metric("out_tps", "tok/s", higher_is_better=True)
SECONDS = Metric("total", "s", higher_is_better=False)


@dataclass(frozen=True, slots=True)
class TokenDraws:
    """The random tokens of one repeat."""

    random: Random
    vocab_size: int

    def tokens(self, count: int) -> list[int]:
        first = min(FIRST_TOKEN, self.vocab_size // 2)
        return [self.random.randrange(first, self.vocab_size) for _ in range(count)]

    def between(self, bounds: tuple[int, int]) -> int:
        return self.random.randint(*bounds)


class EngineWorkload(ABC):
    """Requests to send to an engine. `code` is the harness's name."""

    name: str
    code: str
    metric: ClassVar[Metric]

    @property
    @abstractmethod
    def longest(self) -> int:
        """Prompt and output of the longest request, in tokens."""

    @abstractmethod
    def send(self, session: Session, draws: TokenDraws) -> Values:
        """Runs the workload once."""

    def run(self, session: Session, repeat: int) -> Values:
        """Runs one repeat with an empty cache; the same number gives the same prompts."""
        session.begin()
        return self.send(session, TokenDraws(Random(f"{self.code}/{repeat}"), session.vocab_size))


@dataclass(frozen=True)
class PrefillWorkload(EngineWorkload):
    """One prompt and one token: the time to first token."""

    name: str
    code: str
    num_tokens: int
    metric: ClassVar[Metric] = PREFILL_RATE

    @property
    def longest(self) -> int:
        return self.num_tokens + 1

    def send(self, session: Session, draws: TokenDraws) -> Values:
        [answer] = session.run([PromptJob(draws.tokens(self.num_tokens), 1)])
        return {"ttft": answer.first_s, "prefill_tps": self.num_tokens / answer.first_s}


@dataclass(frozen=True)
class LongContextWorkload(EngineWorkload):
    """One long prompt, then tokens that each read all of its KV."""

    name: str
    code: str
    num_tokens: int
    num_outputs: int
    metric: ClassVar[Metric] = SECONDS

    @property
    def longest(self) -> int:
        return self.num_tokens + self.num_outputs

    def send(self, session: Session, draws: TokenDraws) -> Values:
        [answer] = session.run([PromptJob(draws.tokens(self.num_tokens), self.num_outputs)])
        return {
            "ttft": answer.first_s,
            "prefill_tps": self.num_tokens / answer.first_s,
            "total": answer.last_s,
            "decode_tps": _decode_rate([answer]),
        }


@dataclass(frozen=True)
class DecodeWorkload(EngineWorkload):
    """Equal prompts sent together; counts tokens after the last request's first token."""

    name: str
    code: str
    batch: int
    num_tokens: int = 128
    num_outputs: int = 64
    metric: ClassVar[Metric] = DECODE_RATE

    @property
    def longest(self) -> int:
        return self.num_tokens + self.num_outputs

    def send(self, session: Session, draws: TokenDraws) -> Values:
        jobs = [PromptJob(draws.tokens(self.num_tokens), self.num_outputs) for _ in range(self.batch)]
        answers = session.run(jobs)
        total_s = max(answer.last_s for answer in answers)
        return {
            "decode_tps": _decode_rate(answers),
            "total": total_s,
            "total_tps": self.batch * self.num_outputs / total_s,
            "ttft": fmean(answer.first_s for answer in answers),
        }


@dataclass(frozen=True)
class OfflineWorkload(EngineWorkload):
    """Prompts and outputs of mixed lengths sent together: generated tokens per second."""

    name: str
    code: str
    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    metric: ClassVar[Metric] = OUTPUT_RATE

    @property
    def longest(self) -> int:
        return self.prompt_tokens[1] + self.output_tokens[1]

    def send(self, session: Session, draws: TokenDraws) -> Values:
        jobs = []
        for _ in range(self.num_requests):
            prompt = draws.tokens(draws.between(self.prompt_tokens))
            jobs.append(PromptJob(prompt, draws.between(self.output_tokens)))
        return _offline(session, jobs)


@dataclass(frozen=True)
class MultiTurnWorkload(EngineWorkload):
    """Conversations, some at a time in lock step. Each turn sends the whole history plus new tokens."""

    name: str
    code: str
    waves: int
    together: int
    turns: int
    new_tokens: tuple[int, int]
    num_outputs: int
    metric: ClassVar[Metric] = SECONDS

    @property
    def longest(self) -> int:
        return self.turns * (self.new_tokens[1] + self.num_outputs)

    def send(self, session: Session, draws: TokenDraws) -> Values:
        first_s: list[list[float]] = [[] for _ in range(self.turns)]
        total_s, cached, sent = 0.0, 0, 0
        for _ in range(self.waves):
            histories: list[list[int]] = [[] for _ in range(self.together)]
            for turn in range(self.turns):
                for history in histories:
                    history += draws.tokens(draws.between(self.new_tokens))
                answers = session.run([PromptJob(list(history), self.num_outputs) for history in histories])
                total_s += max(answer.last_s for answer in answers)
                first_s[turn] += [answer.first_s for answer in answers]
                sent += sum(map(len, histories))
                cached += sum(answer.num_cached for answer in answers)
                for history, answer in zip(histories, answers, strict=True):
                    history += _spoken(answer, draws.vocab_size)
        return {
            "total": total_s,
            "ttft": fmean(first_s[-1]),
            "ttft1": fmean(first_s[0]),
            f"ttft{self.turns}": fmean(first_s[-1]),
            "hit": cached / sent,
            "prompt_tokens": sent,
        }


def _offline(session: Session, jobs: Sequence[PromptJob]) -> Values:
    answers = session.run(jobs)
    total_s = max(answer.last_s for answer in answers)
    num_outputs = sum(job.num_outputs for job in jobs)
    return {
        "out_tps": num_outputs / total_s,
        "total": total_s,
        "out_tokens": num_outputs,
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "ttft": fmean(answer.first_s for answer in answers),
    }


def _spoken(answer: PromptAnswer, vocab_size: int) -> list[int]:
    """Returns the answer as history. Token ids below the smallest prompt token are replaced by it, as in
    the harness."""
    first = min(FIRST_TOKEN, vocab_size // 2)
    return [max(first, token_id) for token_id in answer.token_ids]


def _decode_rate(answers: Sequence[PromptAnswer]) -> float:
    """Returns tokens per second after every request has its first token. 0 if none follow."""
    begin_s = max(answer.first_s for answer in answers)
    end_s = max(answer.last_s for answer in answers)
    count = sum(time_s > begin_s for answer in answers for time_s in answer.times_s)
    return count / (end_s - begin_s) if count else 0.0


@dataclass(frozen=True)
class ThroughputWorkload(EngineWorkload):
    """The offline benchmark of nano-vllm (`bench.py`). Repeat 0 has its random prompts and output lengths,
    from the same seed. It is greedy here; a forward pass costs the same."""

    name: str
    code: str
    num_requests: int = 256
    tokens: tuple[int, int] = (100, 1024)
    metric: ClassVar[Metric] = OUTPUT_RATE

    @property
    def longest(self) -> int:
        return 2 * self.tokens[1]

    def run(self, session: Session, repeat: int) -> Values:
        session.begin()
        return self.send(session, TokenDraws(Random(repeat), session.vocab_size))

    def send(self, session: Session, draws: TokenDraws) -> Values:
        largest = min(10_000, draws.vocab_size - 1)
        prompts = []
        for _ in range(self.num_requests):
            length = draws.between(self.tokens)
            prompts.append([draws.between((0, largest)) for _ in range(length)])
        return _offline(session, [PromptJob(prompt, draws.between(self.tokens)) for prompt in prompts])


WORKLOADS: tuple[EngineWorkload, ...] = (
    PrefillWorkload("prefill-512", "a512", 512),
    PrefillWorkload("prefill-2048", "a2048", 2048),
    PrefillWorkload("prefill-8192", "a8192", 8192),
    DecodeWorkload("decode-1", "b1", 1),
    DecodeWorkload("decode-8", "b8", 8),
    DecodeWorkload("decode-32", "b32", 32),
    OfflineWorkload("offline", "c", 48, prompt_tokens=(50, 300), output_tokens=(50, 200)),
    MultiTurnWorkload("multi-turn", "d", waves=3, together=4, turns=4, new_tokens=(100, 200), num_outputs=32),
    LongContextWorkload("long-context", "e", 16_384, 64),
    ThroughputWorkload("throughput", "t"),
)
BY_NAME_ONLY = frozenset({"throughput"})
"""Runs only when named: it takes minutes on a GPU and hours on a CPU."""
COLD_START, COLD_CODE = "cold-start", "cold"


def chosen_names(only: Sequence[str]) -> list[str]:
    """Returns the chosen workloads in our order. If `only` is empty, all but `BY_NAME_ONLY`. `only` holds
    names, the harness's codes, or kinds (`prefill`, `decode`). Raises `ConfigError` with the known names
    for an unknown word."""
    known = {COLD_START: COLD_CODE, **{workload.name: workload.code for workload in WORKLOADS}}
    if not only:
        return [name for name in known if name not in BY_NAME_ONLY]
    for word in only:
        if not any(_is_meant(word, name, code) for name, code in known.items()):
            raise ConfigError(f"there is no workload {word!r}: use {', '.join(known)}, prefill, decode")
    return [name for name, code in known.items() if any(_is_meant(word, name, code) for word in only)]


def _is_meant(word: str, name: str, code: str) -> bool:
    return word in (name, code) or (word in ("prefill", "decode") and name.startswith(word + "-"))
