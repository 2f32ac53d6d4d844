"""The tokens of requests that move between two engines are those of one engine, in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sagellm.comm.kv_transfer.transports.in_process import InProcessNetwork
from sagellm.core.protocols.fleet import HandOver, HandOverPart, HandOverReport, HandOverState
from sagellm.core.types import FinishReason, Request, RequestOutput, SamplingParams, Tokens
from sagellm.engines.build_transfers import build_transfers
from sagellm.engines.engine import Engine
from sagellm.engines.hand_over import HandOvers
from tests.comm.kv_transfer.fabrics import transport
from tests.engines.native.tiered import WHOLE, engine, prompts
from tests.tiny_models import save_tiny

SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=1),
    SamplingParams(temperature=0.9, seed=4, max_tokens=9, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, max_tokens=9, min_tokens=4, top_p=0.9),
]
EOS = frozenset(range(5, 30))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def requests() -> list[Request]:
    """Some share a prompt."""
    texts = prompts(count=3)
    return [
        Request(f"r{number}", Tokens(texts[number % 3]), SAMPLING[number % len(SAMPLING)], EOS)
        for number in range(7)
    ]


def alone(folder: Path, stack: ExitStack, asked: Sequence[Request]) -> dict[str, list[int]]:
    """What one engine says."""
    whole = engine(folder, **{"model.dtype": "float64"})
    stack.callback(whole.close)
    said: dict[str, list[int]] = {one.request_id: [] for one in asked}
    for one in asked:
        whole.add(one)
    while whole.has_work():
        for output in whole.step():
            said[output.request_id] += output.new_token_ids
    return said


@dataclass
class Front:
    """Places each request on two instances, in an order that `rng` chooses."""

    nodes: dict[str, HandOvers]
    rng: random.Random
    said: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    reports: list[HandOverReport] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    def ask(self, one: Request) -> None:
        self.said[one.request_id], self.requests[one.request_id] = [], one
        self.nodes["prefill"].prefill(one, HandOver(HandOverPart.PREFILL, "decode"))

    def turn(self) -> None:
        """One instance takes a step, or only looks at its transfers; a moved request is submitted, or not
        yet."""
        name = self.rng.choice([*self.nodes])
        hand_overs = self.nodes[name]
        busy = hand_overs.transfers.engine
        outputs: list[RequestOutput] = []
        if busy.has_work() and self.rng.random() < 0.7:
            outputs = list(busy.step())
        progress = hand_overs.poll()
        self.reports += progress.reports
        for output in (*outputs, *progress.outputs):
            assert output.error is None
            self.said[output.request_id] += output.new_token_ids
            if output.finish_reason is FinishReason.MOVED:
                self.moved.append(output.request_id)
            elif output.finish_reason is not None:
                self.ended.add(output.request_id)
        if self.moved and self.rng.random() < 0.3:
            one = self.requests[self.moved.pop(self.rng.randrange(len(self.moved)))]
            going_on = replace(one, generated=tuple(self.said[one.request_id]))
            self.nodes["decode"].expect(going_on, HandOver(HandOverPart.DECODE, "prefill"))
        for each in self.nodes.values():
            each.transfers.engine.check()
            each.transfers.channel.check()
            each.check()
        if not busy.has_work():
            hand_overs.transfers.channel.wait(0.001)


def check_same_tokens(
    kind: str, seed: int, model: Path, stack: ExitStack, **settings: dict[str, Any]
) -> None:
    """`settings`: those of the node `prefill`, and of `decode`."""
    network, asked, nodes = InProcessNetwork(), requests(), dict[str, HandOvers]()
    common = {"model.dtype": "float64", "kv.num_blocks": 40}
    for node in ("prefill", "decode"):
        made: Engine = engine(model, **common, **settings.get(node, {}))
        stack.callback(made.close)
        nodes[node] = HandOvers(build_transfers(made, node, transport(kind, node, network)))
        stack.callback(nodes[node].transfers.close)
        stack.callback(nodes[node].close)
    for node, other in (("prefill", "decode"), ("decode", "prefill")):
        nodes[node].transfers.channel.add_peer(nodes[other].transfers.channel.metadata())
    front = Front(nodes, random.Random(seed))
    waiting = list(asked)
    for _ in range(20_000):
        if waiting and front.rng.random() < 0.1:
            front.ask(waiting.pop())
        front.turn()
        if not waiting and len(front.ended) == len(asked):
            break
    assert front.said == alone(model, stack, asked)
    came = [
        report.num_tokens
        for report in front.reports
        if report.part is HandOverPart.DECODE and report.state is HandOverState.READY
    ]
    assert came.count(WHOLE) == len(came) > 3
    for hand_overs in nodes.values():
        busy = hand_overs.transfers.engine
        assert busy.kv.block_states().active == 0 or hand_overs.has_work


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["in_process", "shared_memory"])
def test_tokens_are_those_of_one_engine(
    kind: str, overlap: bool, seed: int, model: Path, stack: ExitStack
) -> None:
    given = {"engine.overlap": overlap}
    check_same_tokens(kind, seed, model, stack, prefill=given, decode=given)


@pytest.mark.parametrize(
    "apart",
    [
        ("prefill",),
        pytest.param(("decode",), marks=pytest.mark.slow),
        pytest.param(("prefill", "decode"), marks=pytest.mark.slow),
    ],
)
def test_attention_and_mlps_may_be_apart_too(apart: tuple[str, ...], model: Path, stack: ExitStack) -> None:
    """The rank with attention has whole blocks, and sends and takes them as an engine of one rank."""
    check_same_tokens("in_process", 0, model, stack, **{node: {"parallel.ffn": 1} for node in apart})
