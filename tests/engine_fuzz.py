"""Random workloads through whole engines: every policy, strategy, index and pool, with overlap, tiers,
quotas, pins, forks, aborts, random preemption, hints, retention, proposed tokens and approximate reuse.

    python -m tests.engine_fuzz --seconds 600 --seed 1

What holds in every case, after every step: the tokens and their log-probabilities are those of the slow
twin (`expected_tokens`), whatever is proposed; the books balance, every request ends, and no request is ended
for memory that fits alone: beside what is pinned, below its ceilings, and without the blocks that are
guaranteed to others. A request that reuses approximately may answer otherwise; its KV is marked, and nothing
exact may see a mark (`ApproximateMemory`).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, replace

from sagellm.core.blocks import Tier, cdiv
from sagellm.core.clock import Clock, ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.errors import CapacityError, ContextLengthError, RequestError
from sagellm.core.kv_hints import KVHintsEnvelope
from sagellm.core.protocols.prefix_cache import PrefixHit
from sagellm.core.registry import registry
from sagellm.core.types import (
    SLO,
    AttentionChunk,
    FinishReason,
    Namespace,
    Request,
    Retention,
    Tokens,
    Window,
)
from sagellm.engines.build_kv import build_kv
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.manager.hot_prefixes import SEARCH_EVERY_S
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.strategies import STRATEGIES, make
from tests.approximate_memory import ApproximateMemory, check_index
from tests.builders import (
    PreemptAtRandom,
    RandomProposer,
    check_books,
    expected_tokens,
    load_always,
    request,
    slow_copies,
    split_loads,
    tiers_below,
)
from tests.kvmgr.tiers.storages.resp_server import RespServer

TENANTS, CLASSES = ("a", "b", "c", "d"), ("", "flex", "priority")
MAX_STEPS = 20_000
WINDOWS = [
    (None, 5),
    (None, 12, 12),
    (None, None, 7),
    (None, 1),
    (None, 3, 3, 20),
    (None, None),
    (None, AttentionChunk(8), 5),
    (None, AttentionChunk(4)),
]
"""Windows of the KV groups."""


@dataclass(frozen=True)
class Case:
    """One engine and its workload, drawn from a seed."""

    seed: int
    preset: str
    index: str
    pool: str
    eviction: str
    overlap: bool
    window: int | None
    block_size: int
    num_blocks: int
    num_rows: int
    max_batched_tokens: int
    preempt_share: float
    index_as_computed: bool
    tenant_shares: dict[str, dict[str, float]]
    class_shares: dict[str, dict[str, float]]
    sharing_groups: dict[str, list[str]]
    windows: tuple[Window | None, ...] = (None,)
    num_proposed: int = 0
    state_pages: int = 0
    checkpoint_interval: int = 16
    host_blocks: int = 0
    disk_blocks: int = 0
    has_remote: bool = False
    recompute_tokens: int = 0
    splits_loads: bool = False
    free_watermark: float | None = None
    copy_s: float = 0.0

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        preset = draw.choice(sorted(STRATEGIES))
        index = draw.choice(registry("index").names())
        has_quotas = draw.random() < 0.6
        window = draw.choice([None, None, None, 12])
        case = cls(
            seed,
            preset,
            index,
            pool=draw.choice(registry("pool").names()),
            eviction=draw.choice(registry("policy").names()),
            overlap=draw.random() < 0.3,
            window=window,
            block_size=draw.choice([1, 4, 16]),
            num_blocks=draw.choice([8, 16, 33]),
            num_rows=draw.choice([2, 4, 8]),
            max_batched_tokens=draw.choice([8, 32, 256]),
            preempt_share=draw.choice([0.0, 0.0, 0.02]),
            index_as_computed=preset == "vllm-like" or draw.random() < 0.2,
            tenant_shares=_shares(draw, TENANTS[:3]) if has_quotas else {},
            class_shares=_shares(draw, CLASSES[1:]) if has_quotas and draw.random() < 0.5 else {},
            sharing_groups={"g": ["a", "c"]} if draw.random() < 0.3 else {},
        )
        if draw.random() < 0.5:
            case = replace(case, num_proposed=draw.choice([1, 3, 9]))
        if window is not None or draw.random() < 0.6:
            return case if window is not None else case._with_tiers()._with_copies()
        no_shares: dict[str, dict[str, float]] = {}
        case = replace(case, tenant_shares=no_shares, class_shares=no_shares)
        if draw.random() < 0.4:
            interval = draw.choice([1, 4, 16])
            case = replace(
                case, state_pages=draw.choice([1, 2, 5]), checkpoint_interval=interval, num_proposed=0
            )
            if draw.random() < 0.7:
                return case
        return replace(case, windows=draw.choice(WINDOWS))

    def _with_tiers(self) -> Case:
        """With memory below the device, in half of the cases. Drawn apart: other cases stay as they are."""
        draw = random.Random(self.seed + 7)
        if draw.random() < 0.5:
            return self
        disk, splits = draw.choice([0, 0, 200]), self.seed % 3 > 0
        host = draw.choice([8, 40, 200])
        case = replace(self, host_blocks=host, disk_blocks=disk, splits_loads=splits)._with_write_back()
        if draw.random() < 0.6:
            return case
        return replace(case, host_blocks=draw.choice([0, case.host_blocks]), has_remote=True)

    def _with_write_back(self) -> Case:
        """With write-back in half of the cases, and with copies that take longer than steps. Drawn apart."""
        draw = random.Random(self.seed + 13)
        return replace(
            self,
            free_watermark=draw.choice([None, None, 0.05, 0.25]),
            copy_s=draw.choice([0.0, 0.0, 0.002, 0.01]),
        )

    def _with_copies(self) -> Case:
        """With approximate reuse, in a third of the cases. Drawn apart, too."""
        draw = random.Random(self.seed + 11)
        return replace(self, recompute_tokens=draw.choice([0, 0, 0, 0, 1, 4]))

    def engine(self, clock: Clock, remote_url: str | None = None) -> Engine:
        num_pages = self.num_blocks * len(self.windows)
        backend_type = ApproximateMemory if self.recompute_tokens else TokenMemoryBackend
        backend = backend_type(
            num_pages,
            self.block_size,
            self.num_rows,
            max_model_len=min(128, self.num_blocks * self.block_size),
            sliding_window=self.window,
            windows=self.windows,
            state_pages=self.state_pages,
        )
        config = KVConfig.model_validate(
            {
                "block_size": self.block_size,
                "index": self.index,
                "pool": self.pool,
                "eviction": self.eviction,
                "index_as_computed": self.index_as_computed,
                "checkpoint_interval": self.checkpoint_interval,
                "tenant_shares": self.tenant_shares,
                "class_shares": self.class_shares,
                "sharing_groups": self.sharing_groups,
            }
        )
        if self.free_watermark is not None:
            write_back = {"write_policy": "write_back", "free_watermark": self.free_watermark}
            config = config.model_copy(update=write_back)
        tiers = None
        if self.host_blocks or self.disk_blocks or remote_url:
            block_bytes = backend.kv_bytes().bytes_per_block
            tiers = tiers_below(
                backend, clock, host_blocks=self.host_blocks, disk_blocks=self.disk_blocks,
                tenant_shares=self.tenant_shares, class_shares=self.class_shares,
                eviction=self.eviction, remote_url=remote_url, remote_gb=200.5 * block_bytes / 2**30,
            )  # fmt: skip
        kv = build_kv(
            config,
            num_pages,
            window=self.window,
            groups=backend.get_kv_schema().groups,
            state_pages=self.state_pages,
            max_chunk=self.max_batched_tokens,
            tiers=tiers,
            clock=clock,
        )
        load_always(kv)
        if self.copy_s:
            slow_copies(kv, self.copy_s)
        if self.splits_loads:
            split_loads(kv)
        passes = make(self.preset)
        if self.preempt_share:
            passes = [PreemptAtRandom(self.seed, self.preempt_share), *passes]
        engine = Engine(
            backend,
            kv,
            PassPipeline(passes),
            max_batched_tokens=self.max_batched_tokens,
            overlap=self.overlap,
            speculation=self._speculation(backend),
            token_copies=backend if isinstance(backend, ApproximateMemory) else None,
            recompute_tokens=self.recompute_tokens,
            clock=clock,
        )
        if isinstance(backend, ApproximateMemory):
            backend.engine = engine
        return engine

    def _speculation(self, backend: TokenMemoryBackend) -> Speculation | None:
        if not self.num_proposed:
            return None
        return Speculation(RandomProposer(backend, self.seed, trees=bool(self.seed % 2)), self.num_proposed)

    def fits_alone(self, one: Request, num_pinned: int) -> bool:
        """Whether the request could end with nothing else running, whatever the cache holds then: below its
        ceilings, and in what the guarantees of others leave of the pool."""
        tenants, classes = self.tenant_shares, self.class_shares
        tenant, service_class = one.namespace.tenant, one.service_class
        own = tenants.get(tenant, {}), classes.get(service_class, {})
        ceiling = _blocks(self.num_blocks, min(share.get("ceiling", 1.0) for share in own))
        others = self._guaranteed(tenants, tenant) + self._guaranteed(classes, service_class)
        assert one.params.max_tokens is not None
        needed = cdiv(len(one.tokens) + one.params.max_tokens - 1, self.block_size)
        return needed <= min(ceiling, self.num_blocks - others) - num_pinned

    def _guaranteed(self, shares: dict[str, dict[str, float]], but: str) -> int:
        return sum(_blocks(self.num_blocks, one["guaranteed"]) for name, one in shares.items() if name != but)


TEXTS = (list(range(96)), [7] * 96)
"""What prompts begin like, so that they share prefixes."""


class Run:
    """One engine, its requests and what is expected of them. Each step checks what it can."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.clock = ManualClock()
        self.server = RespServer() if case.has_remote else None
        if self.server is not None:
            self.server.start()
        self.engine = case.engine(self.clock, None if self.server is None else self.server.url)
        self.requests: dict[str, Request] = {}
        self.alive: list[str] = []
        self.seen: Counter[str] = Counter()
        self.longest = min(96, case.num_blocks * case.block_size)
        self._tokens: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[float]] = {}
        self._copied: dict[str, int] = {}
        self._pins: list[PrefixHit] = []
        self._most_pinned = 0

    def arrive(self, one: Request) -> None:
        try:
            self.engine.add(one)
        except ContextLengthError:
            self.seen["too long"] += 1
            return
        self._began(one)

    def fork(self, parent: str, child: str) -> None:
        try:
            self.engine.fork(parent, child)
        except RequestError:  # the parent waits or has ended, or the account of the child cannot hold it
            return
        self._began(self.engine._request_table.states[child].request)
        self.seen["fork"] += 1

    def abort(self, name: str) -> None:
        if self.engine.abort(name):
            self.alive.remove(name)
            self.seen["abort"] += 1

    def pin(self, tokens: list[int], tenant: str) -> None:
        try:
            self._pins.append(self.engine.kv.pin_prefix(Tokens(tokens), Namespace(tenant=tenant)))
        except CapacityError:
            return
        held = sum(hit.num_blocks + self.case.state_pages for hit in self._pins if hit.num_blocks)
        self._most_pinned = max(self._most_pinned, held)

    def unpin(self) -> None:
        if self._pins:
            self.engine.kv.unpin_prefix(self._pins.pop())

    def hint(self, action: str, tokens: list[int], tenant: str, **payload: float) -> None:
        actions = [{"action_type": action, "payload": {"token_ids": tokens, **payload}}]
        [outcome] = self.engine.hint(KVHintsEnvelope.parse({"actions": actions}), Namespace(tenant=tenant))
        self.seen[f"hint {outcome.status.value}"] += 1

    def rest(self) -> None:
        """All requests end, the cache is emptied, and the engine is idle: prefixes come up from tiers.

        Nothing is evicted for them, but maybe for a `kv.expect`.
        """
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                break
            self.step(0.01)
        self.engine.clear_cache()
        kv = self.engine.kv
        num_evicted, num_cached = dict(kv.allocator.num_evicted), kv.index.num_cached
        self.clock.advance(SEARCH_EVERY_S)
        for _ in range(50):
            if self.engine.has_work():
                self.step(0.0)
        if kv.hints.is_idle:
            assert dict(kv.allocator.num_evicted) == num_evicted
            self.seen["hot blocks"] += kv.index.num_cached - num_cached

    def step(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for output in self.engine.step():
            self._tokens[output.request_id].extend(output.new_token_ids)
            self._logprobs[output.request_id].extend(entry.logprob for entry in output.logprobs)
            assert output.num_output_tokens == len(self._tokens[output.request_id])
            if output.finish_reason is not None:
                self._copied[output.request_id] = output.num_approximate_tokens
                self._ended(self.requests[output.request_id], output.finish_reason, output.error)
        check_books(self.engine)
        if self.case.recompute_tokens:
            check_index(self.engine)

    def finish(self) -> None:
        """Step until every request has ended, and have all blocks free or cached."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work():
                break
            self.step(0.01)
        assert not self.alive, f"{self.alive} did not end in {MAX_STEPS} steps: {self.engine.stats()}"
        if self.engine._kv_waits is not None:
            self.engine._kv_waits.settle()
            self.seen["tails"] += self.engine._kv_waits.num_tails
            assert isinstance(self.engine.kv.tiers, HierarchyManager)
            self.seen["evicted ahead"] += self.engine.kv.allocator.num_evicted.get("ahead", 0)
            for tier in self.engine.kv.tiers.tiers:
                if tier.tier is not Tier.REMOTE:  # a test machine may be busier than the limit of a call
                    assert not tier.misses, f"{tier.tier}: {tier.misses}"
                self.seen[f"loaded from {tier.tier}"] += tier.num_loaded
        while self._pins:
            self.unpin()
        check_books(self.engine)
        assert self.engine.kv.block_states().active == 0
        checkpoints = self.engine.kv.checkpoints
        if checkpoints is not None:
            self.seen["checkpoints"] += checkpoints.num_made
        if self.engine.speculation is not None:
            self.seen["accepted"] += self.engine.speculation.num_accepted
            self.seen["refused"] += (
                self.engine.speculation.num_proposed - self.engine.speculation.num_accepted
            )
        self.engine.close()
        if self.server is not None:
            self.server.stop()

    def _began(self, one: Request) -> None:
        self.requests[one.request_id] = one
        self.alive.append(one.request_id)
        self._tokens[one.request_id] = list(one.generated)
        self._logprobs[one.request_id] = []

    def _ended(self, one: Request, reason: FinishReason, error: str | None) -> None:
        self.alive.remove(one.request_id)
        self.seen[reason.value] += 1
        backend = self.engine.backend
        assert isinstance(backend, TokenMemoryBackend)
        assert one.params.max_tokens is not None
        expected = expected_tokens(backend, one.tokens, one.params.max_tokens)
        drawn = self._tokens[one.request_id]
        if self._copied[one.request_id]:
            self.seen["approximate"] += 1
            expected = drawn + expected[len(drawn) :]
        assert drawn == expected[: len(drawn)], f"{one.request_id}: {drawn}, not {expected}"
        if one.params.logprobs is not None:
            places = range(len(one.generated), len(drawn))
            assert self._logprobs[one.request_id] == [-float(len(one.tokens) + i) for i in places]
        if reason is FinishReason.ERROR:
            fits = self.case.fits_alone(one, self._most_pinned)
            assert not fits, f"{one.request_id} fits alone, and ended with: {error}"
        elif reason is FinishReason.MOVED:
            assert one.moves
            assert len(drawn) == len(one.generated) + 1
        else:
            num_left = self.engine.max_model_len - len(one.tokens)
            assert len(drawn) == min(len(expected), num_left), f"{one.request_id} ended early"


def play(case: Case, num_requests: int = 12) -> Counter[str]:
    """A random workload on the case from the first request to the last; counts how requests ended. Raises
    `AssertionError` or `BookkeepingError` where something does not hold."""
    draw, run = random.Random(case.seed + 1), Run(case)
    arrivals = sorted(draw.randrange(40) for _ in range(num_requests))
    for step in range(MAX_STEPS):
        while arrivals and arrivals[0] <= step:
            arrivals.pop(0)
            run.arrive(_request(draw, run, f"r{len(arrivals)}"))
        if not arrivals and not run.engine.has_work():
            break
        _disturb(draw, run, step)
        run.step(draw.choice([0.01, 0.01, 0.2]))
    run.finish()
    return run.seen


def _request(draw: random.Random, run: Run, name: str) -> Request:
    text = draw.choice([*TEXTS, [draw.randrange(96) for _ in range(96)]])
    approximate = bool(run.case.recompute_tokens) and draw.random() < 0.5
    if run.case.recompute_tokens:
        text = [*text[draw.choice([0, 9, 30]) :][: draw.randrange(4)], *text[draw.choice([0, 1, 3, 8]) :]]
    made = request(
        f"~{name}" if approximate else name,
        text[: draw.randrange(1, max(2, run.longest // 2))],
        draw.randrange(1, max(2, run.longest // 2)),
        logprobs=draw.choice([None, 0]),
        namespace=Namespace(tenant=draw.choice(TENANTS)),
        service_class=draw.choice(CLASSES),
        priority=draw.choice([0, 0, 0, 5, -5]),
        arrival_s=run.clock.now(),
        slo=draw.choice([SLO(), SLO(ttft_s=1.0, tpot_s=0.1)]),
        retention=draw.choice([(), (), (Retention(0, draw.randrange(1, 40), 80, 5.0),)]),
        approximate_reuse=approximate,
    )
    return _begun_elsewhere(run, made)


def _begun_elsewhere(run: Run, one: Request) -> Request:
    """In a third of the cases, another engine has begun some answers, and some move on. Drawn apart."""
    draw = random.Random(f"{run.case.seed} {one.request_id}")
    if run.case.seed % 3 or one.approximate_reuse or draw.random() < 0.5:
        return one
    backend, most = run.engine.backend, one.params.max_tokens
    assert isinstance(backend, TokenMemoryBackend)
    assert most is not None
    generated = expected_tokens(backend, one.tokens, draw.randrange(most))
    run.seen["begun elsewhere"] += bool(generated)
    return replace(one, generated=tuple(generated), moves=draw.random() < 0.2)


def _disturb(draw: random.Random, run: Run, step: int) -> None:
    tiers = run.engine.kv.tiers
    if tiers is not None and step % 11 == 10:
        run.engine.clear_cache()  # what comes next is loaded from a tier
    if tiers is not None and run.case.seed % 2 and step % 40 == 39:
        run.rest()
    if tiers is not None and run.server is not None:
        run.server.answer = b"-ERR\r\n" if step % 64 > 60 else None
        if step % 3:
            tiers.wait(0.01)  # the clock of the engine is faster than the server
    chance = draw.random()
    if chance < 0.03 and run.alive:
        run.fork(draw.choice(run.alive), f"fork {step}")
    elif chance < 0.05 and run.alive:
        run.abort(draw.choice(run.alive))
    elif chance < 0.07:
        run.pin(TEXTS[0][: draw.choice([4, 16, 32])], draw.choice(TENANTS))
    elif chance < 0.09:
        run.unpin()
    elif chance < 0.10:
        run.engine.kv.clear_cache()
    elif chance < 0.11:
        run.engine.compact()
    elif chance < 0.14:
        action = draw.choice(["session.end", "kv.retain", "kv.expect"])
        later = {"in_s": (0, 1.5, 60)[step % 3]} if action == "kv.expect" else {}
        run.hint(action, TEXTS[0][: draw.choice([16, 32, 96])], draw.choice(TENANTS), **later)


def _shares(draw: random.Random, names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    shares: dict[str, dict[str, float]] = {}
    for name in names:
        if draw.random() < 0.6:
            share = {"guaranteed": draw.choice([0.0, 0.125, 0.25])}
            if draw.random() < 0.4:
                share["ceiling"] = draw.choice([0.5, 0.75])
            shares[name] = share
    return shares


def _blocks(total: int, share: float) -> int:
    return int(share * total + 1e-9)


def fuzz(first_seed: int, *, num_cases: int | None = None, seconds: float = math.inf) -> Counter[str]:
    """Play cases of consecutive seeds until there were `num_cases`, or `seconds` are over; returns counts."""
    seen: Counter[str] = Counter()
    began_s = time.monotonic()
    while seen["cases"] != num_cases and time.monotonic() - began_s < seconds:
        case = Case.of(first_seed + seen["cases"])
        try:
            seen.update(play(case))
        except BaseException as error:
            error.add_note(f"the case: {case}")
            raise
        seen["cases"] += 1
        seen[case.preset] += 1
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Random workloads through whole engines.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(dict(fuzz(options.seed, seconds=options.seconds)))
