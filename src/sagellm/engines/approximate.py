"""`ApproximateReuse`: KV of equal text at other positions, for requests that ask for it.

Of each text that an earlier prompt of the tenant had too, the first tokens are computed again and the KV of
the others is copied, with keys rotated to the new position. This is position-independent caching as in EPIC
(Hu et al. 2024, arXiv:2410.15332). Copied KV has seen another context, so answers may differ from exact ones;
`docs/log/2026-11-26-overlap.md` has figures. KV of such a request from its first copied token on never enters
the prefix index or a tier (`RequestBlocks.num_exact`), so no other request sees it.

    commit    a prompt computed exactly is observed: slices of it that earlier prompts lacked are registered
    plan      an admitted request that asks: runs of known slices behind its prefix hit, the first chunk cut
    seal      the request gets a limit, the start of its first run (`RequestTable.limit`)
    advance   between steps: KV of the run is copied, and the limit moves to the next run
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sagellm.core.blocks import cdiv
from sagellm.core.errors import BookkeepingError, CapacityError
from sagellm.core.plan import Chunk, RequestState
from sagellm.core.protocols.engine import TokenCopies
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.types import Namespace, Tokens
from sagellm.engines.request_table import RequestTable
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.prefix_cache.slices import SliceRegistry

log = logging.getLogger("sagellm.engine")
MAX_RUNS = 16
"""Runs of a request: each takes a step and a look-up of its source. The longest are taken."""
MAX_SOURCE_TOKENS = 1 << 22
MAX_NAMESPACES = 256


@dataclass(slots=True, eq=False)
class _Source:
    """A prompt whose KV was computed exactly. `tokens` is None once it is forgotten."""

    namespace: Namespace
    tokens: Tokens | None


class _Run(NamedTuple):
    """Tokens `[start, stop)` of a prompt are those of a source from `source_start` on."""

    start: int
    stop: int
    source: _Source
    source_start: int

    @property
    def source_stop(self) -> int:
        return self.source_start + self.stop - self.start

    def without_first(self, num_tokens: int) -> _Run:
        return self._replace(start=self.start + num_tokens, source_start=self.source_start + num_tokens)


@dataclass(slots=True)
class _Reuse:
    """The runs of a running request that are still to be copied, in order."""

    runs: deque[_Run]
    num_copied: int = 0


class ApproximateReuse:
    """Owns what is known of earlier prompts, and the runs of later ones.

    A text is found from twice `recompute_tokens` tokens on; of each run the first `recompute_tokens` are
    computed. From its first request that asks on, a tenant's prompts are observed, in the namespaces of the
    prefix index: `MAX_SOURCE_TOKENS` tokens and `MAX_NAMESPACES` namespaces, those used last. `num_tokens`:
    copied so far.
    """

    def __init__(
        self, table: RequestTable, kv: KVCacheManager, copies: TokenCopies, recompute_tokens: int
    ) -> None:
        self._table, self._kv, self._copies = table, kv, copies
        self._num_again, self._size = recompute_tokens, 2 * recompute_tokens
        self._registries: OrderedDict[Namespace, SliceRegistry] = OrderedDict()  # used longest ago first
        self._sources: OrderedDict[_Source, None] = OrderedDict()  # the same
        self._num_source_tokens = 0
        self._found: dict[RequestState, tuple[int, list[_Run]]] = {}
        self._running: dict[RequestState, _Reuse] = {}
        self.num_tokens = 0

    # -- what is known of earlier prompts

    def observe(self, chunks: Iterable[Chunk]) -> None:
        """These chunks were committed; prompts that are whole now become sources.

        Those that are exact, of tenants that have asked.
        """
        for chunk in chunks:
            state, stop = chunk.state, chunk.state.num_prompt_tokens
            if not chunk.start < stop <= chunk.end or state.num_approximate:
                continue
            namespace = self._kv.namespace_of(state.request.namespace)
            registry = self._registries.get(namespace)
            stop -= stop % self._kv.block_size
            if registry is None or stop < self._size:
                continue
            tokens = Tokens(state.tokens.slice(0, stop))
            source = _Source(namespace, tokens)
            for match in registry.observe(tokens, source=source):
                if match.source in self._sources:
                    self._sources.move_to_end(match.source)  # type: ignore[arg-type]
            self._sources[source] = None
            self._num_source_tokens += len(tokens)
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self._num_source_tokens > MAX_SOURCE_TOKENS:
            source, _ = self._sources.popitem(last=False)
            self._num_source_tokens -= len(source.tokens or ())
            source.tokens = None
        most = MAX_SOURCE_TOKENS // self._size
        while len(self._registries) > 1 and (
            len(self._registries) > MAX_NAMESPACES or sum(map(len, self._registries.values())) > most
        ):
            self._registries.popitem(last=False)

    def _registry_of(self, namespace: Namespace) -> SliceRegistry:
        if namespace not in self._registries:
            self._registries[namespace] = SliceRegistry(self._size, max(1, MAX_SOURCE_TOKENS // self._size))
        self._registries.move_to_end(namespace)
        return self._registries[namespace]

    # -- runs of a request

    def plan(self, chunk: Chunk) -> None:
        """Cut the chunk of an admitted request that asks before its first run.

        A request of a group is exact, since the group shares its KV; so is one whose prompt is scored.
        """
        state = chunk.state
        if not state.request.approximate_reuse or state.request.group is not None:
            return
        if state.request.params.prompt_logprobs is not None or state.compute_until is not None:
            self.forget(state)
            return
        if self._found.get(state, (None, []))[0] != chunk.start:
            self._found[state] = chunk.start, self._runs_of(state, chunk.start)
        runs = self._found[state][1]
        if runs:
            chunk.num_tokens = min(chunk.num_tokens, runs[0].start - chunk.start)

    def admitted(self, chunk: Chunk) -> None:
        """The request runs; it computes up to its first run."""
        self._running.pop(chunk.state, None)
        start, runs = self._found.pop(chunk.state, (None, []))
        if runs and start == chunk.start:
            self._running[chunk.state] = _Reuse(deque(runs))
            self._table.limit(chunk.state, runs[0].start)

    def forget(self, state: RequestState) -> None:
        """The request has left the batch, or the queue."""
        self._found.pop(state, None)
        self._running.pop(state, None)

    def _runs_of(self, state: RequestState, start: int) -> list[_Run]:
        """The runs behind token `start` that can be copied, in order.

        Slices whose KV is gone are forgotten. They may have hidden others, so then the prompt is searched a
        second time.
        """
        registry = self._registry_of(self._kv.namespace_of(state.request.namespace))
        num_known = len(registry)
        runs = self._resident_runs(registry, state, start)
        return runs if len(registry) == num_known else self._resident_runs(registry, state, start)

    def _resident_runs(self, registry: SliceRegistry, state: RequestState, start: int) -> list[_Run]:
        longest = sorted(self._matches(registry, state, start), key=lambda run: run.start - run.stop)
        num_covered: dict[_Source, int] = {}
        runs = []
        for run in longest[:MAX_RUNS]:
            if run.source not in num_covered:
                num_covered[run.source] = self._hit(run.source).num_tokens
            stop = run.start + num_covered[run.source] - run.source_start
            for at in range(run.start, run.stop, self._size):
                if at + self._size > stop:
                    registry.forget(state.tokens, at)
            stop = min(stop, run.stop, state.max_reusable)
            if stop - run.start >= self._size:
                runs.append(run._replace(stop=stop).without_first(self._num_again))
        return sorted(runs, key=lambda run: run.start)

    def _matches(self, registry: SliceRegistry, state: RequestState, start: int) -> Iterator[_Run]:
        """Runs of matches that follow each other in their source, too."""
        run: _Run | None = None
        for at, source_start, _, source in registry.find(state.tokens, start):
            assert isinstance(source, _Source)
            if run is not None:
                if (run.source, run.stop, run.source_stop) == (source, at, source_start):
                    run = run._replace(stop=at + self._size)
                    continue
                yield run
            run = _Run(at, at + self._size, source, source_start)
        if run is not None:
            yield run

    def _hit(self, source: _Source, max_tokens: int | None = None) -> PrefixHit:
        """What the device has of a source now."""
        return self._kv.index.lookup(source.tokens or Tokens(), source.namespace, max_tokens)

    # -- between steps

    @property
    def is_ready(self) -> bool:
        """Whether a request has computed all before its next run."""
        return any(
            state.num_computed == reuse.runs[0].start == state.compute_until
            for state, reuse in self._running.items()
        )

    def advance(self) -> None:
        """Copy the KV of the next runs. No step is in flight."""
        for state, reuse in list(self._running.items()):
            if state.compute_until != reuse.runs[0].start:  # its admission was undone
                del self._running[state]
            elif state.num_computed == state.compute_until:
                run = reuse.runs.popleft()
                if self._copy(state, run):
                    num_tokens = run.stop - run.start
                    self._table.advance(state, num_tokens)
                    reuse.num_copied += num_tokens
                    self.num_tokens += num_tokens
                    state.num_approximate = max(state.num_approximate, reuse.num_copied)
                self._table.limit(state, reuse.runs[0].start if reuse.runs else None)
                if not reuse.runs:
                    del self._running[state]

    def _copy(self, state: RequestState, run: _Run) -> bool:
        """Copy the KV of a run; returns whether that was possible.

        It is not where the KV is gone or there is no room. A copy that fails is logged.
        """
        kv, size = self._kv, self._kv.block_size
        hit = self._hit(run.source, cdiv(run.source_stop, size) * size)
        if hit.num_tokens < run.source_stop:
            return False
        hit = kv.index.pin(hit)
        try:
            kv.append_filled(state, run.stop)
            sources = _slots(kv.index.block_ids(hit), run.source_start, run.source_stop, size)
            targets = _slots(kv.block_table(state.request_id), run.start, run.stop, size)
            self._copies.copy(sources, targets, run.start - run.source_start)
        except CapacityError:
            return False
        except BookkeepingError:
            raise
        except Exception:
            log.exception("KV of %s was not copied: its tokens are computed", state.request_id)
            return False
        finally:
            kv.index.unpin(hit)
        return True

    def check(self) -> None:
        """Raise `BookkeepingError` where requests, limits and sources do not add up."""
        for state, reuse in self._running.items():
            limited = state.compute_until in (None, reuse.runs[0].start)
            if not limited or any(run.stop > state.max_reusable for run in reuse.runs):
                raise BookkeepingError(
                    f"{state.request_id} stops at {state.compute_until}, not at its next run"
                )
        num_tokens = sum(len(source.tokens or ()) for source in self._sources)
        if num_tokens != self._num_source_tokens or num_tokens > MAX_SOURCE_TOKENS:
            raise BookkeepingError(f"{num_tokens} tokens of sources, {self._num_source_tokens} are counted")
        for registry in self._registries.values():
            registry.check()


def _slots(block_ids: Sequence[int], start: int, stop: int, size: int) -> list[int]:
    """The slots of these positions: block id x block size + offset."""
    return [block_ids[at // size] * size + at % size for at in range(start, stop)]
