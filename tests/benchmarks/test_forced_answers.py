"""Recorded answers as a proposer meets them: steps are counted as an engine would compute them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sagellm.benchmarks.micro.forced_answers import (
    CHOICE,
    REPORT,
    WORKLOADS,
    ForcedAnswer,
    replay,
    workload,
)
from sagellm.core.protocols.speculative import Proposal
from sagellm.core.registry import registry
from sagellm.core.types import Request, Tokens
from tests.builders import OneByOne


class Knows(OneByOne):
    """Proposes the answer's next tokens, of which every sixth is wrong."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer
        self.accepted: list[int] = []
        self.ended: list[int] = []

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        done = len(tokens) - len(request.tokens)
        right = self.answer[done : done + num_tokens]
        wrong = [token if (done + at) % 6 else -1 for at, token in enumerate(right)]
        return Proposal(tuple(wrong), acceptance=(0.5,) * len(wrong))

    def observe(self, request_id: str, num_accepted: int) -> None:
        self.accepted.append(num_accepted)

    def forget(self, request: Request, tokens: Tokens) -> None:
        self.ended = tokens.tolist()


def test_steps_are_those_of_an_engine() -> None:
    answer = [*range(10, 24)]
    proposer = Knows(answer)
    made = replay([ForcedAnswer(Tokens([1, 2]), Tokens(answer))], proposer, 3)
    # Behind token 0: 1 2 3 and 4; 5, then 6 is the model's; 7 8 9 and 10; 11, 12; and the last.
    assert proposer.accepted == [3, 1, 3, 1, 0]
    assert proposer.ended == [1, 2, *answer]
    assert (made.num_tokens, made.num_steps, made.num_accepted) == (13, 5, 8)
    assert (made.num_proposed, made.num_judged, made.estimated) == (3 + 3 + 3 + 3 + 1, 3 + 2 + 3 + 2 + 1, 5.5)
    assert made.tokens_per_step == 13 / 5


def test_nothing_proposed_is_a_token_a_step() -> None:
    proposer = registry("proposer").create("suffix")
    made = replay([ForcedAnswer(Tokens([1]), Tokens([2, 3, 4, 5]))], proposer, 4)
    assert (made.num_tokens, made.num_steps, made.num_proposed) == (3, 3, 0)
    again = replay([ForcedAnswer(Tokens([1]), Tokens([2, 3, 4, 5]))] * 2, proposer, 4)
    assert again.num_steps < 6


def test_sessions_are_in_one_part(tmp_path: Path) -> None:
    names = ("red", "blue", "green", "grey")
    rows = [
        {"timestamp": 9 - number, "session_id": names[number % 4], "input": f"say {number}", "output": "yes"}
        for number in range(8)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "lmcache_miniswe_a.jsonl.xz").write_text(text, encoding="utf-8")
    name = next(iter(WORKLOADS))
    parts = [workload(name, tmp_path, part) for part in (CHOICE, REPORT)]
    assert [len(part) for part in parts] == [4, 4]
    assert all(len(answer.output) == 1 and len(answer.prompt) == 2 for part in parts for answer in part)


@pytest.mark.traces
def test_every_workload_is_read() -> None:
    folder = os.environ.get("SAGELLM_TRACES")
    if not folder:
        pytest.skip("SAGELLM_TRACES names no folder of traces")
    for name in WORKLOADS:
        answers = workload(name, Path(folder), REPORT)
        assert len(answers) >= 10
        assert min(len(answer.output) for answer in answers) > 0
