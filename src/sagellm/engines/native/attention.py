"""Attention of one step over the paged KV cache.

A step's flat batch is decode rows, longest context first, then prefill chunks. `AttentionPlanner` decides
what to read once per step and distinct window; every layer with that window uses the plan.

* decode: rows of similar length form a group. Their blocks are gathered into [rows, tokens, kv_heads,
  head_dim]. The query heads that share a KV head are packed as query rows, so K and V are read once per KV
  head. What a group gathers stays in cache; a single row whose blocks are consecutive is read in place.
* prefill, and rows with a chain of proposed tokens: one sequence at a time, in tiles of queries, so that keys
  which the causal mask or the window hides from a whole tile are never touched. A chunk from position 0 uses
  the fresh K and V and reads no cache.

A kernel (`core/protocols/fusion.py`) takes the decode rows by rule, since torch's gather reads and writes the
context once more. It takes chunks where a measurement at start shows that it is faster
(`kernel_wins_prefill`). It reads K and V where they lie, all sequences in one call.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from sagellm.core.blocks import cdiv
from sagellm.core.protocols.fusion import FusedKernel, Scores
from sagellm.core.types import AttentionChunk, Window
from sagellm.engines.native.kv_cache import PagedKV
from sagellm.engines.native.measure import MARGIN, Decide, alone, in_turns, recorded, torch_threads
from sagellm.engines.native.memory import to_device

QUERY_TILE = 256
GROUP_BYTES = 4 << 20
_MIN_FILL = 0.75
_THREADED_SCORES = 1 << 16
"""Scores of a head from which on torch computes a chunk by several threads: milliseconds."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence: flat rows `[first_row, first_row + num_tokens)`. They are tokens
    `[start, start + num_tokens)` of those that have KV; `block_ids` is the sequence's block table up to its
    end. `num_dropped`: tokens before them that have none any more, so that positions are by so much higher.
    """

    first_row: int
    num_tokens: int
    start: int
    block_ids: Sequence[int]
    num_dropped: int = 0

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def positions(self) -> range:
        return range(self.start + self.num_dropped, self.end + self.num_dropped)

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_tokens)

    def one_by_one(self) -> list[Span]:
        """Spans of its tokens, one each."""
        return [
            replace(self, first_row=self.first_row + i, num_tokens=1, start=self.start + i)
            for i in range(self.num_tokens)
        ]

    def in_chunks(self, size: int, block_size: int) -> Iterator[Span]:
        """Its tokens by chunks of the sequence, each a sequence of its own.

        A block table begins with the chunk.
        """
        at = self.start
        while at < self.end:
            first = at - at % size
            stop = min(self.end, first + size)
            blocks = self.block_ids[first // block_size : cdiv(stop, block_size)]
            yield Span(self.first_row + at - self.start, stop - at, at - first, blocks)
            at = stop


@dataclass(frozen=True, slots=True)
class BlockRead:
    """`num_seqs` x `num_blocks` blocks: a gather by `ids`, or a view from `first` on."""

    num_seqs: int
    num_blocks: int
    first: int
    ids: torch.Tensor | None

    def of(self, pool: torch.Tensor) -> torch.Tensor:
        """These blocks of one layer's K or V pool: [num_seqs, tokens, kv_heads, head_dim]."""
        if self.ids is None:
            blocks = pool[self.first : self.first + self.num_blocks]
        else:
            # As rows of one long vector per block: three times faster than indexing the 4-D pool. Where other
            # layers lie in between, that would be a copy.
            rows = pool.flatten(1) if pool.is_contiguous() else pool
            blocks = rows.index_select(0, self.ids)
        return blocks.view(self.num_seqs, self.num_blocks * pool.shape[1], *pool.shape[2:])


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Flat rows `[first_row, stop_row)` with one query each. `mask` is [rows, 1, 1, tokens]. It is None for a
    single row, whose keys are `[key_start, key_stop)` of the read.
    """

    first_row: int
    stop_row: int
    read: BlockRead
    key_start: int
    key_stop: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `[first_row, stop_row)` over keys `[key_start, key_stop)` of the span's read."""

    first_row: int
    stop_row: int
    key_start: int
    key_stop: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A prefill chunk. `read` is None if its own fresh K and V suffice. A `kernel` needs no tiles. Torch has
    `threads`; None: as many as it has.
    """

    span: Span
    read: BlockRead | None
    tiles: tuple[Tile, ...]
    kernel: FusedKernel | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Spans that a kernel computes: the first `num_rows` rows of the flat batch. `spans` is int64 [n, 4]:
    first row, tokens, start, first entry. `tables` is int32, the block ids of all spans. The first
    `decode_rows` rows are in decode.
    """

    kernel: FusedKernel
    spans: torch.Tensor
    tables: torch.Tensor
    window: int | None
    num_rows: int
    decode_rows: int

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores | None = None
    ) -> torch.Tensor:
        """[T, heads, value_dim] over one layer's pools; rows of other spans are undefined."""
        own = query[: self.num_rows]
        answer: torch.Tensor = self.kernel.apply(
            own, keys, values, self.spans, self.tables, self.window, scores, self.decode_rows
        )
        if len(own) == len(query):
            return answer
        output = query.new_empty(*query.shape[:2], values.shape[3])
        output[: len(own)] = answer
        return output


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's attention in layers with one window: a kernel call, then torch. Of latent attention, chunks in
    expanded form are in `expanded`, and all else is in absorbed form.
    """

    kernel: KernelCall | None
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillPlan, ...]
    expanded: tuple[PrefillPlan, ...] = ()
    num_absorbed: int | None = None
    """Rows outside `expanded` are among the first so many; None: all rows."""
    branches: BranchesPlan | None = None


@dataclass(frozen=True, slots=True)
class BranchesPlan:
    """The attention by slot of some flat `rows`: the further branches of trees. `plan` counts from 0."""

    plan: AttentionPlan
    rows: slice


class AttentionPlanner:
    """Makes a step's `AttentionPlan`s; keeps the causal masks that tiles share. `kernel` takes the decode
    rows and, with `chunks`, the prefill chunks; torch computes the rest. With `plain_scores` every tile has a
    mask: torch's own attention, which can do without, knows neither capped scores nor sinks. Chunks of which
    `expands` is true are planned in expanded form. Torch has `chunk_threads` for long chunks; None: as many
    as it has.
    """

    def __init__(
        self, kv: PagedKV, kernel: FusedKernel | None = None, *, chunks: bool = True,
        plain_scores: bool = True, expands: Callable[[Span], bool] | None = None,
        chunk_threads: int | None = None,
    ) -> None:  # fmt: skip
        self._expands, self._chunk_threads = expands, chunk_threads
        self.kernel, self._chunks, self._plain_scores = kernel, chunks, plain_scores
        pool, self._kv = kv.keys[0], kv
        self._block_size = kv.block_size
        self._device, self._dtype = pool.device, pool.dtype
        bytes_per_token = (2 if kv.value_dim is None else 1) * pool[0, 0].numel() * pool.element_size()
        self._group_tokens = max(1, GROUP_BYTES // bytes_per_token)
        self._masks: dict[int | None, torch.Tensor] = {}

    @cached_property
    def _by_slot(self) -> AttentionPlanner:
        """A planner for sequences whose blocks are slots."""
        return AttentionPlanner(
            self._kv.by_slot, self.kernel, plain_scores=self._plain_scores, chunk_threads=self._chunk_threads
        )

    @property
    def reads_padding(self) -> bool:
        """Whether attention reads behind a sequence's last token, which must then be finite."""
        return self.kernel is None

    @property
    def all_by_kernel(self) -> bool:
        """Whether the kernel computes all attention."""
        return self.kernel is not None and self._chunks

    def plan(
        self, decode: Sequence[Span], chains: Sequence[Span], prefill: Sequence[Span], window: Window | None,
        branches: Sequence[Span] = (),
    ) -> AttentionPlan:  # fmt: skip
        """Plan `decode` spans, one token each and longest first, then `chains`, then `prefill` spans.

        A kernel takes chains by rule, as decode rows: they are short, and their context is long. Branches
        of trees, whose blocks are slots, come between chains and prefill.
        """
        if branches:
            plan = self.plan(decode, chains, prefill, window)
            first, stop = branches[0].first_row, branches[-1].rows.stop
            own = [replace(span, first_row=span.first_row - first) for span in branches]
            if plan.num_absorbed is not None:
                plan = replace(plan, num_absorbed=max(plan.num_absorbed, stop))
            by_slot = self._by_slot.plan((), own, (), window)
            return replace(plan, branches=BranchesPlan(by_slot, slice(first, stop)))
        if isinstance(window, AttentionChunk):
            cut = partial(self._in_chunks, window.size)
            return self.plan(cut(decode), cut(chains), cut(prefill), None)
        call, num_absorbed = None, None
        expanded: tuple[PrefillPlan, ...] = ()
        if self._expands is not None and prefill:
            expanded = tuple(self._expanded(span) for span in prefill if self._expands(span))
            prefill = [span for span in prefill if not self._expands(span)]
            num_absorbed = max((span.rows.stop for span in (*decode, *chains, *prefill)), default=0)
        taken = [*decode, *chains, *prefill] if self._chunks else [*decode, *chains]
        if self.kernel is not None and taken:
            decode_rows = sum(span.num_tokens for span in (*decode, *chains))
            call = _kernel_call(self.kernel, taken, window, self._device, decode_rows)
            decode, chains, prefill = (), (), () if self._chunks else prefill
        lengths = [min(span.end, window or span.end) for span in decode]
        groups = tuple(
            self._group(decode[start:stop], window) for start, stop in group_rows(lengths, self._group_tokens)
        )
        chunks = tuple(self._threaded(self._chunk(span, window)) for span in (*chains, *prefill))
        return AttentionPlan(call, groups, chunks, expanded, num_absorbed)

    def _in_chunks(self, size: int, spans: Sequence[Span]) -> list[Span]:
        return [part for span in spans for part in span.in_chunks(size, self._block_size)]

    def _expanded(self, span: Span) -> PrefillPlan:
        if not self.all_by_kernel:
            return self._threaded(self._chunk(span, None))
        read = self._read([span.block_ids[: cdiv(span.end, self._block_size)]]) if span.start else None
        return PrefillPlan(span, read, (), self.kernel)

    def _threaded(self, chunk: PrefillPlan) -> PrefillPlan:
        """`chunk` on several threads, if it is long.

        In a short one they would wait for each other.
        """
        if self._chunk_threads is None or chunk.span.num_tokens * chunk.span.end < _THREADED_SCORES:
            return chunk
        return replace(chunk, threads=self._chunk_threads)

    def _group(self, spans: Sequence[Span], window: int | None) -> DecodeGroup:
        bs = self._block_size
        starts = [max(0, span.end - window) if window else 0 for span in spans]
        firsts = [start // bs for start in starts]
        tables = [
            span.block_ids[first : cdiv(span.end, bs)] for span, first in zip(spans, firsts, strict=True)
        ]
        key_starts = [start - first * bs for start, first in zip(starts, firsts, strict=True)]
        key_stops = [span.end - first * bs for span, first in zip(spans, firsts, strict=True)]
        read = self._read(tables)
        rows = (spans[0].first_row, spans[0].first_row + len(spans))
        if len(spans) == 1:
            return DecodeGroup(*rows, read, key_starts[0], key_stops[0], None)
        num_keys = read.num_blocks * bs
        return DecodeGroup(*rows, read, 0, num_keys, self._length_mask(key_starts, key_stops, num_keys))

    def _read(self, tables: Sequence[Sequence[int]]) -> BlockRead:
        """Read the blocks of some tables; shorter ones are padded with their last block."""
        longest = max(map(len, tables))
        first = tables[0][0]
        if len(tables) == 1 and list(tables[0]) == list(range(first, first + longest)):
            return BlockRead(1, longest, first, None)
        ids = [block for table in tables for block in (*table, *[table[-1]] * (longest - len(table)))]
        return BlockRead(len(tables), longest, 0, torch.tensor(ids, device=self._device))

    def _length_mask(self, starts: Sequence[int], stops: Sequence[int], num_keys: int) -> torch.Tensor:
        key = torch.arange(num_keys, device=self._device)
        low = torch.tensor(starts, device=self._device)[:, None]
        high = torch.tensor(stops, device=self._device)[:, None]
        return self._mask((key < low) | (key >= high))[:, None, None]

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _chunk(self, span: Span, window: int | None) -> PrefillPlan:
        bs = self._block_size
        if span.start == 0:
            if self._plain_scores and (window is None or span.num_tokens <= window):
                tile = Tile(span.first_row, span.first_row + span.num_tokens, 0, span.num_tokens, None)
                return PrefillPlan(span, None, (tile,))
            return PrefillPlan(span, None, self._tiles(span, 0, window))
        first_block = max(0, span.start + 1 - window) // bs if window else 0
        read = self._read([span.block_ids[first_block : cdiv(span.end, bs)]])
        return PrefillPlan(span, read, self._tiles(span, first_block * bs, window))

    def _tiles(self, span: Span, origin: int, window: int | None) -> tuple[Tile, ...]:
        """Tiles of `span`, whose keys are counted from position `origin`."""
        mask = self._causal_mask(span.end - origin, window)
        tiles = []
        for first in range(0, span.num_tokens, QUERY_TILE):
            stop = min(first + QUERY_TILE, span.num_tokens)
            key_stop = span.start + stop - origin
            key_start = max(0, span.start + first + 1 - window - origin) if window else 0
            part = mask[QUERY_TILE - (stop - first) :, mask.shape[1] - (key_stop - key_start) :]
            tiles.append(Tile(span.first_row + first, span.first_row + stop, key_start, key_stop, part))
        return tuple(tiles)

    def _causal_mask(self, num_keys: int, window: int | None) -> torch.Tensor:
        """[QUERY_TILE, n >= num_keys]: its last row is the query at the last key. Every tile is a view of the
        lower right corner: what a query sees depends on the distance to the last key alone.
        """
        known = self._masks.get(window)
        if known is None or known.shape[1] < num_keys:
            columns = max(QUERY_TILE, 1 << (num_keys - 1).bit_length())
            query = torch.arange(columns - QUERY_TILE, columns, device=self._device)[:, None]
            key = torch.arange(columns, device=self._device)
            hidden = key > query if window is None else (key > query) | (key <= query - window)
            known = self._masks[window] = self._mask(hidden)
        return known


def _kernel_call(
    kernel: FusedKernel, spans: Sequence[Span], window: int | None, device: torch.device, decode_rows: int
) -> KernelCall:
    tables, rows = array("i"), []
    for span in spans:
        rows.append((span.first_row, span.num_tokens, span.start, len(tables)))
        tables.extend(span.block_ids)
    ids = torch.frombuffer(tables, dtype=torch.int32)
    num_rows = spans[-1].first_row + spans[-1].num_tokens
    starts = to_device(torch.tensor(rows), device)
    return KernelCall(kernel, starts, to_device(ids, device), window, num_rows, decode_rows)


def group_rows(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut rows into `[start, stop)` groups, padded to their longest row. A group reads at most `max_tokens`
    (a longer row stands alone), and each row has at least 3/4 of the longest one's length.
    """
    groups: list[tuple[int, int]] = []
    start, shortest, longest = 0, *[next(iter(lengths), 0)] * 2
    for i, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if i > start and ((i + 1 - start) * longest > max_tokens or shortest < _MIN_FILL * longest):
            groups.append((start, i))
            start, shortest, longest = i, length, length
    return [*groups, (start, len(lengths))] if lengths else []


def attend(
    plan: AttentionPlan, kv: PagedKV, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    scores: Scores | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention output [T, heads, value_dim] after the new K and V are written. `query` is [T, heads,
    head_dim]; `key` and `value` [T, kv_heads, head_dim] are the new ones. Scores are scaled by
    1/sqrt(head_dim), or made as `scores` says; one that is not only scaled needs a plan without
    `plain_scores`.
    """
    if kv.on_layer is not None:
        kv.on_layer(layer + 1)
    if plan.kernel is not None:
        output = plan.kernel(query, kv.keys[layer], kv.values[layer], scores)
    else:
        output = query.new_empty(*query.shape[:2], value.shape[2])
    for group in plan.decode:
        _attend_group(group, kv.keys[layer], kv.values[layer], query, output, scores)
    for chunk in plan.prefill:
        if chunk.read is None:
            keys, values = key[chunk.span.rows], value[chunk.span.rows]
        else:
            keys, values = chunk.read.of(kv.keys[layer])[0], chunk.read.of(kv.values[layer])[0]
        with nullcontext() if chunk.threads is None else torch_threads(chunk.threads):
            for tile in chunk.tiles:
                _attend_tile(tile, keys, values, query, output, scores)
    if plan.branches is not None:
        rows, by_slot = plan.branches.rows, plan.branches.plan
        output[rows] = attend(by_slot, kv.by_slot, layer, query[rows], key[rows], value[rows], scores)
    return output


def attend_chunk(
    chunk: PrefillPlan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores | None
) -> torch.Tensor:
    """Attention output of a chunk in expanded form. `query` [T, heads, head_dim] are its rows; `keys` and
    `values` [L, heads, dims] begin at the sequence's first position.
    """
    span = chunk.span
    if chunk.kernel is not None:  # the sequence is one block
        spans = to_device(torch.tensor([(0, span.num_tokens, span.start, 0)]), query.device)
        tables = torch.zeros(1, dtype=torch.int32, device=query.device)
        mixed: torch.Tensor = chunk.kernel.apply(query, keys[None], values[None], spans, tables, None, scores)
        return mixed
    output = query.new_empty(*query.shape[:2], values.shape[2])
    with nullcontext() if chunk.threads is None else torch_threads(chunk.threads):
        for tile in chunk.tiles:
            first, stop = tile.first_row - span.first_row, tile.stop_row - span.first_row
            _attend_tile(replace(tile, first_row=first, stop_row=stop), keys, values, query, output, scores)
    return output


def _attend_group(
    group: DecodeGroup, key_pool: torch.Tensor, value_pool: torch.Tensor, query: torch.Tensor,
    output: torch.Tensor, scores: Scores | None,
) -> None:  # fmt: skip
    keys = group.read.of(key_pool)[:, group.key_start : group.key_stop].transpose(1, 2)
    values = group.read.of(value_pool)[:, group.key_start : group.key_stop].transpose(1, 2)
    rows = slice(group.first_row, group.stop_row)
    packed = query[rows].view(len(keys), keys.shape[1], -1, query.shape[2])
    if scores is not None and not scores.is_scaled_only:
        output[rows] = _with_scores(query[rows][:, :, None], keys, values, group.mask, scores)[:, :, 0]
        return
    scale = None if scores is None else scores.scale
    answer = scaled_dot_product_attention(packed, keys, values, attn_mask=group.mask, scale=scale)
    output[rows].view(answer.shape).copy_(answer)


def _attend_tile(
    tile: Tile, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, output: torch.Tensor,
    scores: Scores | None,
) -> None:  # fmt: skip
    rows, span = slice(tile.first_row, tile.stop_row), slice(tile.key_start, tile.key_stop)
    q, k, v = (part.transpose(0, 1)[None] for part in (query[rows], keys[span], values[span]))
    if scores is not None and not scores.is_scaled_only:
        assert tile.mask is not None, "planned for plain scores"
        answer = _with_scores(q, k, v, tile.mask, scores)
    else:
        answer = scaled_dot_product_attention(
            q, k, v, attn_mask=tile.mask, is_causal=tile.mask is None,
            scale=None if scores is None else scores.scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )  # fmt: skip
    output[rows].copy_(answer[0].transpose(0, 1))


def _with_scores(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Attention of `query` [n, heads, T, head_dim] by separate operators. `keys` and `values` are [n,
    kv_heads, L, head_dim]. Softmax is in float32 at least. The query heads of a KV head are rows of one
    matrix.
    """
    num_seqs, heads, tokens, _ = query.shape
    packed = query.reshape(num_seqs, keys.shape[1], -1, query.shape[3])
    logits = (packed @ keys.mT).view(num_seqs, heads, tokens, -1) * scores.scale
    if scores.softcap is not None:
        logits = (logits / scores.softcap).tanh_() * scores.softcap
    if mask is not None:
        logits += mask
    dtype = torch.promote_types(query.dtype, torch.float32)
    if scores.sinks is None:
        weights = logits.softmax(-1, dtype=dtype)
    else:
        sinks = scores.sinks.to(dtype).view(1, heads, 1, 1).expand(num_seqs, heads, tokens, 1)
        weights = torch.cat([logits, sinks], dim=-1).softmax(-1, dtype=dtype)[..., :-1]
    mixed = weights.to(values.dtype).reshape(num_seqs, keys.shape[1], -1, keys.shape[2]) @ values
    return mixed.view(num_seqs, heads, tokens, -1)


CONTEXT, CHUNK, _ROUNDS = 384, 128, 7


def attention_planner(
    kv: PagedKV, num_heads: int, kernel: FusedKernel | None, measured: FusedKernel | None,
    scores: Scores | None = None, expands: Callable[[Span], bool] | None = None,
    chunk_threads: int | None = None, decide: Decide = alone,
) -> AttentionPlanner:  # fmt: skip
    """A planner with `kernel` where the kernel supports the pool and `scores`, and pays. `measured` is the
    same kernel on one thread; `scores` are those of any layer. Of several ranks `decide` has the first say
    whether the kernel takes chunks. For the rest see `AttentionPlanner`.
    """
    plain = scores is None or scores.is_scaled_only
    planner = partial(AttentionPlanner, kv, plain_scores=plain, expands=expands, chunk_threads=chunk_threads)
    usable = kernel if kernel is not None and _serves(kernel, kv, num_heads, scores) else None
    chunks = decide(
        lambda: bool(usable and measured and kernel_wins_prefill(measured, kv, num_heads, scores))
    )
    return planner(usable, chunks=usable is None or bool(chunks))


def _serves(kernel: FusedKernel, kv: PagedKV, num_heads: int, scores: Scores | None) -> bool:
    """Whether the kernel supports the pools of all layers."""
    for keys, values in zip(kv.keys, kv.values, strict=True):
        query = keys.new_ones(1, num_heads, keys.shape[3])
        spans, tables = query.new_zeros(0, 4, dtype=torch.int64), query.new_zeros(0, dtype=torch.int32)
        if not kernel.supports(query, keys, values, spans, tables, None, scores).usable:
            return False
    return True


def kernel_wins_prefill(
    kernel: FusedKernel, kv: PagedKV, num_heads: int, scores: Scores | None = None
) -> bool:
    """Whether `kernel` computes prefill chunks behind a context faster than torch, by `MARGIN`. Torch may win
    where it has bfloat16 instructions, or on a GPU a kernel of its own. The times are recorded.
    """
    pool = kv.keys[0]
    shape = (num_heads, *pool.shape[1:], kv.value_dim)
    kind = None if scores is None else (scores.scale, scores.softcap, scores.sinks is not None)
    case = f"attention of {CHUNK} tokens behind {CONTEXT} in {pool.dtype}, {shape}, {kind}"
    measure = partial(_time_prefill, kernel, kv, num_heads, scores)
    by_torch, by_kernel = recorded(case, getattr(kernel, "build", ""), measure)
    return by_kernel * MARGIN < by_torch


def _time_prefill(
    kernel: FusedKernel, kv: PagedKV, num_heads: int, scores: Scores | None
) -> tuple[float, float]:
    """Seconds of torch and of the kernel."""
    pool = kv.keys[0]
    _, block_size, kv_heads, head_dim = pool.shape
    num_blocks = cdiv(CONTEXT + CHUNK, block_size)
    small = PagedKV(
        1, num_blocks, block_size, kv_heads, head_dim, pool.device, pool.dtype, value_dim=kv.value_dim
    )
    for written in (*small.keys, *small.values):
        written.fill_(1.0)  # untouched memory reads too fast
    span = Span(0, CHUNK, CONTEXT, range(small.num_blocks))
    query, key = pool.new_ones(CHUNK, num_heads, head_dim), pool.new_ones(CHUNK, kv_heads, head_dim)
    value = key[..., : kv.value_dim]
    planners = AttentionPlanner(small), AttentionPlanner(small, kernel)
    plans = [planner.plan([], [], [span], None) for planner in planners]
    runs = [partial(attend, plan, small, 0, query, key, value, scores) for plan in plans]
    with torch_threads(1):
        by_torch, by_kernel = in_turns(query.device, runs, _ROUNDS)
    return by_torch, by_kernel
