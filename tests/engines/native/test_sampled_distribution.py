"""Sampled tokens against their target distribution, with proposed tokens and without: a chi-square test.

Four tokens of each request are drawn through the native backend, whose logits are a table here, and all
quadruples are counted. What they should follow is computed plainly (`plain_weights`), for penalties from the
whole history. All seeds are fixed. The significance is 0.001 for all cases of a size together (Bonferroni).
The draws are those without proposals, one by one, so that the cells of all proposers are the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from statistics import NormalDist
from typing import Any

import pytest
import torch

from sagellm.core.plan import ExecutionPlan
from sagellm.core.types import SamplingParams
from tests.engines.native.driver import Driver, RecordingBackend, Running
from tests.engines.native.test_sampler import plain_sample, plain_weights
from tests.tiny_models import VOCAB, save_tiny

NUM_LIVE = 7
"""Tokens that may be drawn at all."""
PROMPT, NUM_DRAWN, BATCH = [3, 1, 4], 4, 100
SIGNIFICANCE = 0.001
FEWEST = 5.0
"""Quadruples of which fewer are expected are counted together."""

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.8}
NO_PENALTIES: dict[str, Any] = {}
GRID: dict[str, SamplingParams] = {
    f"temperature {heat}, top_p {top_p}, {'with' if penalties else 'no'} penalties": SamplingParams(
        temperature=heat, top_p=top_p, **penalties
    )
    for heat in (0.5, 1.0, 1.8)
    for top_p in (1.0, 0.8)
    for penalties in (NO_PENALTIES, PENALTIES)
} | {
    "top_k and min_p": SamplingParams(temperature=1.3, top_k=5, min_p=0.05),
    "bias and a stop token held back": SamplingParams(
        logit_bias={2: 1.5, 5: -2.0}, min_tokens=2, stop_token_ids=(0,)
    ),
    "everything": SamplingParams(
        temperature=0.9, top_k=7, top_p=0.95, min_p=0.01, logit_bias={1: 1.0}, **PENALTIES
    ),
}  # fmt: skip


@cache
def table(seed: int) -> torch.Tensor:
    """Logits [VOCAB, VOCAB] behind each token. Table 1 is what a draft has in place of table 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((VOCAB, VOCAB), -math.inf)
    logits[:, :NUM_LIVE] = 1.5 * torch.randn(VOCAB, NUM_LIVE, generator=generator)
    if seed:
        logits[:, :NUM_LIVE] += torch.randn(VOCAB, NUM_LIVE, generator=generator)
    return logits


class TableBackend(RecordingBackend):
    """Logits depend on the last token alone."""

    def _logits(self, plan: ExecutionPlan) -> torch.Tensor:
        chains, last = plan.proposed, list[int]()
        for row in plan.sample_rows:
            last += [self._rows._rows[row].tokens[-1], *chains.get(row, ())]
        self.last_logits = table(0)[last]
        return self.last_logits.clone()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TableBackend]:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    made = TableBackend(
        folder, num_blocks=BATCH, max_num_seqs=BATCH, block_size=8, threads=1, dtype="float32"
    )
    yield made
    made.close()


Propose = Callable[[Running], Sequence[int]]


def fixed(sequence: Running) -> Sequence[int]:
    """The same tokens for everybody, as many as the request may still draw but one."""
    return (1, 6)[: NUM_DRAWN - len(sequence.outputs) - 1]


def coupled(sequence: Running) -> Sequence[int]:
    """What a draft draws at the same random numbers, as `DraftModel` does: proposals depend on the draws."""
    drawn, params = list(sequence.outputs), sequence.params
    assert params.seed is not None
    while len(drawn) < NUM_DRAWN - 1:
        logits = table(1)[drawn[-1], :NUM_LIVE].tolist()
        drawn.append(plain_sample(logits, params, params.seed, PROMPT, drawn, ()))
    return drawn[len(sequence.outputs) :]


PROPOSERS: Mapping[str, Propose] = {"off": lambda _: (), "fixed": fixed, "coupled": coupled}


