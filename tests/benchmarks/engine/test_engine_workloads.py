"""Workloads on a session that answers by rule: prompts and figures are those of the peers' harness."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from random import Random

import pytest

from sagellm.benchmarks.engine.session import PromptAnswer, PromptJob, Session
from sagellm.benchmarks.engine.workloads import (
    DECODE,
    WORKLOADS,
    EqualWorkload,
    TokenDraws,
    chosen_names,
)
from sagellm.core.clock import ManualClock
from sagellm.core.errors import ConfigError
from tests.builders import fake_engine

VOCAB = 1000


class RuledSession(Session):
    """Keeps what it is sent. Request i gets its first token after 2 + i seconds, one each 0.5 s, and says
    that 10 tokens were cached."""

    def __init__(self) -> None:
        super().__init__(fake_engine(), ManualClock())
        self.batches: list[list[PromptJob]] = []

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def run(self, jobs: Sequence[PromptJob]) -> list[PromptAnswer]:
        self.batches.append([PromptJob(list(job.prompt), job.num_outputs) for job in jobs])
        return [_ruled(place, job.num_outputs) for place, job in enumerate(jobs)]


def _ruled(place: int, count: int) -> PromptAnswer:
    times_s = [2.0 + place + 0.5 * i for i in range(count)]
    return PromptAnswer(times_s, [7 + 500 * (i % 2) for i in range(count)], 10)


def digest(batches: list[list[PromptJob]]) -> str:
    plain = [[(list(job.prompt), job.num_outputs) for job in batch] for batch in batches]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]


HARNESS = {
    "prefill-512": ("46fec5ffe35a9abb", {"ttft": 2.0, "prefill_tps": 256.0}),
    "decode-8": (
        "d9533b56ea0cc3a7",
        {"decode_tps": 14.222222, "total": 40.5, "total_tps": 12.641975, "ttft": 5.5},
    ),
    "offline": (
        "3bc99cd762918ad8",
        {"out_tps": 48.084615, "total": 130.0, "out_tokens": 6251, "prompt_tokens": 9481, "ttft": 25.5},
    ),
    "multi-turn": (
        "c6ae1b15e61902e5",
        {"total": 246.0, "ttft1": 3.5, "ttft4": 3.5, "hit": 0.023599, "prompt_tokens": 20340},
    ),
    "long-context": (
        "5a7472c97c25a7e9",
        {"ttft": 2.0, "prefill_tps": 8192.0, "total": 33.5, "decode_tps": 2.0},
    ),
}
"""What the harness sent and counted when it ran its workloads (repeat 1) on an engine that answers by the
same rule: a hash of all prompts and output lengths, and its row."""


@pytest.mark.parametrize("name", HARNESS)
def test_prompts_and_figures_are_the_harnesss(name: str) -> None:
    [workload] = [one for one in WORKLOADS if one.name == name]
    session = RuledSession()
    values = workload.run(session, 1)
    sent, row = HARNESS[name]
    assert digest(session.batches) == sent
    assert {key: values[key] for key in row} == pytest.approx(row, rel=1e-5)
    longest = max(len(job.prompt) + job.num_outputs for batch in session.batches for job in batch)
    assert longest <= workload.longest


def test_every_workload_gives_the_figure_it_is_judged_by() -> None:
    for workload in WORKLOADS:
        assert workload.run(RuledSession(), 0)[workload.metric.key] > 0


def test_repeats_differ_and_one_repeat_does_not() -> None:
    found = []
    for repeat in (0, 0, 1):
        session = RuledSession()
        EqualWorkload("decode-2", "b2", *DECODE, 128, 64, batch=2).run(session, repeat)
        found.append(digest(session.batches))
    assert found[0] == found[1] != found[2]


def test_a_small_vocabulary_is_not_left() -> None:
    tokens = TokenDraws(Random(0), 100).tokens(2000)
    assert (min(tokens), max(tokens)) == (50, 99)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ([], ["cold-start", *(one.name for one in WORKLOADS[:-1])]),
        (["decode"], ["decode-1", "decode-8", "decode-32"]),
        (["e", "prefill-512", "b8"], ["prefill-512", "decode-8", "long-context"]),
        (["cold", "c"], ["cold-start", "offline"]),
    ],
)
def test_names_codes_and_kinds(only: list[str], names: list[str]) -> None:
    assert chosen_names(only) == names


@pytest.mark.parametrize("word", ["", "decode-9", "DECODE", "multi"])
def test_an_unknown_workload(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"no workload '{word}': use cold-start, prefill-512.* decode"):
        chosen_names(["decode", word])


class WideSession(RuledSession):
    vocab_size = 151_936  # of the model that it is known for


def test_throughput_is_the_known_workload_and_runs_by_name_only() -> None:
    """133,966 output tokens is what nano-vllm's README says of its benchmark."""
    session = WideSession()
    values = WORKLOADS[-1].run(session, 0)
    assert (len(session.batches[0]), values["out_tokens"]) == (256, 133_966)
    assert "throughput" not in chosen_names([])
    assert chosen_names(["throughput"]) == ["throughput"]
