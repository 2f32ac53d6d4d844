"""The evaluation of predictors: scores by hand, splits that keep apart, streams that do not look ahead."""

from __future__ import annotations

import lzma
import math
import random
from pathlib import Path

import numpy as np
import pytest

from sagellm.benchmarks.lifetime import reuse
from sagellm.benchmarks.lifetime.lengths import (
    BASELINES,
    BEST_CONSTANT,
    LengthRow,
    LengthStream,
    evaluate_lengths,
)
from sagellm.benchmarks.lifetime.reuse import ReuseRow, evaluate_reuse, horizon_of
from sagellm.benchmarks.lifetime.score import auc, calibration, score_lengths, score_reuse, spearman
from sagellm.benchmarks.lifetime.workloads import (
    LengthSample,
    LengthWorkload,
    Part,
    ReuseTrace,
    demo_tasks,
    find_trace,
    infer_sessions,
    load_lengths,
    load_reuse,
    part_of,
    split_by_hash,
    split_by_time,
)
from sagellm.benchmarks.traces.record import Trace, TraceRequest
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.protocols.lifetime import Prediction, PredictionRequest
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.lifetime import StatisticalLifetimePredictor
from sagellm.kvmgr.lifetime.reuse.reuse_table import ReuseTable


def request_of(time_s: float, ids: list[int], num_output: int = 10) -> TraceRequest:
    return TraceRequest(time_s, Tokens(ids), Namespace(), 512 * len(ids), num_output)


# --- scores ---


def test_length_scores_by_hand() -> None:
    quantiles = [{0.1: 5.0, 0.5: 10.0, 0.9: 20.0}] * 4
    score = score_lengths([10, 10, 10, 10], [10, 11, 30, 2], [True, True, False, True], quantiles)
    assert score.mae == (0 + 1 + 20 + 8) / 4
    assert score.within_10_percent == 0.5
    assert score.mae_answered == 3
    assert score.coverage == {0.1: 0.25, 0.5: 0.5, 0.9: 0.75}
    assert score.inside_80 == 0.5
    assert score.rank_correlation == 0


def test_rank_correlation_is_that_of_ranks_with_ties() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 200, 3000])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3]), np.array([9.0, 5, 1])) == pytest.approx(-1)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: covariance 0.5, deviations sqrt(0.5) and sqrt(2 / 3).
    expected = 0.5 / math.sqrt(0.5 * 2 / 3)
    assert spearman(np.array([4.0, 4, 7]), np.array([1.0, 2, 3])) == pytest.approx(expected)


def test_auc_counts_pairs_and_ties_as_half() -> None:
    guess, truth = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, True, False, True])
    # Pairs: 0.4 beats 0.1, ties 0.4; 0.8 beats both.
    assert auc(guess, truth) == (1 + 0.5 + 2) / 4
    assert auc(guess, np.array([True] * 4)) == 0.5


def test_saying_the_base_rate_has_no_skill_and_no_calibration_error() -> None:
    score = score_reuse([0.25] * 400, [True, False, False, False] * 100)
    assert score.brier == pytest.approx(score.brier_of_base_rate)
    assert score.skill == pytest.approx(0)
    assert score.auc == 0.5
    assert score.calibration_error == pytest.approx(0, abs=1e-9)
    assert score.accuracy == score.accuracy_of_never == 0.75


def test_calibration_shows_overconfident_predictions() -> None:
    bins = calibration(np.array([0.0] * 50 + [1.0] * 50), np.array([0.0, 1.0] * 50))
    assert sum(one.num_samples for one in bins) == 100
    assert all(abs(one.predicted - one.happened) == 0.5 for one in bins)


@pytest.mark.parametrize("score", [lambda: score_lengths([], [], [], []), lambda: score_reuse([], [])])
def test_nothing_is_not_scored(score: object) -> None:
    with pytest.raises(ValueError, match="nothing"):
        score()  # type: ignore[operator]


# --- splits ---


def samples(count: int) -> list[LengthSample]:
    return [LengthSample(f"r{n}", float(n), 100, 10 + n % 7, session_id=f"s{n % 20}") for n in range(count)]


def test_a_split_by_time_never_trains_on_what_came_later() -> None:
    found = split_by_time(reversed(samples(100)))
    assert [sample.time_s for sample in found] == sorted(sample.time_s for sample in found)
    assert [sum(s.part == part for s in found) for part in ("train", "validation", "test")] == [60, 20, 20]
    assert found[59].part == "train"
    assert found[60].part == "validation"


def test_a_split_by_hash_keeps_a_key_in_one_part() -> None:
    found = split_by_hash((str(s.session_id), s) for s in samples(400))
    for session in {s.session_id for s in found}:
        assert len({s.part for s in found if s.session_id == session}) == 1
    shares = [part_of(str(n)) for n in range(5000)]
    assert shares.count("train") / 5000 == pytest.approx(0.6, abs=0.03)
    assert shares.count("test") / 5000 == pytest.approx(0.2, abs=0.03)