def target(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each quadruple."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_DRAWN):
        longer: dict[tuple[int, ...], float] = {}
        for drawn, chance in found.items():
            logits = table(0)[(*PROMPT, *drawn)[-1], :NUM_LIVE].tolist()
            weights = plain_weights(logits, params, PROMPT, list(drawn), ())
            total = sum(weights.values())
            longer |= {(*drawn, token): chance * weight / total for token, weight in weights.items()}
        found = longer
    return found


def draw(
    backend: TableBackend, params: SamplingParams, propose: Propose, num_tokens: int, first_seed: int
) -> list[tuple[int, ...]]:
    """Quadruples, at least so many tokens in all."""
    found, seeds = list[tuple[int, ...]](), count(first_seed)
    while NUM_DRAWN * len(found) < num_tokens:
        driver = Driver(backend, scattered=False, propose=propose)
        batch = [
            driver.add(PROMPT, NUM_DRAWN, replace(params, seed=next(seeds)), name=f"r{row}")
            for row in range(BATCH)
        ]
        driver.run()
        found += [tuple(sequence.outputs) for sequence in batch]
        backend.execute(ExecutionPlan(0, left=tuple(driver.left)))
    return found


def excess(counts: Counter[tuple[int, ...]], expected: Mapping[tuple[int, ...], float]) -> float:
    """Standard deviations by which chi-square exceeds its mean (Wilson and Hilferty 1931)."""
    num_samples = counts.total()
    assert counts.keys() <= expected.keys(), "what cannot be drawn"
    rare = [drawn for drawn, chance in expected.items() if chance * num_samples < FEWEST]
    cells = [(counts[drawn], num_samples * expected[drawn]) for drawn in expected.keys() - set(rare)]
    if rare:
        cells.append(
            (sum(counts[drawn] for drawn in rare), num_samples * sum(expected[each] for each in rare))
        )
    chi_square = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


LIMIT = NormalDist().inv_cdf(1 - SIGNIFICANCE / len(GRID))


@pytest.mark.parametrize("num_tokens", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", GRID)
def test_draws_follow_the_target(case: str, num_tokens: int, backend: TableBackend) -> None:
    params, expected = GRID[case], target(GRID[case])
    assert math.fsum(expected.values()) == pytest.approx(1)
    first_seed = list(GRID).index(case) * 1_000_000
    drawn = {name: draw(backend, params, each, num_tokens, first_seed) for name, each in PROPOSERS.items()}
    for name, found in drawn.items():
        assert excess(Counter(found), expected) < LIMIT, name
        assert found == drawn["off"], name


def test_the_test_sees_another_distribution(backend: TableBackend) -> None:
    found = draw(backend, SamplingParams(temperature=1.0), PROPOSERS["off"], 4000, 0)
    assert excess(Counter(found), target(SamplingParams(temperature=1.25))) > LIMIT


def test_proposed_tokens_are_accepted(backend: TableBackend) -> None:
    """Else the test above says nothing of speculation."""
    accepted = Counter[str]()
    for name in ("fixed", "coupled"):
        driver = Driver(backend, scattered=False, propose=PROPOSERS[name])
        for row in range(BATCH):
            driver.add(PROMPT, NUM_DRAWN, SamplingParams(seed=row), name=f"r{row}")
        driver.step()
        accepted[name] = sum(driver.step().num_accepted)
        driver.run()
        backend.execute(ExecutionPlan(0, left=tuple(driver.left)))
    assert accepted["fixed"] > 5
    assert accepted["coupled"] > 80


def test_chi_square_is_what_tables_say() -> None:
    """10 degrees of freedom: 18.307 is the quantile of 95 %."""
    cells: dict[tuple[int, ...], float] = {(token,): 1 / 11 for token in range(11)}
    each, moved = 1000, round(math.sqrt(18.307 * 1000 / 2))
    counts = Counter[tuple[int, ...]](dict.fromkeys(cells, each))
    counts[0,] += moved
    counts[1,] -= moved
    assert excess(counts, cells) == pytest.approx(NormalDist().inv_cdf(0.95), abs=0.03)
