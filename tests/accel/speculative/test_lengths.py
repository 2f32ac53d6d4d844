"""How many proposed tokens are verified: beside every other choice, and against a machine that is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.accel.speculative.lengths import (
    FIRST_PAUSE,
    GROWTH,
    LEAST_ASKED,
    PLAIN_EVERY,
    PLAIN_STEPS,
    ChainLengths,
    MeasuredTimes,
)

Seconds = Callable[[int], float]


def unknown(num_tokens: int) -> tuple[None, ...]:
    """So many tokens of a proposer that estimates nothing."""
    return (None,) * num_tokens


def flat(num_positions: int) -> float:
    """Bound by memory bandwidth, as bfloat16 weights on a CPU: 8 positions for 1.06 times the time of one."""
    return 0.010 * (1 + 0.06 * (num_positions - 1) / 7)


def stepwise(num_positions: int) -> float:
    """As int4 weights: 8 positions take 3.5 to 4.4 times as long as one."""
    return 0.010 if num_positions == 1 else 0.035 + 0.0013 * (num_positions - 1)


def linear(num_positions: int) -> float:
    """Bound by computing."""
    return 0.010 * num_positions


def learned(seconds: Seconds, sizes: range, num_rows: int = 1) -> ChainLengths:
    lengths = ChainLengths()
    for _ in range(PLAIN_STEPS):
        lengths.step_took(num_rows, 0, 0, seconds(num_rows))
    for size in (*sizes, *sizes, *sizes):
        lengths.step_took(num_rows, 0, size - num_rows, seconds(size))
    return lengths


def test_times_are_the_median_of_what_was_seen() -> None:
    times = MeasuredTimes()
    assert times.seconds(3) == 0.0
    for seconds in (0.5, 0.01, 0.01, 0.01):  # the first step compiles
        times.observe(1, seconds)
    for _ in range(40):
        times.observe(1, 0.01)
        times.observe(5, 0.02)
    assert times.seconds(1) == pytest.approx(0.01, rel=0.02)
    assert times.seconds(3) == pytest.approx(0.015, rel=0.02)
    assert times.seconds(5) == times.seconds(64) == pytest.approx(0.02, rel=0.02)
    times.observe(5, 0.0)
    assert times.seconds(5) == pytest.approx(0.02, rel=0.02)


def test_delayed_steps_of_one_size_leave_the_others_as_they_were() -> None:
    """The level follows what is measured, and does not stray from it."""
    draw, times = random.Random(1), MeasuredTimes()
    for _ in range(20):
        for size in (1, 5):
            times.observe(size, flat(size))
    for _ in range(20_000):
        delay = draw.choice((1, 1, 1, 1.5, 8)) if draw.random() < 0.3 else 1
        times.observe(1, flat(1) * draw.uniform(0.95, 1.05) * delay)
    assert times.seconds(1) == pytest.approx(flat(1), rel=0.1)
    assert times.seconds(5) == pytest.approx(flat(5), rel=0.3)


def test_times_follow_a_context_that_grows() -> None:
    times = MeasuredTimes()
    for step in range(400):
        slower = 1 + step / 200
        times.observe(1, 0.01 * slower)
        times.observe(4, 0.02 * slower)
    assert times.seconds(1) == pytest.approx(0.03, rel=0.1)
    assert times.seconds(4) / times.seconds(1) == pytest.approx(2, rel=0.1)


@given(
    st.lists(st.tuples(st.floats(0.05, 0.95), st.integers(1, 4)), min_size=1, max_size=4),
    st.lists(st.floats(0.001, 0.1), min_size=20, max_size=20),
    st.integers(0, 3),
)
def test_no_other_lengths_are_faster(
    requests: list[tuple[float, int]], seconds: list[float], num_others: int
) -> None:
    """Of all lengths of all chains, those are chosen with the most expected tokens per second."""
    num_rows = len(requests) + num_others
    lengths = ChainLengths()
    for _ in range(PLAIN_STEPS):
        lengths.step_took(num_rows, 0, 0, seconds[0])
    for size in (*range(1, 20), *range(1, 20)):
        lengths.times.observe(num_rows + size, seconds[size])
    for index, (rate, _) in enumerate(requests):
        for _ in range(60):
            lengths.verified(str(index), 100, round(100 * rate))
    rates = [lengths.acceptance.chance(str(index)) for index in range(len(requests))]

    def speed(chosen: tuple[int, ...]) -> float:
        gained = sum(sum(rate**i for i in range(1, n + 1)) for rate, n in zip(rates, chosen, strict=True))
        return (num_rows + gained) / lengths.times.seconds(num_rows + sum(chosen))

    found = lengths.choose([(str(i), unknown(most)) for i, (_, most) in enumerate(requests)], num_rows, 0)
    best = max(map(speed, itertools.product(*(range(most + 1) for _, most in requests))))
    if sum(found):
        assert speed(tuple(found)) == pytest.approx(best)
    else:  # what would be gained is less than noise
        plain = speed((0,) * len(requests))
        assert best <= plain * (1 + 0.03 * len(requests)) or best == pytest.approx(plain)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("seconds", [flat, stepwise, linear])
def test_never_much_slower_than_the_better_of_chains_and_none(
    seconds: Seconds, rate: float, seed: int
) -> None:
    """One request of 4,000 tokens on a machine with noise: at least 0.97 of the speed without chains, and of
    the speed of the best constant length."""
    draw = random.Random(seed)
    lengths, num_tokens, spent_s = ChainLengths(), 0, 0.0
    while num_tokens < 4000:
        proposed = 0
        if lengths.may_propose("a"):
            [proposed] = lengths.choose([("a", unknown(8))], 1, 0)
        accepted = next((i for i in range(proposed) if draw.random() >= rate), proposed)
        took_s = seconds(1 + proposed) * draw.uniform(0.95, 1.05)
        spent_s += took_s
        num_tokens += 1 + accepted
        lengths.step_took(1, 0, proposed, took_s)
        if proposed:
            lengths.verified("a", proposed, accepted)
    expected = [sum(rate**i for i in range(n + 1)) / seconds(1 + n) for n in range(9)]
    assert num_tokens / spent_s >= 0.97 * expected[0]
    assert num_tokens / spent_s >= 0.93 * max(expected)


def test_tokens_of_a_tree_count_with_their_paths() -> None:
    lengths = learned(lambda size: 0.01 + 0.0015 * size, range(2, 10))
    estimates = (0.6, 0.5, 0.5)
    assert lengths.choose([("a", estimates)], 1, 0) == [2], "the third is reached in 15 of 100 cases"
    assert lengths.choose([("a", estimates)], 1, 0, {"a": (-1, -1, -1)}) == [3]
    assert lengths.choose([("a", estimates)], 1, 0, {"a": (-1, 0, 1)}) == [2]


def test_chains_do_not_hold_up_prompts() -> None:
    lengths = learned(lambda size: 0.013 + 0.0001 * size, range(2, 10))
    for size in 3 * (500, 600, 700):
        lengths.times.observe(size, 0.013 + 0.0001 * size)
    lengths.verified("a", 12, 11)
    assert lengths.choose([("a", unknown(4))], 1, 0) == [4]
    chosen = lengths.choose([("a", unknown(4))], 1, 600)
    assert chosen == [1], "a proposed token takes the time of a prompt token, and counts less"


def test_steps_grow_from_what_was_measured() -> None:
    """16 requests with 20 proposed tokens each, on a machine that computes as long as a step is large."""
    lengths, most = ChainLengths(), 0
    for _ in range(PLAIN_STEPS):
        lengths.step_took(16, 0, 0, linear(16))
    names = [str(number) for number in range(16)]
    for _ in range(40):
        num_proposed = sum(lengths.choose([(name, unknown(20)) for name in names], 16, 0))
        most = max(most, num_proposed)
        lengths.step_took(16, 0, num_proposed, linear(16 + num_proposed))
    assert most == (GROWTH - 1) * 16
    assert num_proposed == 0


def test_plain_steps_come_first_and_now_and_then() -> None:
    lengths = ChainLengths()
    chosen = []
    for _ in range(2 * PLAIN_EVERY + 10):
        [proposed] = lengths.choose([("a", unknown(4))], 1, 0)
        chosen.append(proposed)
        lengths.step_took(1, 0, proposed, flat(1 + proposed))
        lengths.verified("a", proposed, proposed)
    assert chosen[:PLAIN_STEPS] == [0] * PLAIN_STEPS
    assert chosen[PLAIN_STEPS:].count(0) == 2
    assert lengths.choose([("a", unknown(4)), ("b", unknown(4))], 2, 0) == [0, 0], "two rows were never seen"


def test_a_request_whose_chains_do_not_pay_pauses() -> None:
    lengths = learned(flat, range(2, 6))
    for _ in range(30):
        lengths.verified("a", 1, 0)
    asked, verified = [], []
    for step in range(60):
        if lengths.may_propose("a"):
            asked.append(step)
            [proposed] = lengths.choose([("a", unknown(4))], 1, 0)
            if proposed:
                verified.append(step)
                assert proposed == 1
                lengths.verified("a", 1, 0)
    assert asked == [0, FIRST_PAUSE + 1, 3 * FIRST_PAUSE + 2, 7 * FIRST_PAUSE + 3]
    assert verified == asked[1:]
    lengths.forget("a")
    assert lengths.may_propose("a")


def test_trials_take_a_hundredth_of_the_time() -> None:
    lengths, trials_s, spent_s = learned(stepwise, range(2, 6)), 0.0, 0.0
    for _ in range(5000):
        proposed = 0
        if lengths.may_propose("a"):
            [proposed] = lengths.choose([("a", unknown(1))], 1, 0)
        took_s = stepwise(1 + proposed)
        spent_s += took_s
        trials_s += took_s - stepwise(1)
        lengths.step_took(1, 0, proposed, took_s)
        if proposed:
            lengths.verified("a", 1, 0)
    assert 0.005 < trials_s / spent_s <= 0.011


def test_what_a_proposer_says_counts_as_it_has_turned_out() -> None:
    """Of two estimates the higher is right, and the lower is far too high."""
    draw, lengths = random.Random(5), ChainLengths()
    for number in range(200):
        name, estimate = f"r{number}", 0.5 + 0.4 * (number % 2)
        lengths.step_took(1, 0, 0, stepwise(1))
        lengths.choose([(name, (estimate,) * 8)], 1, 0)
        right = 0.9 if number % 2 else 0.05
        lengths.verified(name, 8, next((i for i in range(8) if draw.random() >= right), 8))
        lengths.forget(name)
    assert lengths.acceptance.chance("new", 0.9) == pytest.approx(0.9, abs=0.05)
    assert lengths.acceptance.chance("new", 0.5) == pytest.approx(0.05, abs=0.05)
    assert 0.6 < lengths.acceptance.chance("new") < 0.9, "of what all have had, mostly the longer chains"


def test_a_better_chance_ends_a_pause() -> None:
    """In a pause a quick proposer is asked, and what it is sure of is verified."""
    lengths = learned(stepwise, range(2, 10))
    assert lengths.choose([("a", (0.3,) * 8)], 1, 0) == [0]
    assert lengths.may_propose("a")
    assert lengths.choose([("a", (0.3,) * 8)], 1, 0) == [0]
    assert lengths.may_propose("a")
    assert lengths.choose([("a", (0.99,) * 8)], 1, 0) == [8]
    lengths.proposing_took(8, 0.08)
    for _ in range(8):
        lengths.proposing_took(8, 0.08)
    assert lengths.choose([("b", (0.3,) * 8)], 1, 0) == [0]
    assert not lengths.may_propose("b"), "it takes as long as a step"


def test_a_quick_proposer_is_asked_for_all_and_a_slow_one_for_what_pays() -> None:
    """Of a low chance in general a proposer may still be sure of one long proposal."""
    lengths = learned(linear, range(2, 10))
    for _ in range(30):
        lengths.verified("a", 1, 0)
    assert lengths.worth_proposing(["a"], 1, 8) == 8
    for _ in range(2):
        lengths.proposing_took(1, 0.0101)
        lengths.proposing_took(8, 0.08)
    assert lengths.worth_proposing(["a"], 1, 8) == 1


def asked(lengths: ChainLengths, num_steps: int, num_rows: int, num_accepted: int) -> tuple[int, float]:
    """Decode with a proposer that takes half a step; returns how often it was asked and all time."""
    count, spent_s = 0, 0.0
    for _ in range(num_steps):
        proposed, accepted, proposing_s = 0, 0, 0.0
        if lengths.should_ask(num_rows, 0):
            count, proposing_s = count + 1, 0.005
            lengths.proposing_took(4, proposing_s)
            [proposed] = lengths.choose([("a", unknown(4))], num_rows, 0)
            accepted = min(proposed, num_accepted)
        took_s = flat(num_rows + proposed)
        spent_s += took_s + proposing_s
        lengths.step_took(num_rows, 0, proposed, took_s)
        if proposing_s:
            lengths.asking_gave(num_rows, 0, accepted, took_s + proposing_s)
        if proposed:
            lengths.verified("a", proposed, accepted)
    return count, spent_s


def test_a_slow_proposer_that_does_not_pay_is_seldom_asked() -> None:
    """What asking takes is in the hundredth for trials. Other numbers of rows decide for themselves."""
    lengths = ChainLengths()
    count, spent_s = asked(lengths, 3000, 1, 0)
    assert LEAST_ASKED < count < 100
    assert spent_s <= 1.015 * 3000 * flat(1)
    assert not lengths.pays(1)
    assert lengths.pays(4), "four rows were never asked about"


def test_what_only_first_steps_of_a_size_take_is_no_loss() -> None:
    """They record or compile: with each new length once, and then chains pay."""
    lengths, plain_s = ChainLengths(), flat(1)
    for _ in range(10):
        lengths.step_took(1, 0, 0, plain_s)
    for length in range(1, 9):
        lengths.proposing_took(length, plain_s)
        lengths.step_took(1, 0, length, 50 * plain_s)
        lengths.asking_gave(1, 0, length, 51 * plain_s)
    assert lengths.pays(1)
    for length in range(1, 9):
        lengths.proposing_took(length, plain_s)
        lengths.step_took(1, 0, length, 50 * plain_s)
        lengths.asking_gave(1, 0, length, 51 * plain_s)
    assert not lengths.pays(1), "the second time it is no recording"


@pytest.mark.parametrize("num_prompt_tokens", [0, 16])
def test_a_step_without_rows_says_nothing_of_the_proposer(num_prompt_tokens: int) -> None:
    lengths = ChainLengths()
    for _ in range(2 * LEAST_ASKED):
        lengths.step_took(0, num_prompt_tokens, 0, 0.01)
        lengths.asking_gave(0, num_prompt_tokens, 0, 1.0)
    assert lengths.pays(0)


def test_a_slow_proposer_that_pays_again_is_asked_again() -> None:
    lengths = ChainLengths()
    asked(lengths, 600, 1, 0)
    count, _ = asked(lengths, 2000, 1, 4)
    assert count > 1000
    assert lengths.pays(1)