def test_a_prompt_that_continues_another_is_its_next_turn() -> None:
    places = infer_sessions(
        [
            request_of(0, [0, 1, 2, 3]),
            request_of(1, [0, 9, 8]),  # shares the system prompt alone
            request_of(2, [0, 1, 2, 5, 6]),  # all but the last, partial block
            request_of(3, [0, 1, 7, 7]),  # leaves the first one's history: no turn of it
            request_of(4, [0, 1, 2, 5, 6, 4]),
        ]
    )
    assert [place.turn for place in places] == [1, 1, 2, 1, 3]
    assert places[4].session_id == places[2].session_id == places[0].session_id
    assert len({place.session_id for place in places}) == 3


# --- streams ---


class Recorder:
    """Writes down what it is asked and told, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def predict(self, request: PredictionRequest) -> Prediction:
        self.events.append(("asked", request.sequence_id))
        return Prediction(1.0, 0.0, 1.0)

    def update(self, sequence_id: str, actual_length: int, actual_time: float) -> None:
        self.events.append(("told", sequence_id))


def workload(*made: LengthSample, learns_in_test: bool = True) -> LengthWorkload:
    return LengthWorkload("made up", "by time", made, learns_in_test=learns_in_test)


def sample(name: str, time_s: float, num_output: int, part: Part = "train") -> LengthSample:
    return LengthSample(name, time_s, 10, num_output, part)


def test_a_predictor_learns_an_end_when_it_happens() -> None:
    recorder = Recorder()
    # The first needs 100 tokens, 3 s; the second ends at 1.3 s.
    made = workload(
        sample("long", 0, 100), sample("short", 1, 10), sample("next", 2, 1), sample("last", 9, 1)
    )
    LengthStream(recorder, made, "train").run()
    assert recorder.events == [
        ("asked", "long"), ("asked", "short"), ("told", "short"), ("asked", "next"), ("told", "next"),
        ("told", "long"), ("asked", "last"),
    ]  # fmt: skip


def test_tested_outcomes_are_not_learned_where_prompts_recur() -> None:
    recorder = Recorder()
    made = [sample("a", 0, 1), sample("b", 0, 1, "validation"), sample("c", 0, 1, "test")]
    made.append(sample("d", 9, 1, "test"))
    LengthStream(recorder, workload(*made, learns_in_test=False), "test").run()
    assert ("told", "b") in recorder.events
    assert ("told", "c") not in recorder.events


def test_nothing_after_the_scored_part_is_looked_at() -> None:
    recorder = Recorder()
    made = [sample("a", 0, 1), sample("b", 1, 1, "validation"), sample("c", 2, 1, "test")]
    LengthStream(recorder, workload(*made), "validation").run()
    assert [name for kind, name in recorder.events if kind == "asked"] == ["a", "b"]


def test_after_some_tokens_only_longer_requests_are_scored() -> None:
    made = workload(sample("a", 0, 5, "test"), sample("b", 1, 50, "test"))
    scored = LengthStream(Recorder(), made, "test", after=20).run()
    assert scored.actual == [30]


def rows_by_name(rows: list[LengthRow]) -> dict[str, LengthRow]:
    return {row.predictor: row for row in rows}


def test_no_baseline_beats_the_best_constant_where_there_is_nothing_to_know() -> None:
    chance = random.Random(3)
    made = split_by_time(sample(f"r{n}", float(n), chance.randrange(1, 200)) for n in range(600))
    rows = rows_by_name(evaluate_lengths(workload(*made), {"statistical": StatisticalLifetimePredictor}))
    assert set(rows) == {BEST_CONSTANT, *BASELINES, "statistical"}
    assert rows[BEST_CONSTANT].against_constant == 0
    assert all(row.against_constant >= 0 for name, row in rows.items() if name == "median so far")
    assert rows["statistical"].against_constant == pytest.approx(0, abs=0.08)
    assert rows["statistical"].score.inside_80 == pytest.approx(0.8, abs=0.1)


def test_the_predictor_learns_the_previous_turn() -> None:
    chance = random.Random(3)
    usual = {f"s{n}": chance.choice((10, 60, 400)) for n in range(30)}
    made = []
    for number in range(1500):
        session, mean = chance.choice(list(usual.items()))
        output = max(1, round(mean * chance.uniform(0.9, 1.1)))
        made.append(LengthSample(f"r{number}", 20.0 * number, 100, output, session_id=session))
    split = workload(*split_by_time(made))
    rows = rows_by_name(evaluate_lengths(split, {"statistical": StatisticalLifetimePredictor}))
    assert rows["statistical"].against_constant < -0.9
    assert rows["statistical"].score.mae <= rows["previous turn"].score.mae


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request in its validation part"):
        evaluate_lengths(workload(sample("a", 0, 5)), {}, "validation")


# --- reuse ---


def chat_trace(count: int, seed: int = 0) -> ReuseTrace:
    """Every 2 s a new prompt of 6 blocks; those with an even first block are continued after 5 to 60 s."""
    chance = random.Random(seed)
    requests = []
    for number in range(count):
        ids = [number * 10 + place for place in range(6)]
        requests.append(request_of(2.0 * number, ids))
        if number % 2 == 0:
            requests.append(request_of(2.0 * number + chance.uniform(5, 60), [*ids, number * 10 + 6]))
    ordered = tuple(sorted(requests, key=lambda request: request.time_s))
    trace = Trace("chat", "made up", 512, ordered)
    return ReuseTrace("chat", trace, tuple(place.turn for place in infer_sessions(ordered)))


def only(rows: list[ReuseRow], predictor: str, moment: str) -> ReuseRow:
    [row] = [row for row in rows if (row.predictor, row.moment) == (predictor, moment)]
    return row


def test_reuse_is_ranked_and_calibrated_on_a_trace_with_a_rule() -> None:
    """A first turn is continued half of the time, a second never: 6 of 19 uses of a block are followed by
    one."""
    trace = chat_trace(1500)
    assert horizon_of(trace) == pytest.approx(1000, rel=0.1)
    rows = evaluate_reuse(trace, {"reuse_table": ReuseTable})
    at_use, at_rest = only(rows, "reuse_table", "at use"), only(rows, "reuse_table", "at rest")
    assert at_use.score.base_rate == pytest.approx(6 / 19, abs=0.03)
    assert at_use.score.auc > 0.75
    assert at_use.score.skill > 0.2
    assert at_use.score.calibration_error < 0.06
    assert at_rest.score.auc > only(rows, "age alone", "at rest").score.auc
    assert at_use.share_below[0.5] == pytest.approx(0.5, abs=0.15)


def test_the_outcome_of_a_use_is_unknown_when_it_is_predicted() -> None:
    """Whether a prompt is continued is drawn anew and nothing tells it: no better than the base rate."""
    chance = random.Random(5)
    requests = []
    for number in range(800):
        requests.append(request_of(2.0 * number, [number * 10 + place for place in range(4)]))
        if chance.random() < 0.5:
            requests.append(request_of(2.0 * number + 7, [number * 10 + place for place in range(4)]))
    ordered = tuple(sorted(requests, key=lambda request: request.time_s))
    trace = ReuseTrace("coin", Trace("coin", "made up", 512, ordered), (0,) * len(ordered))
    first_uses_only = only(evaluate_reuse(trace, {"age": lambda h: ReuseTable(h)}), "age alone", "at use")
    assert first_uses_only.score.auc < 0.6


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        evaluate_reuse(chat_trace(2), {})


# --- workloads ---


def test_names_and_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="azure_conv"):
        load_lengths("azure_con", tmp_path)
    with pytest.raises(UnknownNameError, match="mooncake_synthetic"):
        load_reuse("mooncake_synthetics", tmp_path)
    with pytest.raises(ConfigError, match="--traces"):
        find_trace(None, "azure2023_conv")
    with pytest.raises(ConfigError, match="no file azure2023_conv"):
        load_lengths("azure_conv", tmp_path)


def test_answers_of_many_models_are_split_by_prompt(tmp_path: Path) -> None:
    lines = [
        f'{{"generator": "m{model}", "instruction": "say {n}", "output": "{"word " * (10 + n)}"}}'
        for model in range(2)
        for n in range(40)
    ]
    (tmp_path / "alpaca_eval_outputs_a.jsonl.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
    made = load_lengths("alpaca_eval", tmp_path)
    assert not made.learns_in_test
    assert len(made.samples) == 80
    parts: dict[tuple[int, ...], set[str]] = {}
    for one in made.samples:
        parts.setdefault(tuple(one.tokens), set()).add(one.part)
    assert len(parts) == 40
    assert all(len(found) == 1 for found in parts.values())
    assert {s.num_output for s in made.samples} == {round(1.3 * (10 + n)) for n in range(40)}


def test_the_demo_tasks_need_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="checkout"):
        demo_tasks(tools=tmp_path)


@pytest.mark.traces
@pytest.mark.parametrize("name", ["azure_conv", "azure_code", "mooncake_conversation", "mooncake_synthetic"])
def test_the_tables_are_no_worse_than_the_best_constant(sagellm_traces: Path, name: str) -> None:
    """Online, they come within 3 % of what no constant can beat; where input length says much, far below."""
    made = load_lengths(name, sagellm_traces)
    predictors = {"statistical": lambda: registry("predictor").create("statistical")}
    row = rows_by_name(evaluate_lengths(made, predictors))["statistical"]
    assert row.against_constant < 0.03
    assert row.score.inside_80 == pytest.approx(0.8, abs=0.12)
    if name == "azure_conv":
        assert row.against_constant < -0.3


@pytest.mark.traces
@pytest.mark.parametrize("one_in", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_block_reuse_beats_the_base_rate_on_conversations(
    sagellm_traces: Path, one_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the blocks that are watched in a run, one in so many."""
    monkeypatch.setattr(reuse, "MAX_USES", reuse.MAX_USES // one_in)
    trace = load_reuse("mooncake_conversation", sagellm_traces)
    rows = evaluate_reuse(trace, {"reuse_table": ReuseTable})
    for moment in ("at use", "at rest"):
        row = only(rows, "reuse_table", moment)
        assert row.score.skill > 0
        assert row.score.auc > only(rows, "age alone", moment).score.auc
