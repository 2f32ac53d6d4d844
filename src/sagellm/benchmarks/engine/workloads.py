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

    @property
    def first_token(self) -> int:
        return min(FIRST_TOKEN, self.vocab_size // 2)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.first_token, self.vocab_size) for _ in range(count)]

    def between(self, bounds: tuple[int, int]) -> int:
        return self.random.randint(*bounds)


@dataclass(frozen=True)
class EngineWorkload(ABC):
    """Requests to send to an engine. `code` is the harness's name."""

    name: str
    code: str
    metric: Metric

    @property
    @abstractmethod
    def longest(self) -> int:
        """Prompt and output of the longest request, in tokens."""

    @abstractmethod
    def send(self, session: Session, draws: TokenDraws) -> Values:
        """Runs the workload once."""

    def seed(self, repeat: int) -> int | str:
        """Returns the seed of a repeat: the same number gives the same prompts."""
        return f"{self.code}/{repeat}"

    def run(self, session: Session, repeat: int) -> Values:
        """Runs one repeat with an empty cache."""
        session.begin()
        return self.send(session, TokenDraws(Random(self.seed(repeat)), session.vocab_size))


@dataclass(frozen=True)
class BatchWorkload(EngineWorkload):
    """Requests that are sent together. `figures` names what a row has."""

    figures: Sequence[str]

    @abstractmethod
    def jobs(self, draws: TokenDraws) -> list[PromptJob]:
        """Draws the requests of one repeat."""

    def send(self, session: Session, draws: TokenDraws) -> Values:
        jobs = self.jobs(draws)
        answers = session.run(jobs)
        first_s = fmean(answer.first_s for answer in answers)
        total_s = max(answer.last_s for answer in answers)
        num_prompt, num_outputs = sum(len(job.prompt) for job in jobs), sum(job.num_outputs for job in jobs)
        values = {
            "ttft": first_s,
            "prefill_tps": num_prompt / first_s,
            "decode_tps": _decode_rate(answers),
            "total": total_s,
            "total_tps": num_outputs / total_s,
            "out_tps": num_outputs / total_s,
            "out_tokens": num_outputs,
            "prompt_tokens": num_prompt,
        }
        return {name: values[name] for name in self.figures}


def _decode_rate(answers: Sequence[PromptAnswer]) -> float:
    """Returns tokens per second after every request has its first token. 0 if none follow."""
    begin_s = max(answer.first_s for answer in answers)
    end_s = max(answer.last_s for answer in answers)
    count = sum(time_s > begin_s for answer in answers for time_s in answer.times_s)
    return count / (end_s - begin_s) if count else 0.0


PREFILL = PREFILL_RATE, ("ttft", "prefill_tps")
"""One prompt and one token: the time to first token."""
DECODE = DECODE_RATE, ("decode_tps", "total", "total_tps", "ttft")
"""Several prompts; counts tokens after the last request's first token."""
LONG_CONTEXT = SECONDS, ("ttft", "prefill_tps", "total", "decode_tps")
"""One long prompt, then tokens that each read all of its KV."""
OFFLINE = OUTPUT_RATE, ("out_tps", "total", "out_tokens", "prompt_tokens", "ttft")
"""Prompts and outputs of mixed lengths: generated tokens per second."""


@dataclass(frozen=True)
class EqualWorkload(BatchWorkload):
    """Prompts of one length with outputs of one length."""

    num_tokens: int
    num_outputs: int
    batch: int = 1

    @property
    def longest(self) -> int:
        return self.num_tokens + self.num_outputs

    def jobs(self, draws: TokenDraws) -> list[PromptJob]:
        return [PromptJob(draws.tokens(self.num_tokens), self.num_outputs) for _ in range(self.batch)]


@dataclass(frozen=True)
class MixedWorkload(BatchWorkload):
    """Prompts and outputs of mixed lengths."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    @property
    def longest(self) -> int:
        return self.prompt_tokens[1] + self.output_tokens[1]

    def jobs(self, draws: TokenDraws) -> list[PromptJob]:
        jobs = []
        for _ in range(self.num_requests):
            prompt = draws.tokens(draws.between(self.prompt_tokens))
            jobs.append(PromptJob(prompt, draws.between(self.output_tokens)))
        return jobs


@dataclass(frozen=True)
class ThroughputWorkload(BatchWorkload):
    """The offline benchmark of nano-vllm (`bench.py`). Repeat 0 has its random prompts and output lengths,
    from the same seed. It is greedy here; a forward pass costs the same."""

    num_requests: int
    tokens: tuple[int, int]

    @property
    def longest(self) -> int:
        return 2 * self.tokens[1]

    def seed(self, repeat: int) -> int | str:
        return repeat

    def jobs(self, draws: TokenDraws) -> list[PromptJob]:
        largest = min(10_000, draws.vocab_size - 1)
        prompts = []
        for _ in range(self.num_requests):
            length = draws.between(self.tokens)
            prompts.append([draws.between((0, largest)) for _ in range(length)])
        return [PromptJob(prompt, draws.between(self.tokens)) for prompt in prompts]


@dataclass(frozen=True)
class MultiTurnWorkload(EngineWorkload):
    """Conversations, some at a time in lock step. Each turn sends the whole history plus new tokens."""

    waves: int
    together: int
    turns: int
    new_tokens: tuple[int, int]
    num_outputs: int

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
                    # as in the harness, smaller ids are replaced by the smallest prompt token
                    history += [max(draws.first_token, token_id) for token_id in answer.token_ids]
        return {
            "total": total_s,
            "ttft": fmean(first_s[-1]),
            "ttft1": fmean(first_s[0]),
            f"ttft{self.turns}": fmean(first_s[-1]),
            "hit": cached / sent,
            "prompt_tokens": sent,
        }


WORKLOADS: tuple[EngineWorkload, ...] = (
    EqualWorkload("prefill-512", "a512", *PREFILL, 512, 1),
    EqualWorkload("prefill-2048", "a2048", *PREFILL, 2048, 1),
    EqualWorkload("prefill-8192", "a8192", *PREFILL, 8192, 1),
    EqualWorkload("decode-1", "b1", *DECODE, 128, 64),
    EqualWorkload("decode-8", "b8", *DECODE, 128, 64, batch=8),
    EqualWorkload("decode-32", "b32", *DECODE, 128, 64, batch=32),
    MixedWorkload("offline", "c", *OFFLINE, 48, prompt_tokens=(50, 300), output_tokens=(50, 200)),
    MultiTurnWorkload(
        "multi-turn", "d", SECONDS, 3, together=4, turns=4, new_tokens=(100, 200), num_outputs=32
    ),
    EqualWorkload("long-context", "e", *LONG_CONTEXT, 16_384, 64),
    ThroughputWorkload("throughput", "t", *OFFLINE, 256, tokens=(100, 1024)),
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
