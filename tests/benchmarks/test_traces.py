"""Reading and writing traces: what every format shares."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
import pickle
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagellm.benchmarks.traces import (
    BadLine,
    Trace,
    TraceRequest,
    block_ids,
    block_size,
    read_trace,
    write_trace,
)
from sagellm.benchmarks.traces.files import COMPRESSIONS, writable_formats
from sagellm.benchmarks.traces.summary import TraceReuse, as_table, reuse, summarize
from sagellm.core.errors import ConfigError, UnknownNameError
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Tokens

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"


def mooncake(*ids: list[int], **changes: Any) -> str:
    """Lines of that format, a second apart, two tokens to a block."""
    records = [
        {"timestamp": 1000 * n, "input_length": 2 * len(one), "output_length": n, "hash_ids": one}
        for n, one in enumerate(ids)
    ]
    return "".join(json.dumps(record | changes) + "\n" for record in records)


def saved(folder: Path, text: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def ids_of(trace: Trace) -> list[list[int]]:
    return [request.ids.tolist() for request in trace.requests]


def test_a_trace_has_requests_and_its_origin(tmp_path: Path) -> None:
    text = mooncake([1, 2], [1, 3, 4])
    trace = read_trace(saved(tmp_path, text, "some.trace.jsonl"), block_tokens=2)
    assert (trace.name, trace.format, trace.block_tokens) == ("some.trace", "mooncake", 2)
    assert trace.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert trace.requests == (
        TraceRequest(0.0, Tokens([1, 2]), Namespace(), 4, 0),
        TraceRequest(1.0, Tokens([1, 3, 4]), Namespace(), 6, 1),
    )
    assert pickle.loads(pickle.dumps(trace)) == trace  # sweeps run in several processes


def test_requests_are_in_order_of_time_and_then_of_the_file(tmp_path: Path) -> None:
    text = mooncake([1], timestamp=5) + mooncake([2], timestamp=3) + mooncake([3], timestamp=5)
    trace = read_trace(saved(tmp_path, text))
    assert [(request.time_s, request.ids[0]) for request in trace.requests] == [
        (0.003, 2), (0.005, 1), (0.005, 3),
    ]  # fmt: skip


class FakeZstandard(SimpleNamespace):
    """The interface of the package `zstandard` over zlib, which is always here."""

    class ZstdError(Exception):
        pass

    class ZstdDecompressor:
        def decompressobj(self) -> _Frame:
            return _Frame()


class _Frame:
    def __init__(self) -> None:
        self._frame = zlib.decompressobj()

    def decompress(self, data: bytes) -> bytes:
        try:
            return self._frame.decompress(data.removeprefix(COMPRESSIONS[".zst"]))
        except zlib.error as error:
            raise FakeZstandard.ZstdError(str(error)) from error

    @property
    def unused_data(self) -> bytes:
        return self._frame.unused_data

    @property
    def eof(self) -> bool:
        return self._frame.eof


def fake_zstd(data: bytes) -> bytes:
    return COMPRESSIONS[".zst"] + zlib.compress(data)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": fake_zstd,
}


@pytest.fixture
def zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", FakeZstandard)


@pytest.mark.usefixtures("zstandard")
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_is_the_same_trace(tmp_path: Path, suffix: str) -> None:
    text = mooncake([1, 2], [1, 3])
    plain = read_trace(saved(tmp_path, text))
    packed = COMPRESS[suffix](text.encode())
    assert read_trace(saved(tmp_path, packed, f"trace.jsonl{suffix}")) == plain
    assert read_trace(saved(tmp_path, packed, "trace")) == plain  # told by its content


@pytest.mark.usefixtures("zstandard")
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_file_that_is_cut_off_is_fatal_or_reported(tmp_path: Path, suffix: str) -> None:
    text = "".join(mooncake(list(range(i, i + 50)), timestamp=i) for i in range(1000))
    packed = COMPRESS[suffix](text.encode())
    path = saved(tmp_path, packed[: len(packed) * 2 // 3], f"trace{suffix}")
    with pytest.raises(ConfigError, match=r"line \d+: "):
        read_trace(path, "mooncake")
    trace = read_trace(path, "mooncake", on_error="skip")
    assert trace.skipped
    assert 0 < len(trace.requests) < 1000
    assert trace.skipped[-1].number <= len(trace.requests) + len(trace.skipped)


@pytest.mark.usefixtures("zstandard")
def test_a_damaged_zstd_file_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path, COMPRESSIONS[".zst"] + b"rubbish")
    with pytest.raises(ConfigError, match="line 1: the file cannot be read from here on"):
        read_trace(path)


def test_zstd_without_its_package_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="pip install zstandard, or unpack it first"):
        read_trace(saved(tmp_path, fake_zstd(b"{}")))


BROKEN = {
    "not json": "no JSON: ",
    "[1]": "must be a JSON object, not a list",
    "[" * 100_000: "nested too deeply",
    '{"timestamp": 1}': "hash_ids is missing; the line has timestamp",
    '{"hash_ids": []}': "timestamp is missing",
    mooncake([1], input_length=-1): "input_length must be a whole number from 0 on, got -1",
    mooncake([1], input_length=1.5): "input_length must be a whole number from 0 on, got 1.5",
    mooncake([1], output_length=True): "output_length must be a whole number from 0 on, got True",
    mooncake([1], timestamp="x" * 99): "timestamp must be a finite number, got 'xxx",
    mooncake([1], timestamp=float("nan")): "timestamp must be a finite number, got nan",
    mooncake([1], timestamp=10**400): "timestamp must be a finite number, got 1000",
    mooncake([1], hash_ids=[1, 2.0]): "hash_ids must be a list of whole numbers",
    mooncake([1], hash_ids=[True]): "hash_ids must be a list of whole numbers",
    mooncake([1], hash_ids="12"): "hash_ids must be a list of whole numbers",
}


@pytest.mark.parametrize(("line", "reason"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_broken_line_is_fatal_or_skipped_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    path = saved(tmp_path, f"{mooncake([1, 2])}\n\n{line.rstrip()}\n{mooncake([1, 3])}")
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 4: ") as raised:
        read_trace(path, "mooncake")
    assert reason in str(raised.value)
    assert "on_error 'skip' leaves such lines out" in str(raised.value)
    trace = read_trace(path, "mooncake", on_error="skip")
    assert ids_of(trace) == [[1, 2], [1, 3]]
    [bad] = trace.skipped
    assert bad.number == 4
    assert reason in bad.reason


def test_bytes_that_are_no_text_are_a_broken_line(tmp_path: Path) -> None:
    path = saved(tmp_path, mooncake([1]).encode() + b"\xff\n")
    assert read_trace(path, on_error="skip").skipped == (BadLine(2, "no UTF-8 text: invalid start byte"),)


def test_a_mark_of_utf_8_before_the_first_line_is_none_of_it(tmp_path: Path) -> None:
    assert ids_of(read_trace(saved(tmp_path, b"\xef\xbb\xbf" + mooncake([1]).encode()))) == [[1]]


def test_the_format_is_recognised_by_one_of_the_first_lines(tmp_path: Path) -> None:
    path = saved(tmp_path, "broken\n" + mooncake([1]))
    assert read_trace(path, on_error="skip").format == "mooncake"
    with pytest.raises(ConfigError, match="line 1: no JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no known format has such lines; name the format, one of azure, coding_agents, "),
        ("a,b\n1,2\n", "no known format has such lines"),
        ("\n" * 9 + mooncake([1]), None),
        ('{"timestamp": 1, "hash_ids": [], "input": "", "output": ""}', "no known format has such lines"),
    ],
)
def test_a_file_of_no_known_format_is_refused(tmp_path: Path, text: str, message: str | None) -> None:
    path = saved(tmp_path, text)
    if message is None:
        assert len(read_trace(path).requests) == 1
        return
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(saved(tmp_path, "\n"), "mooncake")
    with pytest.raises(ConfigError, match=r"holds no request, 2 lines are broken; line 1: no JSON"):
        read_trace(saved(tmp_path, "[\n{\n"), "mooncake", on_error="skip")


def test_what_cannot_be_read_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*none: No such file"):
        read_trace(tmp_path / "none")
    path = saved(tmp_path, mooncake([1]))
    with pytest.raises(UnknownNameError, match="unknown trace_format 'moon'"):
        read_trace(path, "moon")
    with pytest.raises(UnknownNameError, match="has no option 'every'; it takes block_tokens"):
        read_trace(path, every=3)
    with pytest.raises(ConfigError, match="on_error 'warn': 'skip' or 'fail'"):
        read_trace(path, on_error="warn")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block_tokens must be at least 1, got 0"):
        read_trace(path, block_tokens=0)


def test_ids_that_are_no_int32_become_consecutive(tmp_path: Path) -> None:
    large = 2**63 + 5
    text = mooncake([7, 9], [7, large], [large, 7, 2**31])
    assert ids_of(read_trace(saved(tmp_path, text))) == [[0, 1], [0, 2], [2, 0, 3]]
    fitting = mooncake([2**31 - 1, -1])
    assert ids_of(read_trace(saved(tmp_path, fitting))) == [[2**31 - 1, -1]]


NAMES = st.text(max_size=3)
REQUESTS = st.builds(
    TraceRequest,
    time_s=st.floats(-1e6, 1e9),
    ids=st.builds(Tokens, st.lists(st.integers(0, 2**31 - 1), max_size=4)),
    namespace=st.builds(Namespace, NAMES, NAMES, NAMES, NAMES),
    num_input_tokens=st.integers(0, 10**9),
    num_output_tokens=st.integers(0, 10**9),
    session=st.none() | NAMES,
    tenant=NAMES,
    meta=st.dictionaries(NAMES, st.none() | st.booleans() | st.floats(-1e300, 1e300) | NAMES),
)  # fmt: skip


@given(st.lists(REQUESTS, min_size=1, max_size=5), st.integers(1, 512), st.sampled_from(["", ".xz", ".gz"]))
def test_our_own_format_keeps_everything(
    tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest], block_tokens: int, suffix: str
) -> None:
    ordered = tuple(sorted(requests, key=lambda request: request.time_s))
    path = tmp_path_factory.mktemp("kept") / f"trace.jsonl{suffix}"
    write_trace(Trace("a name", "sagellm", block_tokens, ordered), path)
    again = read_trace(path)
    assert again.requests == ordered
    assert (again.name, again.format, again.block_tokens) == ("a name", "sagellm", block_tokens)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ('{"sagellm_trace": 2, "block_tokens": 1}', "a sagellm trace begins with"),
        ('{"sagellm_trace": 1}', "block_tokens of the header must be at least 1, got None"),
        ('{"sagellm_trace": 1, "block_tokens": true}', "must be at least 1, got True"),
    ],
)
def test_a_header_that_is_broken_is_not_skipped(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_trace(saved(tmp_path, header), on_error="skip")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": 3}, "unknown field 'id'; a request has time_s, ids, "),
        ({"namespace": {"user": "x"}}, "namespace must hold texts named tenant, model, adapter, kv_dtype"),
        ({"namespace": {"tenant": 1}}, "namespace must hold texts named tenant"),
        ({"session": 1}, "session must be a text, got 1"),
        ({"meta": []}, r"meta must be a JSON object, got \[\]"),
    ],
)
def test_a_broken_request_of_our_own_format(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    request = {"time_s": 0, "ids": [], "num_input_tokens": 1, "num_output_tokens": 1} | changes
    text = f'{{"sagellm_trace": 1, "block_tokens": 1}}\n{json.dumps(request)}\n'
    with pytest.raises(ConfigError, match=f"line 2: {message}"):
        read_trace(saved(tmp_path, text))


def test_mooncake_loses_what_it_cannot_say_and_keeps_the_blocks(tmp_path: Path) -> None:
    a, b = Namespace(tenant="a"), Namespace(tenant="b")
    trace = Trace("x", "test", 64, (
        TraceRequest(0.0014, Tokens([5, 6]), a, 100, 3, session="s"),
        TraceRequest(1.0, Tokens([5, 6]), b, 100, 4, tenant="b"),
        TraceRequest(2.0, Tokens([5, 7]), a, 128, 5, meta={"k": 1}),
    ))  # fmt: skip
    write_trace(trace, tmp_path / "out.jsonl", "mooncake")
    again = read_trace(tmp_path / "out.jsonl", block_tokens=64)
    assert ids_of(again) == [[0, 1], [2, 3], [0, 4]]
    assert [request.time_s for request in again.requests] == [0.001, 1.0, 2.0]
    assert [request.num_output_tokens for request in again.requests] == [3, 4, 5]
    assert reuse(again) == reuse(trace)


def test_a_trace_of_tokens_is_cut_into_blocks_by_content(tmp_path: Path) -> None:
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4], [9, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]]
    trace = Trace(
        "t", "test", 1, tuple(TraceRequest(0.0, Tokens(ids), Namespace(), len(ids), 1) for ids in tokens)
    )
    expected = [[0, 1, 2], [0, 1, 2], [0, 1], [3, 4, 5], [0, 1, 6]]
    assert list(block_ids(trace, 2)) == expected
    write_trace(trace, tmp_path / "out", "mooncake", block_tokens=2)
    assert ids_of(read_trace(tmp_path / "out")) == expected
    assert reuse(trace, 2) == TraceReuse(blocks=14, unique=7, found=7)
    assert (block_size(trace), block_size(trace, 7)) == (16, 7)


def test_namespaces_keep_equal_tokens_apart() -> None:
    requests = tuple(
        TraceRequest(0.0, Tokens([1, 2]), Namespace(tenant=name), 2, 1) for name in ("a", "b", "a")
    )
    assert list(block_ids(Trace("t", "test", 1, requests), 2)) == [[0], [1], [0]]


def test_writing_refuses_what_a_file_cannot_hold(tmp_path: Path) -> None:
    lengths = Trace("x", "azure", 1, (TraceRequest(0.0, Tokens(), Namespace(), 9, 1),))
    blocks = Trace("x", "test", 64, (TraceRequest(0.0, Tokens([1]), Namespace(), 9, 1, meta={"a": {1}}),))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="has lengths only: convert it to sagellm"):
        write_trace(lengths, out, "mooncake")
    with pytest.raises(ConfigError, match="stands for 64 tokens: blocks of 16 tokens cannot be made of it"):
        write_trace(blocks, out, "mooncake", block_tokens=16)
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        write_trace(blocks, out)
    with pytest.raises(ConfigError, match="azure is only read; write mooncake or sagellm"):
        write_trace(blocks, out, "azure")
    with pytest.raises(ConfigError, match="block_tokens must be at least 1"):
        block_size(lengths, 0)
    assert not out.exists()
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_trace(lengths, tmp_path / "no" / "out")


def test_the_formats() -> None:
    known = registry("trace_format")
    assert {"azure", "coding_agents", "lmcache_agents", "mooncake", "sagellm", "vllm_requests"} <= set(
        known.names()
    )
    assert {"mooncake", "sagellm"} <= set(writable_formats())
    for name in known.names():
        made = known.create(name)
        assert {"block_tokens", "title", "from_zero", "recognises", "parse"} <= set(dir(made))
        assert not made.recognises("", None)


def test_the_summary_counts(tmp_path: Path) -> None:
    trace = read_trace(saved(tmp_path, mooncake([1, 2], [1, 3], [1, 3, 4], [2, 1], [])), block_tokens=2)
    summary = summarize(trace)
    assert (summary.requests, summary.blocks, summary.unique_blocks) == (5, 9, 4)
    assert summary.infinite_cache_ratio == 5 / 9  # a run ends at its first new block; 2, 1 is known
    assert (summary.span_s, summary.input_tokens, summary.output_tokens) == (4.0, 18, 10)
    assert (summary.median_input_tokens, summary.longest_input_tokens) == (4, 6)
    assert summary.sessions == 0
    assert len(as_table(summary).rows) == 16


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl")), ids=lambda path: path.stem)
def test_reuse_is_that_of_a_set_of_all_blocks_seen(path: Path) -> None:
    trace = read_trace(path)
    seen: set[tuple[Namespace, int]] = set()
    blocks = found = 0
    for request in trace.requests:
        own = [(request.namespace, one) for one in request.ids]
        blocks += len(own)
        found += len(list(itertools.takewhile(seen.__contains__, own)))
        seen.update(own)
    assert reuse(trace) == TraceReuse(blocks, len(seen), found)
    assert found > 0


def test_a_summary_of_lengths_has_no_blocks() -> None:
    summary = summarize(Trace("x", "azure", 1, (TraceRequest(0.0, Tokens(), Namespace(), 9, 1),)))
    assert (summary.blocks, summary.unique_blocks, summary.infinite_cache_ratio) == (None, None, None)
    assert len(as_table(summary).rows) == 12
    assert summarize(Trace("x", "azure", 1, ())).requests == 0
