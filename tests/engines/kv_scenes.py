"""Scenes for tests of what stays in the cache: sessions, a small engine, who is preempted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from sagellm.core.kv_hints import KVHintAction, KVHintsEnvelope
from sagellm.core.plan import Draft
from sagellm.core.protocols.kv_tiers import ReadOutcome
from sagellm.core.protocols.scheduler_ir import SchedulingView
from sagellm.core.registry import registry
from sagellm.core.types import Namespace, Request, Tokens
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from tests.builders import check_books, expected_tokens, fake_engine, request, run_all

POLICIES = registry("policy").names()
INDEXES = ["radix", "hashed"]
NOBODY = Namespace()
OLD, YOUNG, FILLER = range(17), range(20, 37), range(60, 89)
"""Prompts of four, four and seven whole blocks, and one token more."""


def hints(kind: str, **payload: Any) -> KVHintsEnvelope:
    return KVHintsEnvelope("0.1", "m", (KVHintAction("a", kind, payload=payload),))


def session(name: str, tokens: Iterable[int], max_tokens: int = 1, **options: Any) -> Request:
    envelope = options.pop("kv_hints", None)
    return replace(request(name, tokens, max_tokens, **options), session_id=name, kv_hints=envelope)


def small_engine(eviction: str = "lru", num_blocks: int = 12, **options: Any) -> Engine:
    """Room for two sessions of four blocks, and four blocks free."""
    return fake_engine(TokenMemoryBackend(num_blocks=num_blocks), eviction=eviction, **options)


def serve(engine: Engine, *requests: Request) -> None:
    """One after the other."""
    for one in requests:
        engine.add(one)
        run_all(engine)


def resident(engine: Engine, tokens: Iterable[int], namespace: Namespace = NOBODY) -> int:
    """Blocks of a prompt in the cache."""
    return engine.kv.index.lookup(Tokens(tokens), engine.kv.namespace_of(namespace)).num_blocks


def status(engine: Engine, envelope: KVHintsEnvelope, namespace: Namespace = NOBODY) -> tuple[str, int]:
    [outcome] = engine.hint(envelope, namespace)
    return outcome.status.value, outcome.num_blocks


class Preempt:
    """A pass that preempts one request, once, when it has so many tokens."""

    name = "preempt"

    def __init__(self, request_id: str, num_tokens: int) -> None:
        self.request_id, self.num_tokens = request_id, num_tokens

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for state in list(draft.running):
            if state.request_id == self.request_id and len(state.tokens) >= self.num_tokens:
                self.request_id = ""
                draft.preempt(state)


class GatedLoads:
    """An engine whose loads from its host tier wait at a gate.

    `gate`: lets one read of the tier pass for each `release`. A read is of one block.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        assert isinstance(engine.kv.tiers, HierarchyManager)
        self.hierarchy = engine.kv.tiers
        self.hierarchy._migrator._blocks_per_chunk = 1  # type: ignore[attr-defined]
        self.gate, self.num_reads = threading.Semaphore(0), 0
        storage: Any = self.hierarchy.tiers[0].storage
        self._read = storage.read
        storage.read = self._wait_and_read

    def _wait_and_read(
        self, slots: Sequence[int], token_hashes: Sequence[bytes], target: memoryview
    ) -> Sequence[ReadOutcome]:
        self.num_reads += 1
        assert self.gate.acquire(timeout=20)
        outcomes: Sequence[ReadOutcome] = self._read(slots, token_hashes, target)
        return outcomes

    def open(self) -> None:
        self.gate.release(1000)

    def expected(self, prompt: Iterable[int], max_tokens: int) -> list[int]:
        assert isinstance(self.engine.backend, TokenMemoryBackend)
        return expected_tokens(self.engine.backend, prompt, max_tokens)

    def step_until(self, is_so: Callable[[], object]) -> dict[str, list[int]]:
        """The tokens of each request in the steps until then."""
        return step_until(self.engine, is_so)


def step_until(engine: Engine, is_so: Callable[[], object]) -> dict[str, list[int]]:
    """The tokens of each request in the steps until then."""
    tokens: dict[str, list[int]] = {}
    until_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until_s
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_books(engine)
        time.sleep(0.001)  # for the threads that read
    return tokens
