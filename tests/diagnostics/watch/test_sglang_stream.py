"""A stream that SGLang itself wrote: its Rust prefix cache with 300 pages of 16 tokens, without a GPU.

90 prompts of 18 growing conversations, up to 1,000 tokens, one at a time; a msgpack list of the payloads that
SGLang 0.5.23 publishes. With 600 pages and with no limit the same program found `AT_600` and `AT_ANY` tokens.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import msgspec
import pytest

from sagellm.control_plane.kv_events import ReceivedBatch, decode_batch
from sagellm.diagnostics.watch.cache_view import CacheView
from sagellm.diagnostics.watch.counters import ServerCounters
from sagellm.diagnostics.watch.ladder import Ladder, Watched
from sagellm.diagnostics.watch.report import UNLIMITED

STREAM = Path(__file__).parents[2] / "golden" / "kv_events" / "sglang_0_5_23.msgpack.xz"
QUERIED, AT_300, AT_600, AT_ANY = 62_404, 22_144, 39_056, 44_384


def test_more_memory_for_sglang_is_foreseen_within_two_points() -> None:
    view = CacheView()
    view.set_answers_at_once(0)
    payloads = msgspec.msgpack.decode(lzma.decompress(STREAM.read_bytes()), type=list[bytes])
    for seq, payload in enumerate(payloads):
        view.feed(0, ReceivedBatch(seq, decode_batch(payload)))
    view.finish()
    view.check()
    assert (view.instance(0).block_size, view.instance(0).num_malformed) == (16, 0)
    counters = ServerCounters("SGLang", "m", QUERIED, AT_300, 90)
    ladder = Ladder(view, [Watched(counters, 300, 16)])
    assert ladder.now == pytest.approx(AT_300 / QUERIED)
    assert ladder.lru_from_events(2.0) == pytest.approx(AT_600 / QUERIED, abs=0.02)
    assert ladder.lru_from_events(UNLIMITED) == pytest.approx(AT_ANY / QUERIED, abs=0.02)
    print(ladder.lru_from_events(2.0), AT_600 / QUERIED, ladder.lru_from_events(UNLIMITED), AT_ANY / QUERIED)
