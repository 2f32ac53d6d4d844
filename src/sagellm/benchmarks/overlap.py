"""Counts what of traces and stored blocks could be reused in other positions.

An upper bound: it counts equal tokens, in a cache that forgets nothing. KV of equal tokens behind another
prefix is not equal, so to use it is an approximation (CacheBlend: Yao et al., EuroSys 2025).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from sagellm.benchmarks.reporting import Table
from sagellm.benchmarks.traces.record import Trace, block_size
from sagellm.core.errors import ConfigError
from sagellm.core.protocols.kv_tiers import StoredBlock
from sagellm.core.types import TOKEN_BYTES, Namespace, Tokens
from sagellm.kvmgr.prefix_cache.slices import SliceMatch, SliceRegistry

SLICE_TOKENS = (16, 64, 256, 1024)
USE_BUCKETS = (1, 4, 16)
"""Least numbers of reuses of a slice, for the table of how often."""


class OverlapText(NamedTuple):
    """A prompt, or a run of stored blocks that follow each other."""

    tokens: Tokens
    namespace: Namespace
    session: str | None = None


@dataclass(slots=True)
class SliceShare:
    """Tokens equal to earlier ones, without those of prefixes, in slices of one size.

    `in_session`, `in_namespace`, `anywhere`: where the earlier ones may be; a wider place includes the
    narrower. `moved`: those of `in_namespace` that were at another position. `by_reuses`: tokens of
    `in_namespace` by how often their slice is reused, as least numbers of `USE_BUCKETS`.
    """

    slice_tokens: int
    in_session: int = 0
    in_namespace: int = 0
    anywhere: int = 0
    moved: int = 0
    by_reuses: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Counts of all texts.

    `prefix_tokens`: those of leading blocks that an earlier text of the same namespace had, in blocks of
    `block_tokens`; 0 for stored blocks, which are kept once.
    """

    name: str
    texts: int
    sessions: int
    namespaces: int
    tokens: int
    block_tokens: int
    prefix_tokens: int
    shares: Sequence[SliceShare]


def trace_overlap(
    trace: Trace, slice_tokens: Sequence[int] = SLICE_TOKENS, block_tokens: int | None = None
) -> Overlap:
    """Counts for a trace whose ids are tokens; outputs do not count.

    Raises `ConfigError` for a trace of lengths, and for one of block ids: such an id stands for the whole
    prefix up to its block, so text that has moved has another id.
    """
    if trace.block_tokens > 1:
        raise ConfigError(
            f"trace {trace.name!r} ({trace.format}) cannot show reuse in other positions: an id stands for a "
            "block and all before it, so moved text has other ids; name a trace of texts or tokens"
        )
    if not any(len(request.ids) for request in trace.requests):
        raise ConfigError(
            f"trace {trace.name!r} ({trace.format}) has lengths only; name a trace of texts or tokens"
        )
    texts = [OverlapText(each.ids, each.namespace, each.session) for each in trace.requests]
    return _overlap(trace.name, texts, slice_tokens, block_size(trace, block_tokens), find_prefixes=True)


def stored_overlap(
    name: str, blocks: Iterable[StoredBlock], slice_tokens: Sequence[int] = SLICE_TOKENS
) -> Overlap:
    """Counts tokens that a disk tier holds a second time."""
    blocks = list(blocks)
    if not blocks:
        raise ConfigError(f"{name} holds no blocks")
    block_tokens = len(blocks[0].tokens) // TOKEN_BYTES
    return _overlap(name, list(stored_runs(blocks)), slice_tokens, block_tokens, find_prefixes=False)


def stored_runs(blocks: Sequence[StoredBlock]) -> Iterator[OverlapText]:
    """Yields runs of blocks that follow each other; each block is in one run.

    A run goes on with the block's first child, and ends without one. A block that is in two slots, as two
    requests that computed it at the same time leave it, counts once.
    """
    children: defaultdict[bytes, list[StoredBlock]] = defaultdict(list)
    known = {block.token_hash: block for block in blocks}
    starts = []
    for block in known.values():
        if block.parent in known:
            children[block.parent].append(block)
        else:
            starts.append(block)
    while starts:
        block = starts.pop()
        run = [block.tokens]
        while found := children.get(block.token_hash):
            block, *others = found
            run.append(block.tokens)
            starts += others
        yield OverlapText(Tokens.frombytes(b"".join(run)), block.namespace)


