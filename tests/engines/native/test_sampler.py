"""The batched sampler against a plain one that treats one row with Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sagellm.core.seeds import request_seed
from sagellm.core.types import SamplingParams
from sagellm.engines.native import sampler
from sagellm.engines.native.sampler import NO_TOKEN, RowSampler, sample, splitmix64, uniform

CPU = torch.device("cpu")
VOCAB = 24


def row_of(
    params: SamplingParams, *, seed: int = 0, prompt: list[int] | None = None,
    outputs: list[int] | None = None, eos: tuple[int, ...] = (), vocab: int = VOCAB,
) -> RowSampler:  # fmt: skip
    return RowSampler.of(params, seed, prompt or [], outputs or [], eos, vocab, CPU)


def plain_weights(
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    outputs: list[int],
    eos: tuple[int, ...],
) -> dict[int, float]:
    """The definition: the steps of the `SamplingParams` docstring in their order.

    The tokens that may be drawn, by rising id, with their weights.
    """
    x = list(logits)
    for i, bias in params.logit_bias.items():
        x[i] += bias
    if len(outputs) < params.min_tokens:
        for i in (*eos, *params.stop_token_ids):
            x[i] = -math.inf
    for i in {*prompt, *outputs}:
        x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
    for i in set(outputs):
        x[i] -= params.presence_penalty + params.frequency_penalty * outputs.count(i)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.temperature == 0:
        return {order[0]: 1.0}
    weights = {i: math.exp((x[i] - x[order[0]]) / params.temperature) for i in order}
    kept = order[: params.top_k] if params.top_k > 0 else order
    if params.top_p < 1:
        total, before = sum(weights[i] for i in kept), 0.0
        nucleus: list[int] = []
        for i in kept:
            if nucleus and before >= params.top_p * total:
                break
            nucleus.append(i)
            before += weights[i]
        kept = nucleus
    return {i: weights[i] for i in sorted(kept) if weights[i] >= params.min_p}


def plain_sample(
    logits: list[float],
    params: SamplingParams,
    seed: int,
    prompt: list[int],
    outputs: list[int],
    eos: tuple[int, ...],
) -> int:
    """The token at which the weights, by rising id, reach the random number's share of them all."""
    weights = plain_weights(logits, params, prompt, outputs, eos)
    point = uniform(seed, len(outputs)) * sum(weights.values())
    for i, weight in weights.items():
        point -= weight
        if point < 0:
            return i
    return max(weights)


tokens = st.integers(0, VOCAB - 1)
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, 100]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.25]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -0.75]),
    logit_bias=st.dictionaries(tokens, st.floats(-5, 5), max_size=3),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
)
row_strategy = st.tuples(
    params_strategy, st.integers(0, 2**64 - 1), st.lists(tokens, max_size=6), st.lists(tokens, max_size=6)
)


@settings(max_examples=150)
@given(rows=st.lists(row_strategy, min_size=1, max_size=5), data_seed=st.integers(0, 10_000))
def test_agrees_with_its_slow_twin(
    rows: list[tuple[SamplingParams, int, list[int], list[int]]], data_seed: int
) -> None:
    generator = torch.Generator().manual_seed(data_seed)
    logits = 3 * torch.randn(len(rows), VOCAB, generator=generator, dtype=torch.float64)
    expected = [
        plain_sample(logits[i].tolist(), params, seed, prompt, outputs, (2, 5))
        for i, (params, seed, prompt, outputs) in enumerate(rows)
    ]
    states = [
        row_of(params, seed=seed, prompt=prompt, outputs=out, eos=(2, 5))
        for params, seed, prompt, out in rows
    ]
    assert sample(logits, states).token_ids == expected


def test_counts_of_accepted_tokens_are_those_of_a_row_that_comes_back() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.2)
    grown = row_of(params, prompt=[1, 2], outputs=[3])
    for token in (4, 3, 3):
        grown.accept(token)
    fresh = row_of(params, prompt=[1, 2], outputs=[3, 4, 3, 3])
    assert grown.num_outputs == fresh.num_outputs == 4
    assert grown.seen is not None
    assert fresh.seen is not None
    assert torch.equal(grown.seen, fresh.seen)
    assert grown.counts is not None
    assert fresh.counts is not None
    assert torch.equal(grown.counts, fresh.counts)


