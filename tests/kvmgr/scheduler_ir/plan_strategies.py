"""Plans of any shape that the types allow, and those of small engines under pressure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from hypothesis import strategies as st

from sagellm.core.errors import CapacityError, RequestError
from sagellm.core.plan import (
    BlockCopy,
    BlockTableDelta,
    Chain,
    Decision,
    ExecutionPlan,
    Join,
    PhasePlacement,
    Prefill,
    StepResult,
    Transfer,
)
from sagellm.core.types import AttentionChunk, Request, SamplingParams, Tokens, Window
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.scheduler_ir.rows import Rows
from tests.builders import PreemptAtRandom, RandomProposer, fake_engine, request

T = TypeVar("T")
NAMES = st.one_of(st.sampled_from(["a", "b", "req-1", "two words"]), st.text(max_size=8))
NUMBERS = st.integers(min_value=0, max_value=300)
BLOCKS = st.lists(NUMBERS, max_size=9).map(tuple) | st.integers(0, 50).map(lambda n: tuple(range(n, n + 7)))
TIERS = st.sampled_from(["hbm", "dram", "nvme", "a far tier"])
FLOATS = st.floats(min_value=0.01, max_value=1.0)
PARAMS = st.builds(
    SamplingParams,
    temperature=FLOATS | st.just(0.0),
    top_k=st.integers(-1, 100),
    top_p=FLOATS,
    min_p=FLOATS,
    repetition_penalty=FLOATS,
    presence_penalty=FLOATS,
    frequency_penalty=FLOATS,
    logit_bias=st.dictionaries(NUMBERS, FLOATS, max_size=3),
    seed=st.none() | st.integers(0, 2**63 - 1),
    n=st.integers(1, 4),
    logprobs=st.none() | st.integers(0, 20),
    max_tokens=st.none() | st.integers(10, 99),
    min_tokens=st.integers(0, 9),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=st.lists(NUMBERS, max_size=3).map(tuple),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12).map(lambda ids: Tokens(ids).tobytes())
JOINS = st.builds(
    Join,
    NUMBERS,
    NAMES,
    TOKENS,
    NUMBERS,
    NUMBERS,
    BLOCKS,
    st.sampled_from(
        [SamplingParams(), SamplingParams(0.0, stop=("\n", '"')), SamplingParams(logit_bias={3: -1.0})]
    ),
    st.frozensets(NUMBERS, max_size=3),
)
PLACEMENTS = st.builds(PhasePlacement, NAMES, NAMES, NAMES, NAMES)
CHAINS = st.just(()) | st.lists(NUMBERS, max_size=4).map(tuple)
PARENTS = st.just(()) | st.lists(st.integers(-1, 3), max_size=4).map(tuple)
DECODES = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4)


def tuples(strategy: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(strategy, max_size=2).map(tuple)


@st.composite
def plans(draw: st.DrawFn) -> ExecutionPlan:
    """Any plan: also one that no scheduler would make."""
    decodes = draw(DECODES)
    rows = [row for row, _ in decodes]
    chains = () if len(set(rows)) < len(rows) else [(row, draw(CHAINS), draw(PARENTS)) for row in rows]
    return ExecutionPlan(
        step=draw(NUMBERS),
        joined=draw(tuples(JOINS)),
        left=tuple(draw(st.lists(NUMBERS, max_size=3))),
        table_deltas=draw(tuples(st.builds(BlockTableDelta, NUMBERS, NUMBERS, BLOCKS))),
        decode_rows=tuple(row for row, _ in decodes),
        decode_positions=tuple(position for _, position in decodes),
        chains=tuple(Chain(*chain) for chain in chains if chain[1]),
        prefills=draw(tuples(st.builds(Prefill, NUMBERS, NAMES, NUMBERS, NUMBERS, st.booleans()))),
        copies=draw(tuples(st.builds(BlockCopy, NUMBERS, NUMBERS))),
        transfers=draw(tuples(st.builds(Transfer, NAMES, BLOCKS, NAMES))),
        preempted=tuple(draw(st.lists(NAMES, max_size=3))),
        rejected=tuple(draw(st.lists(st.tuples(NAMES, st.text(max_size=9)), max_size=2))),
        placements=tuple(draw(st.lists(st.tuples(NAMES, PLACEMENTS), max_size=2))),
        num_draft_tokens=draw(NUMBERS),
        decisions=draw(tuples(st.builds(Decision, NAMES, NAMES, NAMES, st.text(max_size=9)))),
    )


@dataclass
class Executed:
    """A plan that an engine executed, and the batch before it."""

    plan: ExecutionPlan
    before: Rows


class PlanKeeper(TokenMemoryBackend):
    """Keeps what it executes; fails at random, in a share of the steps."""

    def __init__(self, random: Random, failing_share: float, windows: tuple[Window | None, ...]) -> None:
        leading = windows[0]
        assert not isinstance(leading, AttentionChunk)
        super().__init__(24 * len(windows), 4, sliding_window=leading, windows=windows)
        self.rows = Rows()
        self.executed: list[Executed] = []
        self._random, self._failing_share = random, failing_share

    def execute(self, plan: ExecutionPlan) -> StepResult:
        if self._random.random() < self._failing_share:
            raise CapacityError("as asked")
        result = super().execute(plan)
        self.executed.append(Executed(plan, self.rows.copy()))
        self.rows.follow(plan, result.num_accepted)
        return result


def run_engine(
    seed: int,
    *,
    windows: tuple[Window | None, ...] = (None,),
    failing_share: float = 0.0,
    num_proposed: int = 0,
) -> list[Executed]:
    """Plans of a small engine under pressure: shared prefixes, forks, preemptions, too little memory."""
    random = Random(seed)
    backend = PlanKeeper(random, failing_share, windows)
    budget = random.choice([8, 16, 32])
    engine = fake_engine(
        backend,
        max_batched_tokens=budget,
        passes=[PreemptAtRandom(seed, 0.05)],
        speculation=Speculation(RandomProposer(backend, seed, trees=True), num_proposed)
        if num_proposed
        else None,
    )
    waiting = list(_requests(random, 12))
    while waiting or engine.has_work():
        while waiting and random.random() < 0.5:
            engine.add(waiting.pop())
        if engine.has_work():
            engine.step()
        if backend.rows and random.random() < 0.1:
            _fork_someone(engine, random, backend.rows)
    return backend.executed


def _requests(random: Random, count: int) -> Iterator[Request]:
    for i in range(count):
        head = list(range(random.choice([0, 8, 13])))
        tail = [random.randrange(97) for _ in range(random.randrange(1, 20))]
        yield request(f"r{i}", head + tail, random.randrange(1, 12))


def _fork_someone(engine: Engine, random: Random, rows: Rows) -> None:
    name = random.choice(sorted(row.request_id for row in rows.values()))
    with suppress(RequestError):  # it may have ended, or have been forked before
        engine.fork(name, f"{name}'")