class _Place:
    """Prefixes and slices of earlier texts of a session, a namespace, or all."""

    def __init__(self, slice_tokens: Sequence[int]) -> None:
        self.registries = [SliceRegistry(size) for size in slice_tokens]
        self._paths: dict[tuple[int, bytes], int] = {}

    def prefix(self, data: bytes, block_bytes: int) -> int:
        """Bytes of leading blocks that were there before; the last may be partial. Adds the others."""
        found, above = 0, -1
        paths = self._paths
        num_before = len(paths)
        for start in range(0, len(data), block_bytes):
            piece = data[start : start + block_bytes]
            above = paths.setdefault((above, piece), len(paths))
            if above < num_before:
                found = start + len(piece)
        return found


def _overlap(
    name: str,
    texts: Sequence[OverlapText],
    slice_tokens: Sequence[int],
    block_tokens: int,
    *,
    find_prefixes: bool,
) -> Overlap:
    shares = [SliceShare(size) for size in slice_tokens]
    places: defaultdict[Hashable, _Place] = defaultdict(lambda: _Place(slice_tokens))
    reuses = [Counter[tuple[Namespace, int]]() for _ in slice_tokens]
    prefix_tokens = 0
    for text in texts:
        keys: dict[str, Hashable] = {"in_namespace": text.namespace, "anywhere": None}
        if text.session is not None:
            keys["in_session"] = (text.namespace, text.session)
        prefixes = dict.fromkeys(keys, 0)
        if find_prefixes:
            data, step = text.tokens.tobytes(), block_tokens * TOKEN_BYTES
            prefixes = {kind: places[key].prefix(data, step) // TOKEN_BYTES for kind, key in keys.items()}
        exact = prefixes["in_namespace"]
        prefix_tokens += exact
        for kind, key in keys.items():
            for share, registry, counter in zip(shares, places[key].registries, reuses, strict=True):
                matches = registry.observe(text.tokens, prefixes[kind])
                behind = max(0, prefixes[kind] - exact) + _tokens_behind(exact, matches, share.slice_tokens)
                setattr(share, kind, getattr(share, kind) + behind)
                if kind == "in_namespace":
                    counter.update((text.namespace, match.slice_id) for match in matches)
                    moved = sum(match.start != match.source_start for match in matches)
                    share.moved += moved * share.slice_tokens
    for share, counter in zip(shares, reuses, strict=True):
        share.by_reuses = _by_reuses(counter, share.slice_tokens)
    return Overlap(
        name=name,
        texts=len(texts),
        sessions=len({(text.namespace, text.session) for text in texts if text.session is not None}),
        namespaces=len({text.namespace for text in texts}),
        tokens=sum(len(text.tokens) for text in texts),
        block_tokens=block_tokens,
        prefix_tokens=prefix_tokens,
        shares=shares,
    )


def _tokens_behind(position: int, matches: Iterable[SliceMatch], size: int) -> int:
    return sum(min(size, max(0, match.start + size - position)) for match in matches)


def _by_reuses(reuses: Mapping[tuple[Namespace, int], int], size: int) -> dict[int, int]:
    tokens = dict.fromkeys(USE_BUCKETS, 0)
    for count in reuses.values():
        tokens[max(least for least in USE_BUCKETS if least <= count)] += count * size
    return tokens


def headline(overlap: Overlap) -> str:
    """Returns one line: what was read, and what a prefix cache finds of it."""
    counts = f"{overlap.name}: {overlap.texts:,} texts, {overlap.tokens:,} tokens"
    if not overlap.prefix_tokens:
        return counts
    share = _percent(overlap.prefix_tokens, overlap.tokens)
    return f"{counts}; {share} % in prefixes, of a cache that never evicts blocks of {overlap.block_tokens}"


def as_table(overlap: Overlap) -> Table:
    """Returns a line per slice size; figures are in %."""
    uses = [f"{least}-{more - 1}" for least, more in pairwise(USE_BUCKETS)]
    uses = [*uses, f"{USE_BUCKETS[-1]}+"]
    names = {"in_session": "same session %", "in_namespace": "same tenant %", "anywhere": "any tenant %"}
    if not overlap.sessions:
        del names["in_session"]
    if overlap.namespaces < 2:
        del names["anywhere"]
    columns = ["slice tokens", *names.values(), "of the rest %", "moved %"]
    columns += [f"reused {text}x %" for text in uses]
    rows = []
    for share in overlap.shares:
        cells = [_percent(getattr(share, name), overlap.tokens) for name in names]
        cells.append(_percent(share.in_namespace, overlap.tokens - overlap.prefix_tokens))
        total = sum(share.by_reuses.values())
        cells += [_percent(count, total) for count in (share.moved, *share.by_reuses.values())]
        rows.append((f"{share.slice_tokens:,}", *cells))
    title = "equal to earlier tokens, beyond prefixes" if overlap.prefix_tokens else "held more than once"
    return Table(title, columns, rows, num_names=1)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
