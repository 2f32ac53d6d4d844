"""Measures peers in their own environments and compares their rows with ours.

A script that knows the peer is called as `PYTHON SCRIPT NAME OUT.json --sections LETTERS [--quick]`. It
writes `{"version": ..., "rows": [{"section", "case", "size", "p50", "cpu50"?, "impl"?}, ...]}`: times in µs
of one call at a time (`cpu50` is the median CPU time of the thread), memory in bytes per block (`p50`).

A row of a peer that does more at once is compared with the sum of ours: vLLM's and LMDeploy's look-ups also
collect the blocks, SGLang's do not. A prompt that comes as a list becomes tokens and bytes with us. Sections
and sizes are the harness's own; a case is found by its prefix, since some names end in numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from sagellm.benchmarks.micro import kv_pool, memory, prefix_cache, scheduler_ir
from sagellm.benchmarks.micro.cases import MicroBenchRow
from sagellm.core.errors import ConfigError, SageError, nearest

SCRIPT_VARIABLE = "SAGELLM_PEER_SCRIPT"
ENVIRONMENTS: Mapping[tuple[str, str], Mapping[str, str]] = {("sglang", "f"): {"BENCH_IMPL": "Unified:rust"}}
"""Variables for one section of one peer: trees in one process would also share its freed memory."""

MODEL = "tiny_llama"
"""The model folder that the script expects in its working folder: a scheduler needs a model's sizes."""
_MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 200_000,
    "torch_dtype": "bfloat16",
}
_SHOWN_LINES = 5
PEERS = ("vllm", "sglang", "lmdeploy")
_FROM_LIST = (prefix_cache.FROM_LIST, prefix_cache.TO_BYTES)
_HIT = (prefix_cache.ONE_EDGE, prefix_cache.GATHER)
_HIT_OF_HALF = (prefix_cache.HALF, prefix_cache.GATHER_HALF)
_ALLOCATE = (kv_pool.ALLOCATE + kv_pool.WITH_QUOTA,)
_FREE = (kv_pool.FREE + kv_pool.WITH_QUOTA,)


class PeerError(SageError):
    """A peer's measurement failed; the message ends with the last lines of its output."""


