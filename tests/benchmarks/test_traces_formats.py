"""The formats of others: what their fields mean here, and the published files themselves."""

from __future__ import annotations

import json
import lzma
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.benchmarks.traces.files import OnError
from sagellm.benchmarks.traces.summary import TraceReuse, reuse, summarize
from sagellm.core.blocks import cdiv
from sagellm.core.errors import ConfigError, MissingExtraError
from sagellm.core.types import Namespace, Tokens

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def save(*lines: Any) -> Path:
        path = tmp_path / "trace"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return path

    return save


# -- coding agents


def call(t: float, ids: list[Any], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 4 * len(ids), "out": 3, "hash_ids": ids} | more


def session(name: str, *requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 4, "hash_id_scope": "local", "requests": list(requests)} | more


def times_of(trace: Trace) -> list[tuple[float, list[int]]]:
    return [(request.time_s, request.ids.tolist()) for request in trace.requests]


def test_sessions_start_at_moments_drawn_from_the_seed(save: Save) -> None:
    path = save(session("a", call(0, [1, 2]), call(9, [1, 2, 3, 4])), session("b", call(0, [1])))
    trace = read_trace(path, every=2, span_s=100.0, seed=7)
    random = np.random.default_rng(7)
    a, b = random.uniform(0, 100), random.uniform(0, 100)
    assert trace.format == "coding_agents"
    assert trace.block_tokens == 8
    assert times_of(trace) == sorted([(a, [2]), (a + 9, [2, 4]), (b, [])])
    assert {request.session: request.namespace for request in trace.requests} == {
        "a": Namespace(tenant="a"), "b": Namespace(tenant="b"),
    }  # fmt: skip


def test_a_broken_line_moves_no_other_session(save: Save) -> None:
    whole = read_trace(save(session("a", call(0, [1])), session("b", call(0, [1]))), every=1)
    path = save(session("a", call(0, ["x"])), session("b", call(0, [1])))
    holed = read_trace(path, every=1, on_error="skip")
    assert [line.number for line in holed.skipped] == [1]
    assert holed.requests == tuple(one for one in whole.requests if one.session == "b")


def test_a_subagent_starts_its_duration_before_its_end(save: Save) -> None:
    inner = {"type": "subagent", "t": 20, "requests": [call(0, [5]), call(6, [6])]}
    empty = {"type": "subagent", "t": 20, "requests": []}
    known = {"type": "subagent", "t": 30, "duration_ms": 4000, "requests": [call(1, [7], model="m")]}
    path = save(session("a", call(0, [1]), inner, known, empty, call(50, [2], ttft=0.5)))
    trace = read_trace(path, every=1, span_s=0.0)
    assert times_of(trace) == [(0, [1]), (14, [5]), (20, [6]), (27, [7]), (50, [2])]
    assert [request.meta.get("subagent", False) for request in trace.requests] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert trace.requests[3].meta == {"type": "n", "model": "m", "subagent": True}
    assert trace.requests[4].meta == {"type": "n", "ttft": 0.5}
    assert {request.session for request in trace.requests} == {"a"}


def test_two_lines_are_two_sessions_whatever_their_name(save: Save) -> None:
    trace = read_trace(save(session("a", call(0, [1])), session("a", call(0, [1]))), every=1)
    assert {request.session for request in trace.requests} == {"a", "a (line 2)"}
    assert reuse(trace) == TraceReuse(blocks=2, unique=2, found=0)