def test_splitmix64_gives_the_published_sequence() -> None:
    """The first outputs for seed 1234567, as other implementations of SplitMix64 document them."""
    golden = 0x9E3779B97F4A7C15
    sequence = [splitmix64((1234567 + i * golden) % 2**64) for i in range(3)]
    assert sequence == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_numbers_are_uniform() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert all(0 <= number < 1 for number in numbers)
    counts = torch.histc(torch.tensor(numbers), bins=20, min=0, max=1)
    chi_square = float(((counts - 500) ** 2 / 500).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, 0.1 %


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = [row_of(SamplingParams(), seed=seed, vocab=4) for seed in range(4000)]
    drawn = sample(probabilities.log().repeat(4000, 1), rows).token_ids
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    assert torch.allclose(shares, probabilities, atol=0.03)


def test_a_request_without_seed_gets_one_from_its_name() -> None:
    assert request_seed(0, "a") == request_seed(0, "a")
    assert len({request_seed(engine, name) for engine in (0, 1) for name in ("a", "b")}) == 4


def test_filtered_tokens_are_never_drawn_at_the_end_of_the_scale() -> None:
    """A point that rounds to the total mass must not land behind the last token with mass."""
    logits = torch.full((1, VOCAB), 0.0)
    params = SamplingParams(top_k=1)
    for seed in range(200):
        assert sample(logits.clone(), [row_of(params, seed=seed)]).token_ids == [0]


@pytest.mark.parametrize("top", [0, 1, 5])
def test_logprobs_are_of_the_raw_logits(top: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, VOCAB)
    expected = logits.log_softmax(-1)
    params = SamplingParams(temperature=0.0, logprobs=top, logit_bias={7: 90.0})
    drawn = sample(logits.clone(), [row_of(SamplingParams(temperature=0.0)), row_of(params)])
    assert set(drawn.logprobs) == {1}
    entry = drawn.logprobs[1]
    assert entry.token_id == drawn.token_ids[1] == 7
    assert entry.logprob == pytest.approx(float(expected[1, 7]))
    best = expected[1].topk(top)
    assert [i for i, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist())


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(
        temperature=0.0, logit_bias={10**6: 5.0, 3: 1.0}, min_tokens=1, stop_token_ids=(10**6,)
    )
    assert sample(torch.zeros(1, VOCAB), [row_of(params, eos=(999,))]).token_ids == [3]


@pytest.mark.parametrize("spoiled", [math.nan, math.inf])
def test_a_row_whose_logits_are_no_numbers_gets_no_token_and_costs_no_other(spoiled: float) -> None:
    logits = torch.zeros(4, 9)
    logits[:, 3] = 5.0
    logits[0, 4] = logits[2, 4] = spoiled
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0)]
    params += [SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=1.0, top_p=0.5)]
    rows = [RowSampler.of(p, 1, [1], [], (), 9, torch.device("cpu")) for p in params]
    assert sample(logits, rows).token_ids == [NO_TOKEN, 3, NO_TOKEN, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("spoiled", [0.0, math.nan, math.inf, -math.inf])
def test_plain_rows_get_alone_what_they_get_beside_others(spoiled: float, temperature: float) -> None:
    """A step of plain rows only goes another way than one in which somebody asks for more."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)).round()  # equals among them
    logits[0, 5], logits[1, 7], logits[2] = spoiled, spoiled, spoiled
    asked = SamplingParams(temperature=temperature, logprobs=0)
    plain = [row_of(asked, seed=seed) for seed in range(6)]
    other = row_of(SamplingParams(temperature=0.0, logprobs=1))
    assert all(row.is_plain for row in plain)
    assert not other.is_plain
    together = sample(torch.cat([logits, torch.zeros(1, VOCAB)]), [*plain, other])
    alone = sample(logits.clone(), plain)
    assert alone.token_ids == together.token_ids[:6]
    for i, found in alone.logprobs.items():
        assert found.token_id == together.logprobs[i].token_id
        assert found.logprob == pytest.approx(together.logprobs[i].logprob, abs=1e-6, nan_ok=True)


def test_numpy_draws_what_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = 3 * torch.randn(64, 700, generator=torch.Generator().manual_seed(0))
    rows = [row_of(SamplingParams(temperature=0.2 + seed / 20), seed=seed, vocab=700) for seed in range(64)]
    drawn = sample(logits.clone(), rows).token_ids
    assert all(row.is_plain for row in rows)
    monkeypatch.setattr(sampler, "SMALL_VOCABULARY", 0)
    rows = [row_of(row.params, seed=row.seed, vocab=700) for row in rows]
    assert not any(row.is_plain for row in rows)
    assert sample(logits.clone(), rows).token_ids == drawn
    assert len(set(drawn)) > 20


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "min_p": 0.1},
     {"logprobs": 1}, {"min_tokens": 2}, {"logit_bias": {1: 2.0}}, {"presence_penalty": 0.5},
     {"frequency_penalty": 0.5}, {"repetition_penalty": 1.5}],
)  # fmt: skip
def test_a_row_that_asks_for_more_is_not_plain(asked: dict[str, Any]) -> None:
    assert not row_of(SamplingParams(**{"temperature": 0.0, **asked}), eos=(3,)).is_plain


@pytest.mark.parametrize("inside", [False, True])
def test_penalties_count_whoever_made_the_row(inside: bool) -> None:
    """A caller's own `inference_mode` may have ended when the next token is drawn."""
    with torch.inference_mode(inside):
        row = row_of(SamplingParams(temperature=0.0, repetition_penalty=2.5))
    row.accept(3)
    assert sample(torch.eye(VOCAB)[3:4].clone() + 0.9, [row]).token_ids == [0]


THINK: dict[str, Any] = {"max_reasoning_tokens": 2, "reasoning_token_ids": (5, 6)}


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.0}, {"min_tokens": 9, "stop_token_ids": (6,)}]
)
def test_a_spent_budget_forces_the_end_marker_whatever_is_drawn(params: dict[str, Any]) -> None:
    logits = torch.eye(VOCAB)[3:4] * 50
    row = row_of(SamplingParams(**params, **THINK), prompt=[5], outputs=[3])
    assert sample(logits.clone(), [row]).token_ids == [3]
    row.accept(3)
    free = row_of(SamplingParams(temperature=0.0))
    assert sample(logits.repeat(2, 1), [row, free]).token_ids == [6, 3]
    row.accept(6)
    assert sample(logits.clone(), [row]).token_ids == [3]