@dataclass(frozen=True, slots=True)
class MicroPeerRow:
    """One row of a peer. `value` is a median in µs of CPU time, or bytes per block."""

    peer: str
    section: str
    case: str
    size: int
    value: float
    turn: int


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in its own environment, and the script that measures it there."""

    name: str
    python: str
    script: Path

    def measure(self, section: str, *, quick: bool, turn: int = 0) -> list[MicroPeerRow]:
        """Returns the rows of one section; raises `PeerError` if there are none."""
        with tempfile.TemporaryDirectory(prefix="sagellm-peer-") as folder:
            result = Path(folder, "out.json")
            Path(folder, MODEL).mkdir()
            Path(folder, MODEL, "config.json").write_text(json.dumps(_MODEL_CONFIG), encoding="utf-8")
            command = [self.python, str(self.script.resolve()), self.name, str(result), "--sections", section]
            done = subprocess.run(
                command + ["--quick"] * quick,
                cwd=folder,
                env={**ENVIRONMENTS.get((self.name, section), {}), **os.environ},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
            name = f"peer {self.name}, section {section} of {self.script.name},"
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            said = " | ".join(lines[-_SHOWN_LINES:]) or "it wrote nothing"
            if done.returncode:
                raise PeerError(f"{name} exit status {done.returncode}: {said}")
            try:
                found = json.loads(result.read_text(encoding="utf-8"))
                label = f"{self.name} {found.get('version', '')}".strip()
                rows = [_peer_row(label, row, turn) for row in found["rows"] if row["section"] == section]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise PeerError(f"{name} wrote no rows ({what}): {said}") from error
        if not rows:
            raise PeerError(f"{name} measured nothing: {said}")
        return rows


@dataclass(frozen=True, slots=True)
class MicroPeerComparison:
    """Our figure over the peer's. Ours is the mean of the runs before and after the peer's. Times are of
    one call at a time, on both sides. `ours` names the rows that were added up. `drift` is the distance
    between our two runs as a share of their mean: a ratio closer to 1 than that says nothing."""

    section: str
    size: int
    variant: str
    ours: tuple[str, ...]
    value: float
    drift: float
    peer: str
    case: str
    peer_value: float
    ratio: float | None


def parse_peers(given: Sequence[str], script: Path | None) -> list[Peer]:
    """Parses `NAME=PYTHON` for each peer; raises `ConfigError` for a peer that cannot be run."""
    if not given:
        return []
    if script is None:
        raise ConfigError(
            f"--peer needs the script that measures it: --peer-script FILE, or {SCRIPT_VARIABLE}"
        )
    if not script.is_file():
        raise ConfigError(f"there is no peer script {script}")
    peers = []
    for text in given:
        name, equals, python = text.partition("=")
        if not equals or not python:
            raise ConfigError(f"--peer {text!r}: write NAME=PYTHON, for example vllm=venv/bin/python")
        if name not in PEERS:
            raise ConfigError(f"--peer {text!r}: unknown peer {name!r}.{nearest(name, PEERS)}")
        found = shutil.which(Path(python).expanduser())
        if found is None:
            raise ConfigError(f"--peer {text!r}: there is no interpreter {python}")
        # Not resolved: a link to follow would leave the virtual environment.
        peers.append(Peer(name, os.path.abspath(found), script))  # noqa: PTH100
    return peers


def compare(rows: Iterable[MicroBenchRow], peer_rows: Iterable[MicroPeerRow]) -> list[MicroPeerComparison]:
    """Compares every row of a peer with each of our implementations at that size."""
    ours = {
        (row.case, row.size, row.variant, row.turn): row.timing.single if row.timing else row.value
        for row in rows
    }
    comparisons = []
    variants = dict.fromkeys(key[2] for key in ours)
    for peer, variant, (name, section, case, cases) in product(peer_rows, variants, COMPARABLE):
        same_peer = peer.peer.partition(" ")[0] == name and peer.section == section
        if not (same_peer and peer.case.startswith(case)):
            continue
        turns = [
            [ours.get((case, peer.size, variant, turn)) for case in cases]
            for turn in (peer.turn, peer.turn + 1)
        ]
        sums = [sum(value for value in turn if value is not None) for turn in turns if None not in turn]
        if not sums:
            continue
        mean = sum(sums) / len(sums)
        comparisons.append(
            MicroPeerComparison(
                section=section,
                size=peer.size,
                variant=variant,
                ours=cases,
                value=round(mean, 3),
                drift=round((max(sums) - min(sums)) / mean, 3) if mean else 0.0,
                peer=peer.peer,
                case=peer.case,
                peer_value=peer.value,
                ratio=round(mean / peer.value, 4) if peer.value else None,
            )
        )
    return comparisons


def _peer_row(label: str, row: Mapping[str, Any], turn: int) -> MicroPeerRow:
    """`impl` names one of several implementations of the same peer."""
    impl = f" {row['impl']}" if row.get("impl") else ""
    value = float(row.get("cpu50", row["p50"]))
    return MicroPeerRow(label + impl, row["section"], row["case"], int(row["size"]), value, turn)


class Comparable(NamedTuple):
    """Rows of `peer` whose case begins with `case` stand against the sum of `ours`."""

    peer: str
    section: str
    case: str
    ours: tuple[str, ...]


COMPARABLE = (
    Comparable("vllm", "a", "full_hit lookup only", _HIT),
    Comparable("vllm", "a", "full_hit Request(list)+hash+lookup", (*_FROM_LIST, *_HIT)),
    Comparable("vllm", "b", "miss lookup only", (prefix_cache.MISS,)),
    Comparable("vllm", "b", "miss Request(list)+hash+lookup", (*_FROM_LIST, prefix_cache.MISS)),
    Comparable("vllm", "b", "half hit lookup only", _HIT_OF_HALF),
    Comparable("vllm", "c", "insert: allocate_slots (alloc+register", (prefix_cache.INSERT,)),
    Comparable("vllm", "c", "insert: allocate_slots, every block evicts", (prefix_cache.INSERT_EVICTING,)),
    Comparable("vllm", "d", "alloc N blocks, half-full", _ALLOCATE),
    Comparable("vllm", "d", "free N blocks", _FREE),
    Comparable("vllm", "d", "alloc N blocks, all evict", (kv_pool.EVICT,)),
    Comparable("vllm", "d", "big pool", (kv_pool.EVICT_LARGE,)),
    Comparable("vllm", "e", "Scheduler schedule+update", (scheduler_ir.STEP,)),
    Comparable("vllm", "e", "AsyncScheduler schedule+update", (scheduler_ir.STEP,)),
    Comparable("lmdeploy", "e", "schedule+update", (scheduler_ir.STEP,)),
    Comparable("vllm", "f", "bytes/block rss: pool object", (memory.EMPTY,)),
    Comparable("vllm", "f", "bytes/block rss: cached metadata", (memory.CACHED,)),
    Comparable("vllm", "f", "bytes/block rss: total", (memory.TOTAL,)),
    Comparable("sglang", "a", "full_hit match_prefix (", (prefix_cache.ONE_EDGE,)),
    Comparable("sglang", "a", "full_hit list->", (*_FROM_LIST, prefix_cache.ONE_EDGE)),
    Comparable("sglang", "a", "full_hit match_prefix+gather", _HIT),
    Comparable("sglang", "a", "full_hit match_prefix, path", (prefix_cache.PATH,)),
    Comparable("sglang", "b", "miss match_prefix", (prefix_cache.MISS,)),
    Comparable("sglang", "b", "miss list->", (*_FROM_LIST, prefix_cache.MISS)),
    Comparable("sglang", "c", "alloc pages + insert", (prefix_cache.INSERT,)),
    Comparable("sglang", "d", "alloc N pages, half-full", _ALLOCATE),
    Comparable("sglang", "d", "free N pages", _FREE),
    Comparable("sglang", "d", "evict + alloc N pages", (kv_pool.EVICT,)),
    Comparable("sglang", "d", "big pool", (kv_pool.EVICT_LARGE,)),
    Comparable("sglang", "f", "bytes/block RSS, 2048-token", (memory.CACHED,)),
    Comparable("lmdeploy", "a", "full_hit BlockTrie.match", _HIT),
    Comparable("lmdeploy", "a", "full_hit add_sequence(list)+match", (*_FROM_LIST, *_HIT)),
    Comparable("lmdeploy", "b", "miss BlockTrie.match", (prefix_cache.MISS,)),
    Comparable("lmdeploy", "b", "miss add_sequence(list)", (*_FROM_LIST, prefix_cache.MISS)),
    Comparable("lmdeploy", "c", "insert: block_manager.allocate +", (prefix_cache.INSERT,)),
    Comparable("lmdeploy", "d", "alloc N blocks, half-full", _ALLOCATE),
    Comparable("lmdeploy", "d", "free N blocks", _FREE),
    Comparable("lmdeploy", "d", "trie.evict + alloc N blocks", (kv_pool.EVICT,)),
    Comparable("lmdeploy", "d", "big pool", (kv_pool.EVICT_LARGE,)),
    Comparable("lmdeploy", "f", "bytes/block rss: pool", (memory.EMPTY,)),
    Comparable("lmdeploy", "f", "bytes/block rss: cached metadata", (memory.CACHED,)),
)