def test_ids_of_global_scope_are_shared(save: Save) -> None:
    lines = [session(name, call(0, [1]), hash_id_scope="global") for name in "ab"]
    assert reuse(read_trace(save(*lines), every=1)) == TraceReuse(blocks=2, unique=1, found=1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (session("a", call(0, [1]), block_size=8), "block_size 8: all lines have the same"),
        (session("a", requests=5), "requests must be a list of JSON objects, got 5"),
        (session("a", {"type": "subagent", "t": 1}), "requests is missing"),
        (session("a", {"type": "subagent", "t": 1, "requests": [3]}), r"list of JSON objects, got \[3\]"),
        (session("a", {"t": 1}), "hash_ids is missing"),
        (session("a", call(0, [1]), call(float("inf"), [])), "t must be a finite number, got inf"),
    ],
)
def test_a_broken_session_is_left_out_whole(save: Save, line: dict[str, Any], reason: str) -> None:
    path = save(session("first", call(0, [1])), line)
    with pytest.raises(ConfigError, match=f"line 2: .*{reason}"):
        read_trace(path)
    assert [one.session for one in read_trace(path, on_error="skip").requests] == ["first"]


@pytest.mark.parametrize("options", [{"every": 0}, {"span_s": -1.0}, {"span_s": float("nan")}, {"seed": -1}])
def test_options_of_sessions_are_checked(save: Save, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="every must be at least 1, span_s and seed at least 0"):
        read_trace(save(session("a", call(0, [1]))), "coding_agents", **options)


# -- lengths only


def test_azure(save: Save) -> None:
    path = save(
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:50.5000000,374,44",
        "2023-11-16 18:15:46.2500009,20,0",
    )
    trace = read_trace(path)
    assert (trace.format, trace.block_tokens) == ("azure", 1)
    first, second = trace.requests
    assert first == TraceRequest(0.0, Tokens(), Namespace(), 20, 0)
    assert second.time_s == pytest.approx(4.25, abs=2e-6)
    assert (second.num_input_tokens, second.num_output_tokens) == (374, 44)


def test_azure_reads_columns_by_name_and_times_with_a_zone(save: Save) -> None:
    path = save(
        "GeneratedTokens,x,TIMESTAMP,ContextTokens",
        "1,,2024-05-10 00:00:00.000000+00:00,2",
        '3,"a,b",2024-05-10 01:00:01+01:00,4',
    )
    assert [(one.time_s, one.num_input_tokens) for one in read_trace(path).requests] == [(0.0, 2), (1.0, 4)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:15:46,1", "2 cells; the header has TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("today,1,1", "TIMESTAMP must be a date and a time, got 'today'"),
        ("2023-11-16 18:15:46,-1,1", "ContextTokens must be a whole number from 0 on, got '-1'"),
        ("2023-11-16 18:15:46,1,1.5", "GeneratedTokens must be a whole number from 0 on, got '1.5'"),
        ('2023-11-16 18:15:46,"1"x,1', "no CSV: "),
    ],
)
def test_a_broken_line_of_azure(save: Save, line: str, reason: str) -> None:
    path = save("TIMESTAMP,ContextTokens,GeneratedTokens", line)
    with pytest.raises(ConfigError, match=f"line 2: {reason}"):
        read_trace(path)


def test_a_csv_file_without_the_columns(save: Save) -> None:
    with pytest.raises(
        ConfigError, match=r"line 1: the header lacks ContextTokens, Gen.*; it has TIMESTAMP, x"
    ):
        read_trace(save("TIMESTAMP,x", "1,2"), "azure")


def test_vllm_requests(save: Save) -> None:
    times = {"queued_ts": 5.0, "scheduled_ts": 5.1, "first_token_ts": 5.5, "last_token_ts": 7.0}
    line = {"request_id": "bench-0", "input_toks": 9, "output_toks": 4, "arrival_time": 1000.5}
    later = line | {"request_id": "bench-1", "arrival_time": 1002.0}
    trace = read_trace(save(later, line | times))
    assert trace.format == "vllm_requests"
    assert [one.time_s for one in trace.requests] == [0.0, 1.5]
    assert [dict(one.meta) for one in trace.requests] == [
        {"request_id": "bench-0"} | times, {"request_id": "bench-1"},
    ]  # fmt: skip
    assert {(one.num_input_tokens, one.num_output_tokens, len(one.ids)) for one in trace.requests} == {
        (9, 4, 0)
    }


# -- texts


