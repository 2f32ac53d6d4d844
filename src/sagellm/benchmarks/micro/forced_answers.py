"""Recorded answers for proposers: their tokens are taken as the model's draws.

What a proposer gains depends on the text alone, so no model is needed. A request decodes behind its prompt
and the first token of its answer; requests come one after the other, in order of time. Tokens are pieces of
words (`TextTokens`), about 4 characters each.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagellm.benchmarks.traces._parsing import WORDS, IdMap, TextTokens, json_object
from sagellm.benchmarks.traces.files import opened
from sagellm.core.protocols.speculative import Asked, Proposer
from sagellm.core.token_trees import path_along
from sagellm.core.types import Request, Tokens

CHOICE, REPORT = 0, 1
"""Parts of a workload: options are chosen on one and judged on the other."""


@dataclass(frozen=True, slots=True)
class ForcedAnswer:
    """A prompt, and the tokens that the model is taken to draw behind it."""

    prompt: Tokens
    output: Tokens


@dataclass(slots=True)
class ReplayOutcome:
    """Sums over the answers of one replay.

    `num_judged` proposed tokens were accepted or the first that was not; `estimated` sums the chances that
    the proposer gave to these, if it gives any. `spent_s` is the thread's CPU time in the proposer.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_judged: int = 0
    estimated: float = 0.0
    spent_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.num_tokens / max(1, self.num_steps)


def replay(answers: Sequence[ForcedAnswer], proposer: Proposer, num_tokens: int) -> ReplayOutcome:
    """Decode all answers, with up to `num_tokens` proposed in a step."""
    outcome = ReplayOutcome()
    for number, answer in enumerate(answers):
        request = Request(str(number), answer.prompt)
        tokens, right = Tokens(answer.prompt), answer.output.tolist()
        tokens.append(right[0])
        done = 1
        while done < len(right):
            began = time.thread_time()
            [proposal] = proposer.propose([Asked(request, tokens, num_tokens)])
            outcome.spent_s += time.thread_time() - began
            parents = proposal.parents or range(-1, len(proposal.token_ids) - 1)
            path = path_along(proposal.token_ids, parents, right[done:-1])
            accepted = len(path)
            proposer.observe(request.request_id, accepted)
            judged = {node for node, parent in enumerate(parents) if parent == -1 or parent in path}
            outcome.num_judged += len(judged)
            outcome.estimated += sum(proposal.acceptance[node] for node in judged if proposal.acceptance)
            outcome.num_proposed += len(proposal.token_ids)
            outcome.num_accepted += accepted
            outcome.num_steps += 1
            tokens.extend(right[done : done + accepted + 1])
            done += accepted + 1
        outcome.num_tokens += len(right) - 1
        began = time.thread_time()
        proposer.forget(request, tokens)
        outcome.spent_s += time.thread_time() - began
    return outcome


def workload(name: str, folder: Path, part: int) -> list[ForcedAnswer]:
    """The answers of one part of a workload, in order of time. Raises `ConfigError` for a missing file."""
    texts, ids, answers = TextTokens(WORDS), IdMap(), []
    for session, prompt, output in WORKLOADS[name](folder):
        if zlib.crc32(session.encode()) % 2 == part and prompt and output:
            answers.append(ForcedAnswer(texts.tokens(prompt, ids), texts.tokens(output, ids)))
    return answers


_Texts = Iterator[tuple[str, str, str]]
"""Session, prompt and output of each request."""


def _agents(file: str) -> Callable[[Path], _Texts]:
    def read(folder: Path) -> _Texts:
        for record in sorted(_records(folder / file), key=lambda record: record["timestamp"]):
            yield record["session_id"], record["input"], record["output"]

    return read


def _tau_bench(folder: Path) -> _Texts:
    for record in _records(folder / "tau_bench_gpt4o_airline_a.jsonl.xz"):
        prompt = ""
        for message in record["traj"]:
            content = message.get("content") or ""
            content += json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            if message["role"] == "assistant":
                yield f"task {record['task_id']}", prompt, content
            prompt += f"<{message['role']}>\n{content}\n"


def _chat(folder: Path) -> _Texts:
    """Of the first of the generators, single questions."""
    records = _records(folder / "alpaca_eval_outputs_a.jsonl.xz")
    first = next(records)
    same = itertools.takewhile(lambda record: record["generator"] == first["generator"], records)
    for record in itertools.chain([first], same):
        yield record["instruction"], record["instruction"], record["output"]


def _mt_bench(folder: Path) -> _Texts:
    """Answers to mathematics, reasoning and code, in two turns."""
    questions = {
        record["question_id"]: record["turns"] for record in _records(folder / "mt_bench_questions.jsonl.xz")
    }
    for record in _records(folder / "mt_bench_gpt4_reference.jsonl.xz"):
        prompt = ""
        for asked, answered in zip(
            questions[record["question_id"]], record["choices"][0]["turns"], strict=True
        ):
            prompt += f"{asked}\n"
            yield str(record["question_id"]), prompt, answered
            prompt += f"{answered}\n"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with opened(path) as lines:
        for line in lines:
            yield json_object(line.decode())


WORKLOADS: dict[str, Callable[[Path], _Texts]] = {
    "code edits (miniswe)": _agents("lmcache_miniswe_a.jsonl.xz"),
    "agents (magagent)": _agents("lmcache_magagent_a.jsonl.xz"),
    "tool calls (tau-bench)": _tau_bench,
    "chat (alpaca)": _chat,
    "mathematics, code (MT-Bench)": _mt_bench,
}