def test_a_forced_token_has_the_models_own_logprob() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = logits.log_softmax(-1)[0, 6]
    row = row_of(SamplingParams(logprobs=1, **THINK), prompt=[5], outputs=[3, 3])
    drawn = sample(logits.clone(), [row])
    assert drawn.token_ids == [drawn.logprobs[0].token_id] == [6]
    assert drawn.logprobs[0].logprob == pytest.approx(float(expected))
    assert drawn.logprobs[0].top[0][0] == int(logits.argmax())


def test_a_budget_hides_no_broken_row() -> None:
    rows = [
        row_of(SamplingParams(temperature=heat, **THINK), prompt=[5], outputs=[3, 3]) for heat in (0.0, 1.0)
    ]
    assert sample(torch.full((2, VOCAB), math.nan), rows).token_ids == [NO_TOKEN, NO_TOKEN]
    assert sample(torch.full((1, VOCAB), math.nan), rows[:1]).token_ids == [NO_TOKEN]


def test_a_row_behind_proposed_tokens_has_counted_them_and_the_row_itself_has_not() -> None:
    row = row_of(SamplingParams(temperature=0.0, **THINK), prompt=[5])
    logits = torch.eye(VOCAB)[3:4].repeat(4, 1)
    chain = [row.after([3, 3, 6][:length]) for length in range(4)]
    assert sample(logits.clone(), chain).token_ids == [3, 3, 6, 3]
    assert sample(logits[:1].clone(), [row]).token_ids == [3]


SOFT: dict[str, Any] = {
    "soft_reasoning_tokens": 1,
    "soft_reasoning_slope": 3.0,
    "reasoning_token_ids": (5, 6),
}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1, "top_k": 1}])
def test_a_soft_budget_raises_the_end_marker_with_each_token(params: dict[str, Any]) -> None:
    logits = torch.eye(VOCAB)[3:4] * 7.0
    row = row_of(SamplingParams(**params, **SOFT), prompt=[5], outputs=[])
    drawn: list[int] = []
    while not drawn or drawn[-1] != 6:
        drawn += sample(logits.clone(), [row]).token_ids
        row.accept(drawn[-1])
    assert drawn == [3, 3, 3, 6]  # raised by 0, 3, 6 and 9
    assert sample(logits.clone(), [row]).token_ids == [3]


def test_a_soft_budget_leaves_logprobs_and_other_rows_alone() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    row = row_of(SamplingParams(temperature=0.0, logprobs=0, **SOFT), prompt=[5], outputs=[3] * 90)
    free = row_of(SamplingParams(temperature=0.0))
    drawn = sample(logits.clone(), [row, free])
    assert drawn.token_ids == [6, int(logits[1].argmax())]
    assert drawn.logprobs[0].logprob == pytest.approx(float(logits[0].log_softmax(-1)[6]))
    hidden = row_of(
        SamplingParams(temperature=0.0, min_tokens=99, stop_token_ids=(6,), **SOFT),
        prompt=[5],
        outputs=[3] * 90,
    )
    assert sample(logits[:1].clone(), [hidden]).token_ids != [6]