def said(text: str, answer: str = "", timestamp: int = 0, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input": text, "output": answer, "session_id": "s"} | more


def test_texts_are_tokens_of_four_bytes(save: Save) -> None:
    lines = [
        said("abcdefghij", "12345", 5_000_000),
        said("abcdefgX", "", 6_500_000),
        said("ü你abcd"),
        said(""),
    ]
    trace = read_trace(save(*lines))
    assert (trace.format, trace.block_tokens) == ("lmcache_agents", 1)
    assert times_of(trace) == [(0.0, [4, 5, 6]), (0.0, []), (5.0, [0, 1, 2]), (6.5, [0, 3])]
    assert [(one.num_input_tokens, one.num_output_tokens) for one in trace.requests] == [
        (3, 0), (0, 0), (3, 2), (2, 0),
    ]  # fmt: skip
    assert {one.session for one in trace.requests} == {"s"}


def test_words_are_the_same_tokens_behind_any_text(save: Save) -> None:
    texts = ["The answer(x)", "So: The answer(x)", "extraordinary", "   \n\t  \u00fc", ""]
    path = save(*({"prompt": text} for text in texts))
    ids = [request.ids.tolist() for request in read_trace(path, fallback={"tokenizer": "words"}).requests]
    assert ids[0] == [0, 1, 2, 3, 4]
    assert ids[1][-4:] == ids[0][1:]
    assert [len(each) for each in ids[2:]] == [2, 2, 0]
    assert read_trace(path).requests[0].num_input_tokens == 4, "without the fallback, 4 bytes are a token"


def test_a_fallback_is_for_formats_that_have_it(save: Save) -> None:
    path = save({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]})
    assert read_trace(path, fallback={"tokenizer": "words"}).format == "mooncake"
    path = save(said("ab cd", "x"))
    kept = read_trace(path, fallback={"tokenizer": "words"}, tokenizer="bytes").requests
    assert [request.num_input_tokens for request in kept] == [2]


def test_prompts_and_messages(save: Save) -> None:
    trace = read_trace(
        save(
            {"prompt": "abcd"},
            {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "t", "session_id": "s"},
        )
    )
    first, second = trace.requests
    assert (trace.format, first.time_s, second.time_s) == ("prompts", 0.0, 1.0)
    assert (first.namespace, first.session, first.tenant) == (Namespace(), None, "")
    assert (second.namespace, second.session, second.tenant) == (Namespace("t"), "s", "t")
    assert second.num_input_tokens == cdiv(len("<user>\nhi\n"), 4)
    with pytest.raises(ConfigError, match="prompt must be a text"):
        read_trace(save({"prompt": ["a"]}))


