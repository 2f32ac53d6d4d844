"""An instance that generates and embeds: nothing is lost, and a share that moves beats fixed ones."""

from __future__ import annotations

from statistics import mean

import pytest

from sagellm.benchmarks.simulate.shared_budget import MixedInstance, MixedRequest, MixedRun, alternating_load
from sagellm.control_plane.shared_budget import SharedBudget
from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.models import model

COST = CostModel(device("l4"), model("llama-3.2-3b"))
GOALS_S = (2.0, 10.0)


def run(requests: list[MixedRequest], static: float | None, num_blocks: int = 4000) -> MixedRun:
    budget = SharedBudget(1024, num_blocks, goals_s=GOALS_S, static=static)
    return MixedInstance(COST, budget).run(requests)


def attained(result: MixedRun) -> float:
    """Share of all requests that met their goal."""
    met = sum(each <= GOALS_S[0] for each in result.ttft_s) + sum(each <= GOALS_S[1] for each in result.embedding_s)
    return met / (len(result.ttft_s) + len(result.embedding_s))


@pytest.mark.parametrize("static", [None, 0.5])
def test_every_request_ends_once(static: float | None) -> None:
    requests = alternating_load(60.0, rates=(1.0, 2.0), seed=3)
    result = run(requests, static, num_blocks=400)
    assert len(result.embedding_s) == sum(request.is_text for request in requests)
    assert len(result.ttft_s) == sum(not request.is_text for request in requests)
    assert len(result.tpot_s) == sum(request.num_answer > 1 for request in requests)
    assert min(result.ttft_s + result.embedding_s) > 0


def test_large_requests_get_their_turn_in_little_memory() -> None:
    small = [MixedRequest(0.01 * i, 64, 64) for i in range(300)]
    large = [MixedRequest(0.5, 1400), MixedRequest(0.6, 1300, 100)]
    result = run([*small, *large], None, num_blocks=90)
    assert max(result.embedding_s) < 0.5 * max(result.ttft_s)


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 100 blocks, and may have at most 50"):
        run([MixedRequest(0.0, 1600)], 0.5, num_blocks=100)


def test_a_share_that_moves_meets_more_goals_than_fixed_ones() -> None:
    requests = alternating_load(300.0, rates=(2.0, 8.0), seed=1)
    fixed = {share: attained(run(requests, share)) for share in (0.1, 0.25, 0.5, 0.75)}
    moving = attained(run(requests, None))
    assert moving >= max(fixed.values()), fixed


def test_alone_each_has_the_whole_instance() -> None:
    texts = [MixedRequest(0.0, 512) for _ in range(40)]
    assert run(texts, None).end_s < 0.7 * run(texts, 0.5).end_s
    prompts = [MixedRequest(0.0, 512, 1) for _ in range(40)]
    assert mean(run(prompts, None).ttft_s) < 0.7 * mean(run(prompts, 0.5).ttft_s)
