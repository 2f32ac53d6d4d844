"""Files of measured requests: what is read, and what is refused."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from sagellm.core.errors import ConfigError
from sagellm.engines.simulator.cost_model import CostModel
from sagellm.engines.simulator.devices import device
from sagellm.engines.simulator.measured import Compared, compare, read_measured
from sagellm.engines.simulator.models import MODELS
from tests.engines.simulator.worlds import arrivals, measured, serve

GOOD = {
    "request_id": "a",
    "input_toks": 10,
    "output_toks": 5,
    "arrival_time": 1000.0,
    "queued_ts": 70.5,
    "scheduled_ts": 70.75,
    "first_token_ts": 71.0,
    "last_token_ts": 75.0,
}


def file(tmp_path: Path, *records: dict[str, Any], name: str = "requests.jsonl") -> Path:
    path = tmp_path / name
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(lzma.compress(text) if name.endswith(".xz") else text)
    return path


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.xz"])
def test_times_count_from_the_first_arrival(tmp_path: Path, name: str) -> None:
    times = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    late = GOOD | {"request_id": "b", "arrival_time": 1002.0} | {key: GOOD[key] + 2.25 for key in times}  # type: ignore[operator]
    second, first = late, GOOD
    found = read_measured(file(tmp_path, second, first, name=name))
    assert [one.request_id for one in found] == ["a", "b"]
    assert [one.arrival_s for one in found] == [0.0, 2.0]
    assert [one.queued_s for one in found] == [0.0, 2.25]
    assert found[0].ttft_s == 0.5
    assert found[0].tpot_s == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_toks": None}, r"line 2: input_toks is None; needed as numbers: arrival_time"),
        ({"queued_ts": "soon"}, r"line 2: queued_ts is 'soon'"),
        ({"queued_ts": float("nan")}, r"line 2: queued_ts is nan"),
        ({"output_toks": 0}, r"line 2: output_toks is 0, it must be a whole number"),
        ({"output_toks": 2.5}, r"line 2: output_toks is 2.5, it must be a whole number"),
        ({"output_toks": True}, r"line 2: output_toks is True"),
        ({"first_token_ts": 60.0}, r"line 2: times must rise in this order: queued_ts, scheduled_ts"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_measured(file(tmp_path, GOOD, GOOD | change))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\n\n", "holds no request"),
        (b"{", "line 1: no JSON"),
        (b"[1]", "line 1: a JSON object is needed, not a list"),
        (b"\xff\xfe", "cannot read the requests"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_measured(path)
    packed = tmp_path / "requests.xz"
    packed.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"cannot read the requests in .*requests\.xz"):
        read_measured(packed)
    with pytest.raises(ConfigError, match="cannot read the requests"):
        read_measured(tmp_path / "nowhere.jsonl")


def test_a_simulation_is_compared_with_what_it_made() -> None:
    wanted = arrivals(20, rate=5.0)
    run = serve(wanted, CostModel(device("a100"), MODELS["llama-3.1-8b"]))
    rows = compare(measured(wanted, run), run.timings)
    assert [(row.latency, row.statistic) for row in rows][:3] == [
        ("TTFT", "mean"),
        ("TTFT", "p50"),
        ("TTFT", "p90"),
    ]
    assert all(abs(row.error) < 1e-12 for row in rows)
    assert Compared("TTFT", "mean", 2.0, 2.5).error == 0.25
    assert Compared("TPOT", "mean", 0.0, 0.0).error == 0.0
    with pytest.raises(ValueError, match="20 measured requests, 19 simulated ones"):
        compare(measured(wanted, run), run.timings[:19])


def test_a_run_is_the_same_again_and_its_steps_add_up() -> None:
    wanted = arrivals(20, rate=50.0)
    cost = CostModel(device("a100"), MODELS["llama-3.1-8b"])
    run, again = serve(wanted, cost), serve(wanted, cost)
    assert run.timings == again.timings
    assert run.shapes == again.shapes
    assert run.end_s.tolist() == again.end_s.tolist()
    spent_s = sum(cost.step_s(shape) for shape in run.shapes)
    assert spent_s == pytest.approx(run.end_s[-1] - run.timings[0].queued_s)
    prompts = sum(number for shape in run.shapes for _, number in shape.prefills)
    assert prompts == sum(one.num_prompt_tokens for one in wanted)
    assert sum(shape.num_decodes for shape in run.shapes) == sum(one.num_output_tokens - 1 for one in wanted)
    assert run.steps_until([run.end_s[3]])[0] == 4