def test_a_tokenizer_is_a_function_or_a_folder(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(said("ab", "xyz", session_id=None, session_file="f"))
    [request] = read_trace(path, tokenizer=lambda text: map(ord, text)).requests
    assert request == TraceRequest(0.0, Tokens([97, 98]), Namespace(), 2, 3, session="f")
    with pytest.raises(ConfigError, match="tokenizer 'nowhere': a model's folder, 'bytes' or 'words'"):
        read_trace(path, "lmcache_agents", tokenizer="nowhere")
    monkeypatch.setitem(sys.modules, "sagellm.engines.native.tokenizer", None)
    with pytest.raises(MissingExtraError, match="a model's tokenizer needs packages"):
        read_trace(path, "lmcache_agents", tokenizer=str(path.parent))


def test_the_demo_models_tokenizer(save: Save) -> None:
    pytest.importorskip("tokenizers")
    from sagellm.engines.native import DEMO_MODEL
    from sagellm.engines.native.tokenizer import Tokenizer

    [request] = read_trace(save(said("Hello there", "yes")), tokenizer=DEMO_MODEL).requests
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    assert request.ids == tokenizer.encode("Hello there")
    assert request.num_output_tokens == len(tokenizer.encode("yes"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (said("x", session_id=3), "session_id must be a text, got 3"),
        (said("x") | {"input": None}, "input must be a text, got None"),
        (said("\ud800"), "a text that is no Unicode: surrogates not allowed"),
        ({"timestamp": 0, "input": "", "output": ""}, "session_file is missing"),
    ],
)
def test_a_broken_call(save: Save, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2: {reason}"):
        read_trace(save(said("x"), line))


# -- trajectories


def trajectory(*messages: dict[str, Any], trial: int = 0) -> dict[str, Any]:
    return {"task_id": 4, "trial": trial, "reward": 1.0, "info": {}, "traj": list(messages)}


def test_each_message_of_the_assistant_in_a_trajectory_is_a_request(save: Save) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent. " * 4},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Who are you?"},
        {"role": "user", "content": "I am Mia"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "{}", "name": "look_up", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Hello Mia"},
    ]
    trace = read_trace(save(trajectory(*messages), trajectory(*messages[:3], trial=1)), gap_s=5.0)
    assert (trace.format, trace.block_tokens, trace.skipped) == ("tau_bench", 1, ())
    sessions = [[r for r in trace.requests if r.session == f"task 4, trial {n}"] for n in (0, 1)]
    assert [len(one) for one in sessions] == [3, 1]
    first, second, third = sessions[0]
    assert [r.time_s - first.time_s for r in sessions[0]] == pytest.approx([0.0, 5.0, 10.0])
    assert first.num_output_tokens == len("Who are you?") // 4
    assert second.num_output_tokens == cdiv(len(json.dumps(calls)), 4)
    whole = first.num_input_tokens - 1  # the last token of a prompt may be cut short
    assert list(second.ids)[:whole] == list(first.ids)[:whole] == list(sessions[1][0].ids)[:whole]
    assert first.num_input_tokens < second.num_input_tokens < third.num_input_tokens


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (trajectory() | {"traj": "x"}, "traj must be a list of messages, got 'x'"),
        (trajectory({"content": "x"}), "role is missing"),
        (trajectory({"role": "user", "content": 3}), "content must be a text, got 3"),
        (trajectory() | {"task_id": "a"}, "task_id must be a whole number"),
    ],
)
def test_a_broken_trajectory(save: Save, line: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2: {reason}"):
        read_trace(save(trajectory(), line))


# -- statistics of clients


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """Client 0 has lengths from 600 s on, client 1 always, client 2 never."""
    some = {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{3: 1.0}"}
    none = {"input_tokens": "{}", "output_tokens": "{}"}
    windows = [{"0": none, "600": some}, {"0": some | {"input_tokens": "{7: 1}"}, "600": none}, {"0": none}]
    path = tmp_path / "lengths"
    path.write_text("\n".join(json.dumps({"client": str(n), "windows": w}) for n, w in enumerate(windows)))
    return path


def test_servegen_draws_what_the_rates_say(save: Save, lengths: Path) -> None:
    path = save("0,0,0.5,1,Gamma,1,9", "0,600,2,1,Gamma,1,9", "1,600,1,3,Weibull,0.5,9", "0,1200,0,0,,0,0")
    trace = read_trace(path, lengths=lengths)
    assert (trace.format, trace.skipped) == ("servegen", ())
    counts = Counter((request.tenant, request.time_s < 600) for request in trace.requests)
    assert counts == {("0", True): 300, ("0", False): 1200, ("1", False): 600}
    assert {r.num_input_tokens for r in trace.requests if r.tenant == "1"} == {7}
    ours = Counter(r.num_input_tokens for r in trace.requests if r.tenant == "0")
    assert ours.keys() == {10, 20}
    assert ours[20] / 1500 == pytest.approx(0.75, abs=0.03)
    assert {(r.num_output_tokens, len(r.ids), r.namespace.tenant == r.tenant) for r in trace.requests} == {
        (3, 0, True)
    }
    assert read_trace(path, lengths=lengths) == trace
    assert read_trace(path, lengths=lengths, seed=1).requests != trace.requests


def test_servegen_gives_a_part_of_the_days(save: Save, lengths: Path) -> None:
    path = save("1,0,1,1,Gamma,1,9", "1,600,1,1,Gamma,1,9", "1,1200,1,1,Gamma,1,9")
    whole = read_trace(path, lengths=lengths).requests
    part = read_trace(path, lengths=lengths, start_s=700.0, span_s=200.0).requests
    assert [r.time_s + 700 for r in part] == pytest.approx([r.time_s for r in whole if 700 <= r.time_s < 900])
    assert len(part) > 100


@pytest.mark.parametrize("pattern", ["Gamma,0.1", "Weibull,0.4"])
def test_servegen_gaps_are_as_uneven_as_their_shape_says(save: Save, lengths: Path, pattern: str) -> None:
    times = [r.time_s for r in read_trace(save(f"1,0,20,1,{pattern},9"), lengths=lengths).requests]
    gaps = np.diff(times)
    assert len(times) == 12_000
    variation = {"Gamma,0.1": 0.1**-0.5, "Weibull,0.4": 3.14}[pattern]
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,0,1,1,Gamma,1", "6 cells; a line of rates has 7"),
        ("1,x,1,1,Gamma,1,9", "start, rate and arguments must be numbers"),
        ("1,0,-1,1,Gamma,1,9", "start, rate and arguments must be from 0 on"),
        ("1,0,nan,1,Gamma,1,9", "start, rate and arguments must be from 0 on"),
        ("1,0,1,1,Pareto,1,9", "a rate needs one of Gamma, Weibull and its shape"),
        ("1,0,1,1,Gamma,0,9", "a rate needs one of Gamma, Weibull and its shape"),
        ("2,0,1,1,Gamma,1,9", "the client has a rate, and no lengths in any window"),
        ("9,0,1,1,Gamma,1,9", "client 9 has no lengths in "),
    ],
)
def test_a_broken_line_of_rates(save: Save, lengths: Path, line: str, reason: str) -> None:
    path = save("1,0,0.1,1,Gamma,1,9", line)
    with pytest.raises(ConfigError, match=f"line 2: {reason}"):
        read_trace(path, lengths=lengths)
    assert len(read_trace(path, lengths=lengths, on_error="skip").requests) == 60


