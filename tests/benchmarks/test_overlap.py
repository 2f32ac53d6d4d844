"""What `cache overlap` counts, by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sagellm.benchmarks.overlap import (
    Overlap,
    OverlapText,
    SliceShare,
    as_table,
    headline,
    stored_overlap,
    stored_runs,
    trace_overlap,
)
from sagellm.benchmarks.traces import Trace, TraceRequest, read_trace
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import StoredBlock
from sagellm.core.types import Namespace, Tokens
from sagellm.kvmgr.prefix_cache.fingerprint import chain

GOLDEN = Path(__file__).parents[1] / "golden" / "traces"
A, B = Namespace("a"), Namespace("b")
DOCUMENT = [7, 8, 9, 10]


def trace(*texts: tuple[list[int], Namespace, str | None]) -> Trace:
    requests = [
        TraceRequest(float(at), Tokens(ids), namespace, len(ids), 0, session)
        for at, (ids, namespace, session) in enumerate(texts)
    ]
    return Trace("t", "sagellm", 1, tuple(requests))


def test_each_place_counts_what_it_had() -> None:
    found = trace_overlap(
        trace(
            ([1, 2, 3, 4, *DOCUMENT], A, "s"),
            ([1, 2, 3, 4, 5, *DOCUMENT], A, "s"),  # a prefix of 4, then the document one token later
            ([6, *DOCUMENT], A, "t"),  # the document is another session's
            ([1, 2, 3, 4, *DOCUMENT], B, "s"),  # all of it is another tenant's
        ),
        [4],
        block_tokens=4,
    )
    assert (found.tokens, found.prefix_tokens, found.texts) == (8 + 9 + 5 + 8, 4, 4)
    assert (found.sessions, found.namespaces) == (3, 2)
    assert list(found.shares) == [
        SliceShare(4, in_session=4, in_namespace=8, anywhere=16, moved=8, by_reuses={1: 8, 4: 0, 16: 0})
    ]
    [row] = as_table(found).rows
    assert row == ("4", "13.3", "26.7", "53.3", "30.8", "100.0", "100.0", "0.0", "0.0")
    assert headline(found) == (
        "t: 4 texts, 30 tokens; 13.3 % in prefixes, of a cache that never evicts blocks of 4"
    )


def test_tokens_of_the_prefix_do_not_count_twice() -> None:
    """The prefix of a wider place is longer: what is beyond the own one counts."""
    found = trace_overlap(trace((DOCUMENT, A, None), ([7, 8], B, None), (DOCUMENT, B, None)), [2], 2)
    assert found.prefix_tokens == 2
    [share] = found.shares
    assert (share.in_session, share.in_namespace, share.anywhere) == (0, 0, 2 + 2)
    assert "same session %" not in as_table(found).columns


def test_how_often_a_slice_is_reused() -> None:
    texts = [([number + 100, *DOCUMENT], A, None) for number in range(18)]
    [share] = trace_overlap(trace(*texts), [4]).shares
    assert share.by_reuses == {1: 0, 4: 0, 16: 0}, "no slice begins where the document does"
    texts.insert(0, (DOCUMENT, A, None))
    [share] = trace_overlap(trace(*texts), [4]).shares
    assert share.by_reuses == {1: 0, 4: 0, 16: 18 * 4}
    assert share.in_namespace == share.moved == 18 * 4


def test_a_text_finds_nothing_of_its_own() -> None:
    [share] = trace_overlap(trace((DOCUMENT * 3, A, None)), [4]).shares
    assert share.in_namespace == 0


@pytest.mark.parametrize("name", ["chat", "agents", "tenants"])
def test_traces_of_blocks_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot show reuse in other positions"):
        trace_overlap(read_trace(GOLDEN / f"{name}.jsonl"))


def test_traces_of_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text(json.dumps({"input_toks": 5, "output_toks": 5, "arrival_time": 1.0}) + "\n")
    with pytest.raises(ConfigError, match="has lengths only"):
        trace_overlap(read_trace(path))


# -- stored blocks


def stored(namespace: Namespace, *ids: int) -> list[StoredBlock]:
    """The blocks of a path, of two tokens each."""
    data = Tokens(ids).tobytes()
    hashes = chain(data, 8, namespace)
    parents = [b"", *hashes]
    return [
        StoredBlock(0, own, parents[at], namespace, data[8 * at : 8 * at + 8], 0.0)
        for at, own in enumerate(hashes)
    ]


def test_each_stored_block_is_in_one_run() -> None:
    trunk = stored(A, 1, 2, 3, 4, 5, 6)
    branch = stored(A, 1, 2, 9, 9)
    orphan = stored(B, 0, 0, 8, 8)[1:]
    blocks = [*trunk, *branch, *orphan]  # both paths have the first block, as two slots may
    runs = list(stored_runs(blocks))
    assert sorted((run.tokens.tolist(), run.namespace) for run in runs) == [
        ([1, 2, 3, 4, 5, 6], A),
        ([8, 8], B),
        ([9, 9], A),
    ]


def test_tokens_that_are_held_twice() -> None:
    blocks = [*stored(A, 1, 2, *DOCUMENT), *stored(A, 3, 4, *DOCUMENT), *stored(B, *DOCUMENT)]
    found = stored_overlap("folder", blocks, [4])
    assert (found.tokens, found.block_tokens, found.prefix_tokens) == (16, 2, 0)
    [share] = found.shares
    assert share.in_namespace == 0, "no slice of 4 begins where the document does"
    [share] = stored_overlap("folder", blocks, [2]).shares
    assert (share.in_namespace, share.anywhere) == (4, 8)
    assert headline(found) == "folder: 3 texts, 16 tokens"
    assert as_table(found).title == "held more than once"


def test_a_folder_without_blocks() -> None:
    with pytest.raises(ConfigError, match="folder holds no blocks"):
        stored_overlap("folder", [])


def test_an_empty_table_has_no_shares_of_nothing() -> None:
    empty: Any = Overlap("x", 1, 0, 1, 5, 16, 5, [SliceShare(16, by_reuses={1: 0, 4: 0, 16: 0})])
    assert as_table(empty).rows == [("16", "0.0", "-", "-", "-", "-", "-")]
    assert OverlapText(Tokens(), A).session is None


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "tokens", "prefix_tokens", "in_namespace"),
    [
        ("lmcache_magagent_a", 962_326, 812_020, 93_120),
        ("lmcache_taubench_a", 45_111, 38_135, 128),
    ],
)
def test_the_figures_of_the_log(name: str, tokens: int, prefix_tokens: int, in_namespace: int) -> None:
    folder = os.environ.get("SAGELLM_TRACES")
    if not folder:
        pytest.skip("SAGELLM_TRACES names no folder of traces")
    trace = read_trace(Path(folder, f"{name}.jsonl.xz"), fallback={"tokenizer": "words"})
    found = trace_overlap(trace, [64])
    assert (found.tokens, found.prefix_tokens) == (tokens, prefix_tokens)
    assert [share.in_namespace for share in found.shares] == [in_namespace]
