"""Prefill here, decode there: what a transfer takes, when it may begin, and what arrives."""

from __future__ import annotations

from typing import Any

import pytest

from sagellm.benchmarks.simulate.cluster import RequestOutcome
from sagellm.benchmarks.simulate.network import Links, receive
from sagellm.benchmarks.simulate.simulation import (
    ClusterLayout,
    ServiceGoals,
    SimulationResult,
    parse_disaggregate,
)
from sagellm.benchmarks.simulate.workload import WorkloadSpec
from sagellm.benchmarks.traces import Trace
from sagellm.core.errors import ConfigError
from sagellm.core.types import Request, Tokens
from sagellm.engines.build_kv import build_kv
from tests.benchmarks.simulate.stand_in import StandIn, config, request, served, trace

near: Any = pytest.approx
APART = ClusterLayout(disaggregate=(1, 1))


def apart(made: Trace, **given: object) -> SimulationResult:
    return served(made, layout=APART, **given)  # type: ignore[arg-type]


def test_kv_goes_over_the_network() -> None:
    """8 tokens of 2 bytes at 1,000 bytes/s are 16 ms, and 1 ms of latency before them."""
    [one] = apart(trace(request(0, 8, 3))).served
    assert (one.prefill, one.decode) == ("prefill-1", "decode-1")
    assert one.first_token_s == near(0.01)
    assert one.ready_s == near(0.027)
    assert one.finished_s == near(0.047), "two more tokens, 10 ms each"
    assert (one.outcome, one.num_output_tokens, one.num_cached) == (RequestOutcome.FINISHED, 3, 0)


def test_the_decode_instance_computes_what_is_no_whole_block() -> None:
    result = apart(trace(request(0, 8, 3), request(1, 11, 3)))
    decode = result.step_logs["decode-1"]
    assert decode.prefill_tokens.tolist()[0] == 1, "the token that the prefill instance drew"
    assert decode.prefill_tokens.tolist()[2] == 3 + 1, "11 tokens are two blocks of 4 and 3 tokens"


def test_one_token_needs_no_decode_instance() -> None:
    [one] = apart(trace(request(0, 8, 1))).served
    assert (one.decode, one.ready_s, one.finished_s) == ("prefill-1", None, near(0.01))


def test_a_link_carries_one_transfer_at_a_time() -> None:
    first, second = apart(trace(request(0, 8, 2), request(0, 8, 2))).served
    assert (first.ready_s, second.ready_s) == (near(0.027), near(0.044))


def test_what_is_there_is_not_sent_again() -> None:
    _, second = apart(trace(request(0, 8, 2, [1]), request(1, 8, 2, [1]))).served
    assert second.num_cached == 4, "the prefill instance computes at least the last token"
    assert second.ready_s == near(1.011), "only the latency"


def test_a_transfer_waits_for_room() -> None:
    """12 blocks: a request of 24 tokens takes 7 with the token that was drawn, and two do not fit."""
    made = trace(request(0, 24, 8), request(0, 24, 8))
    result = apart(made, machine=StandIn(blocks=12, network_bytes_per_s=1e6))
    first, second = result.served
    assert first.finished_s is not None
    assert second.ready_s is not None
    assert second.ready_s >= first.finished_s
    assert result.figures["recomputed_tokens"] == result.figures["preemptions"] == 0


def test_a_cut_off_finds_requests_on_the_way() -> None:
    [one] = apart(trace(request(0, 8, 3)), goals=ServiceGoals(until_s=0.02)).served
    assert (one.outcome, one.first_token_s) == (RequestOutcome.SENDING, near(0.01))


def test_turns_and_pools_of_several() -> None:
    made = trace(*(request(0.001 * at, 9 + at, 4, session=str(at % 3)) for at in range(12)))
    result = served(
        made,
        layout=ClusterLayout(disaggregate=(2, 2), router="least-loaded"),
        spec=WorkloadSpec(closed_loop=True, think_s=0.01),
    )
    assert result.figures["requests_finished"] == 12
    assert {one.prefill for one in result.served} == {"prefill-1", "prefill-2"}
    assert {one.decode for one in result.served} == {"decode-1", "decode-2"}


def test_token_gaps_span_both_instances() -> None:
    result = apart(trace(request(0, 8, 3)))
    assert result.figures["itl_s_mean"] == near((0.027 + 0.01) / 2)
    assert result.figures["tpot_s_mean"] == near((0.027 + 0.01) / 2)


def test_received_kv_is_a_cached_prefix_and_evicts_what_it_must() -> None:
    kv = build_kv(config().kv, 6)
    one = Request("1", Tokens(range(16)))
    assert receive(kv, one, 15) == 12
    kv.check()
    assert kv.block_states() == (0, 3, 3)
    assert receive(kv, one, 16) == 16, "what is there stays"
    other = Request("2", Tokens(range(100, 116)))
    assert receive(kv, other, 16) == 16
    kv.check()
    assert kv.block_states() == (0, 6, 0)
    long = Request("3", Tokens(range(200, 240)))
    assert receive(kv, long, 40) == 24, "as much as there is room for"
    kv.check()


def test_without_a_cache_nothing_can_be_received() -> None:
    with pytest.raises(ConfigError, match=r"needs kv\.prefix_caching"):
        apart(trace(request(0, 8, 2)), kv__prefix_caching=False)


@pytest.mark.parametrize("text", ["", "1", "1:", ":1", "a:b", "1:2:3", "-1:1", "1.5:1"])
def test_pools_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 1:1"):
        parse_disaggregate(text)
    assert parse_disaggregate("2:3") == (2, 3)


def test_layouts_out_of_range() -> None:
    with pytest.raises(ConfigError, match="at least one instance on each side"):
        ClusterLayout(disaggregate=(0, 1))
    with pytest.raises(ConfigError, match="at least one instance, got 0"):
        ClusterLayout(0)
    for speed, latency in ((0.0, 0.0), (1.0, -1.0), (1.0, float("inf"))):
        with pytest.raises(ConfigError, match="bandwidth above 0"):
            Links(speed, latency)
