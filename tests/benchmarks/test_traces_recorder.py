"""Recording a running engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.traces import read_trace
from sagellm.benchmarks.traces.recorder import TraceRecorder
from sagellm.benchmarks.traces.summary import TraceReuse, reuse
from sagellm.core.errors import ConfigError
from sagellm.core.events import EventBus, RequestQueued, RequestReceived
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.engine import Engine
from tests.builders import fake_engine, request, run_all

SECRET = Namespace(tenant="a customer's name")


def engine_and_bus() -> tuple[Engine, EventBus]:
    events = EventBus()
    return fake_engine(events=events), events


def record(path: Path, **options: Any) -> Engine:
    """Two prompts that share eight tokens, the second by a tenant, and the first again."""
    engine, events = engine_and_bus()
    with TraceRecorder(path, events, block_tokens=engine.kv.block_size, **options) as recorder:
        engine.add(request("a", range(1, 14), max_tokens=3))
        run_all(engine)
        engine.clock.advance(1.5)  # type: ignore[attr-defined]
        engine.add(request("b", range(1, 14), max_tokens=2, namespace=SECRET))
        run_all(engine)
        engine.add(request("c", [*range(1, 9), 50], max_tokens=2))
        run_all(engine)
        engine.add(request("d", range(1, 14)))
    assert recorder.num_requests == 4
    engine.close()
    return engine


def test_the_record_is_what_the_engine_was_asked(tmp_path: Path) -> None:
    engine = record(tmp_path / "t.jsonl")
    trace = read_trace(tmp_path / "t.jsonl")
    assert (trace.format, trace.name, trace.block_tokens) == ("sagellm", "t", engine.kv.block_size)
    first, tenants, third, last = trace.requests
    assert engine.kv.block_size == 4
    assert first.ids == Tokens([0, 1, 2, 3])  # 13 tokens: the last block is partial
    assert third.ids.tolist()[:2] == [0, 1]
    assert third.ids[2] not in {*first.ids, *tenants.ids}
    assert last.ids == first.ids
    assert not set(tenants.ids) & set(first.ids)
    assert [one.time_s for one in trace.requests] == [0.0, 1.5, 1.5, 1.5]
    assert [one.num_input_tokens for one in trace.requests] == [13, 13, 9, 13]
    assert [one.num_output_tokens for one in trace.requests] == [3, 2, 2, 0]
    assert [one.meta["finish_reason"] for one in trace.requests] == ["length"] * 3 + ["unfinished"]
    assert third.meta["num_cached_tokens"] == 8
    assert first.meta["ttft_s"] >= 0


def test_nothing_of_a_prompt_can_be_read_from_it(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl").requests[1].tenant == "tenant-1"
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert "customer" not in "".join(lines)
    fields = {name for line in lines[1:] for name in json.loads(line)}
    assert fields == {
        "time_s", "ids", "num_input_tokens", "num_output_tokens", "namespace", "tenant", "meta",
    }  # fmt: skip


def test_tokens_are_kept_if_asked(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl", keep_tokens=True)
    trace = read_trace(tmp_path / "t.jsonl")
    assert trace.block_tokens == 1
    assert trace.requests[0].ids == Tokens(range(1, 14))
    assert trace.requests[1].namespace == SECRET
    assert trace.requests[1].tenant == SECRET.tenant


def test_both_forms_give_the_same_reuse(tmp_path: Path) -> None:
    for name, keep in (("ids", False), ("tokens", True)):
        record(tmp_path / name, keep_tokens=keep)
    counts = [reuse(read_trace(tmp_path / name), 4) for name in ("ids", "tokens")]
    assert counts == [TraceReuse(blocks=15, unique=9, found=6)] * 2


def test_requests_after_the_end_are_not_recorded(tmp_path: Path) -> None:
    engine, events = engine_and_bus()
    recorder = TraceRecorder(tmp_path / "t", events, block_tokens=4)
    assert events.wants(RequestReceived)
    recorder.close()
    recorder.close()
    assert not events.wants(RequestReceived)
    engine.add(request("a", [1]))
    run_all(engine)
    assert (tmp_path / "t").read_text().count("\n") == 1


def test_requests_from_before_the_start_are_left_out(tmp_path: Path) -> None:
    engine, events = engine_and_bus()
    engine.add(request("a", [1]))
    with TraceRecorder(tmp_path / "t", events, block_tokens=4) as recorder:
        run_all(engine)
    assert recorder.num_requests == 0


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, events = engine_and_bus()
    recorder = TraceRecorder(tmp_path / "t", events, block_tokens=4)

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    recorder._out.close()
    recorder._out = Full()  # type: ignore[assignment]
    engine.add(request("a", [1]))
    assert run_all(engine)["a"]
    assert "recording ends after 0 requests: [Errno 28] No space left on device" in caplog.text
    assert not events.wants(RequestReceived)
    recorder.close()


def test_a_file_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot record to .*: Is a directory"):
        TraceRecorder(tmp_path, EventBus(), block_tokens=4)


def test_an_engine_reports_a_request_before_it_queues_it() -> None:
    engine, events = engine_and_bus()
    told: list[Any] = []
    events.subscribe(RequestReceived, told.append)
    events.subscribe(RequestQueued, told.append)
    asked = request("a", [1, 2])
    engine.add(asked)
    assert told == [RequestReceived(asked, 0.0), RequestQueued("a", 2, 0.0)]
    engine.abort("a")