def test_servegen_needs_its_file_of_lengths(save: Save, tmp_path: Path) -> None:
    path = save("1,0,1,1,Gamma,1,9")
    with pytest.raises(ConfigError, match="servegen needs the file of lengths beside that of rates"):
        read_trace(path)
    with pytest.raises(ConfigError, match="start_s must be at least 0 and span_s greater than 0"):
        read_trace(path, span_s=0.0)
    broken = tmp_path / "broken"
    broken.write_text('{"client": "1", "windows": {"0": {"input_tokens": "{1:", "output_tokens": "{}"}}}')
    with pytest.raises(ConfigError, match="line 1: lengths of a window that cannot be read"):
        read_trace(path, lengths=broken)
    broken.write_text('{"client": "1", "windows": []}')
    with pytest.raises(ConfigError, match=r"broken: after 0 clients comes a line without lengths of one"):
        read_trace(path, lengths=broken)


def test_servegen_of_clients_that_send_images_is_refused(save: Save, tmp_path: Path) -> None:
    images = tmp_path / "images"
    window = {"text_tokens": "{1: 1.0}", "image_tokens": "{1: 1.0}", "output_tokens": "{1: 1.0}"}
    images.write_text(json.dumps({"client": "1", "windows": {"0": window}}))
    on_errors: list[OnError] = ["fail", "skip"]
    for on_error in on_errors:
        with pytest.raises(
            ConfigError, match=r"a window of lengths has image_tokens, .* multimodal data are"
        ):
            read_trace(save("1,0,1,1,Gamma,1,9"), lengths=images, on_error=on_error)


# -- the published files

AGENTS = "cc_agentic_sessions_a.jsonl.xz"
PUBLISHED = {
    "mooncake_conversation_first_half.jsonl.xz": ("mooncake", 5606, TraceReuse(144_280, 95_189, 49_091)),
    "mooncake_synthetic_first_half.jsonl.xz": ("mooncake", 1925, TraceReuse(47_171, 32_348, 14_823)),
    "azure2023_code_first_half.csv.xz": ("azure", 5353, TraceReuse(0, 0, 0)),
    "azure2023_conv_first_half.csv.xz": ("azure", 9739, TraceReuse(0, 0, 0)),
    "lmcache_magagent_a.jsonl.xz": ("lmcache_agents", 501, TraceReuse(64_845, 10_311, 54_534)),
    "lmcache_miniswe_a.jsonl.xz": ("lmcache_agents", 255, TraceReuse(91_812, 5_702, 86_110)),
    "lmcache_taubench_a.jsonl.xz": ("lmcache_agents", 235, TraceReuse(2_922, 498, 2_424)),
    "tau_bench_gpt4o_airline_a.jsonl.xz": ("tau_bench", 1163, TraceReuse(199_407, 12_860, 186_547)),
    "vllm_requests_RTX4090_llama31_8b.jsonl.xz": ("vllm_requests", 300, TraceReuse(0, 0, 0)),
    "vllm_requests_RTXPRO6000_llama31_8b.jsonl.xz": ("vllm_requests", 300, TraceReuse(0, 0, 0)),
}
"""Counted once with this code; those of the conversation trace by a second program, too."""


@pytest.mark.traces
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file(sagellm_traces: Path, name: str) -> None:
    expected, num_requests, counts = PUBLISHED[name]
    trace = read_trace(sagellm_traces / name)
    assert (trace.format, len(trace.requests), trace.skipped) == (expected, num_requests, ())
    assert trace.requests[0].time_s == 0.0
    assert reuse(trace) == counts


@pytest.mark.traces
def test_an_hour_of_servegen(sagellm_traces: Path) -> None:
    name = "servegen_deepseek-r1_client_{}.xz".format
    rates, lengths = sagellm_traces / name("rates.csv"), sagellm_traces / name("lengths.jsonl")
    trace = read_trace(rates, lengths=lengths, start_s=43_200.0)
    assert len(trace.requests) == 25_775  # the sum of rate x 600 s of that hour, which are whole numbers
    assert {len(request.ids) for request in trace.requests} == {0}


@pytest.mark.traces
def test_the_first_requests_of_the_conversation_trace(sagellm_traces: Path) -> None:
    trace = read_trace(sagellm_traces / "mooncake_conversation_first_half.jsonl.xz")
    first, second = trace.requests[:2]
    assert (first.time_s, first.ids, first.num_input_tokens) == (0.0, Tokens(range(14)), 6758)
    assert second.ids == Tokens([0, *range(14, 28)])


@pytest.mark.traces
def test_the_first_sessions_of_coding_agents(sagellm_traces: Path, tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    with lzma.open(sagellm_traces / AGENTS) as file:
        path.write_bytes(b"".join(islice(file, 20)))
    trace = read_trace(path)
    summary = summarize(trace)
    assert (summary.requests, summary.blocks, summary.unique_blocks) == (2209, 487_590, 21_809)
    assert (summary.sessions, summary.namespaces, summary.block_tokens) == (20, 20, 512)


@pytest.mark.slow
@pytest.mark.traces
def test_the_sessions_of_coding_agents(sagellm_traces: Path) -> None:
    trace = read_trace(sagellm_traces / AGENTS)
    summary = summarize(trace)
    assert (summary.requests, summary.blocks, summary.unique_blocks) == (24_530, 5_725_036, 206_189)
    assert (summary.sessions, summary.namespaces, summary.block_tokens) == (366, 366, 512)
    starts = np.random.default_rng(0).uniform(0, 14_400, 366)
    first = next(one for one in trace.requests if one.session == "trace_0001")
    assert (first.time_s, first.ids) == (starts[0], Tokens(range(8, 71_175 // 64 + 1, 8)))
