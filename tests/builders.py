"""Small engines and requests for tests."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sagellm.core.clock import Clock, ManualClock
from sagellm.core.config import KVConfig
from sagellm.core.events import EventBus
from sagellm.core.plan import Draft
from sagellm.core.protocols.kv_tiers import BlockBytes, Buffer
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.protocols.speculative import Asked, Proposal
from sagellm.core.types import FinishReason, Namespace, Request, SamplingParams, Tokens
from sagellm.engines.build_kv import TierSource, build_kv, build_tiers
from sagellm.engines.engine import Engine
from sagellm.engines.simulator import TokenMemoryBackend
from sagellm.engines.speculation import Speculation
from sagellm.kvmgr.eviction import PrefillCostModel
from sagellm.kvmgr.kv_pool.tiers.disk_slab import slot_bytes
from sagellm.kvmgr.kv_pool.tiers.hierarchy import HierarchyManager
from sagellm.kvmgr.kv_pool.tiers.migrator import KVMigrator
from sagellm.kvmgr.manager import KVCacheManager
from sagellm.kvmgr.scheduler_ir import PassPipeline
from sagellm.kvmgr.scheduler_ir.passes.prefix_cache_aware import PrefixCacheAwarePass
from sagellm.kvmgr.scheduler_ir.passes.priority_based import PriorityBasedPass
from tests.approximate_memory import ApproximateMemory


def fake_engine(
    backend: TokenMemoryBackend | None = None,
    *,
    prefix_caching: bool = True,
    max_batched_tokens: int = 32,
    passes: Sequence[SchedulerPass] | None = None,
    events: EventBus | None = None,
    speculation: Speculation | None = None,
    overlap: bool = False,
    host_blocks: int = 0,
    recompute_tokens: int = 0,
    compress_reasoning: bool = False,
    clock: Clock | None = None,
    **kv_options: Any,
) -> Engine:
    """An engine over `TokenMemoryBackend`, with the default modules.

    `host_blocks`: those of a host tier, from which loading is always worth it. With `recompute_tokens` it
    allows approximate reuse. `clock`: a manual one by default.
    """
    backend = backend or TokenMemoryBackend()
    capability = backend.capability()
    clock, tiers = clock or ManualClock(), None
    if host_blocks:
        tiers = tiers_below(backend, clock, host_blocks=host_blocks, events=events, **kv_options)
    kv = build_kv(
        KVConfig(block_size=capability.block_size, prefix_caching=prefix_caching, **kv_options),
        capability.num_blocks,
        window=capability.sliding_window,
        groups=backend.get_kv_schema().groups,
        state_pages=backend.get_kv_schema().state_pages,
        max_chunk=max_batched_tokens,
        tiers=tiers,
        clock=clock,
        events=events,
    )
    load_always(kv)
    scheduler = PassPipeline(passes if passes is not None else [PrefixCacheAwarePass(), PriorityBasedPass()])
    engine = Engine(
        backend,
        kv,
        scheduler,
        max_batched_tokens=max_batched_tokens,
        overlap=overlap,
        speculation=speculation,
        token_copies=backend if recompute_tokens and isinstance(backend, ApproximateMemory) else None,
        recompute_tokens=recompute_tokens,
        compress_reasoning=compress_reasoning,
        clock=clock,
        events=events,
    )
    if isinstance(backend, ApproximateMemory):
        backend.engine = engine
    return engine


def tiers_below(
    backend: TokenMemoryBackend,
    clock: Clock,
    *,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    events: EventBus | None = None,
    **kv_options: Any,
) -> TierSource | None:
    """Tiers of so many blocks, whatever the sizes in `kv_options`; the disk's in a new folder."""
    block_bytes = backend.kv_bytes().bytes_per_block
    sizes = {"host_gb": (host_blocks, block_bytes), "disk_gb": (disk_blocks, slot_bytes(block_bytes))}
    options = {name: (count + 0.5) * size / 2**30 for name, (count, size) in sizes.items() if count}
    folder = f"{tempfile.mkdtemp()}/kv" if disk_blocks else None
    size = backend.capability().block_size
    config = KVConfig.model_validate({"block_size": size, "dir": folder, **kv_options, **options})
    return build_tiers(config, backend, clock, events)


def load_always(kv: KVCacheManager) -> None:
    """Computing takes longer than any load."""
    if isinstance(kv.tiers, HierarchyManager):
        kv.tiers._costs = PrefillCostModel(kv.block_size, seconds_per_token=1.0)


def split_loads(kv: KVCacheManager) -> None:
    """Loading a block is a little faster than computing it: a request that is alone computes half of each."""
    assert isinstance(kv.tiers, HierarchyManager)
    kv.tiers._costs = PrefillCostModel(kv.block_size, seconds_per_token=1 / kv.block_size)
    kv.tiers.speeds.set_all(kv.tiers.speeds.bytes_per_block / 0.9)


class SlowBytes:
    """The KV blocks of a backend, read and written `seconds` late: steps are faster than copies."""

    def __init__(self, device: BlockBytes, seconds: float) -> None:
        self.bytes_per_block, self.numa_node = device.bytes_per_block, device.numa_node
        self.lock_pages, self.follow_steps = device.lock_pages, device.follow_steps
        self._device, self._seconds = device, seconds

    def read_blocks(self, block_ids: Sequence[int], target: memoryview) -> None:
        time.sleep(self._seconds)
        self._device.read_blocks(block_ids, target)

    def write_blocks(self, block_ids: Sequence[int], data: Buffer) -> None:
        time.sleep(self._seconds)
        self._device.write_blocks(block_ids, data)


def slow_copies(kv: KVCacheManager, seconds: float) -> None:
    """Each copy of up to `CHUNK_BYTES` between the device and a tier takes so much longer."""
    assert isinstance(kv.tiers, HierarchyManager)
    assert isinstance(kv.tiers._migrator, KVMigrator)
    kv.tiers._migrator._device = SlowBytes(kv.tiers._migrator._device, seconds)


def request(request_id: str, tokens: Iterable[int], max_tokens: int = 4, **options: Any) -> Request:
    names = {"priority", "namespace", "arrival_s", "group", "eos_token_ids", "service_class", "retention"}
    names |= {"slo", "reports_hit", "approximate_reuse"}
    own = {name: options.pop(name) for name in names & options.keys()}
    return Request(request_id, Tokens(tokens), SamplingParams(max_tokens=max_tokens, **options), **own)


def run_all(engine: Engine, *, check: bool = True, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Step until nothing is left; the tokens of each request. Books are checked after each step."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return tokens
        for output in engine.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        if check:
            check_books(engine)
    raise AssertionError(f"{max_steps} steps were not enough")


def check_books(engine: Engine) -> None:
    engine.check()
    states = engine.kv.block_states()
    assert sum(states) == engine.kv.pool.total_blocks


def expected_tokens(backend: TokenMemoryBackend, prompt: Iterable[int], max_tokens: int) -> list[int]:
    """What `TokenMemoryBackend` must answer, computed without an engine: the slow twin."""
    tokens = Tokens(prompt)
    start = len(tokens)
    for _ in range(max_tokens):
        tokens.append(backend.answer(tokens))
    return tokens.tolist()[start:]


TENANT_A, TENANT_B = Namespace(tenant="a"), Namespace(tenant="b")


class OneByOne:
    """A proposer that looks at one request at a time."""

    def propose(self, asked: Sequence[Asked]) -> Sequence[Proposal]:
        return [self.propose_one(*each) for each in asked]

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        raise AssertionError("a subclass proposes")

    def close(self) -> None: ...


def random_tree(draw: random.Random, right: Sequence[int], vocab_size: int, count: int) -> Proposal:
    """A tree of `count` tokens, in any order: some are those of `right` in turn, others branch off."""
    tokens, parents, along = list[int](), list[int](), [-1]
    while len(tokens) < count:
        if len(along) <= len(right) and draw.random() < 0.6:
            parent, token = along[-1], right[len(along) - 1]
        else:
            parent, token = draw.randrange(-1, len(tokens)), draw.randrange(vocab_size)
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        if parent == along[-1] and len(along) <= len(right) and token == right[len(along) - 1]:
            along.append(len(tokens))
        tokens.append(token)
        parents.append(parent)
    return Proposal(tuple(tokens), parents=tuple(parents))


class RandomProposer(OneByOne):
    """Proposes what `TokenMemoryBackend` will draw: all of it, a part and then others, or others alone.

    With `trees`, every second proposal is a tree.
    """

    def __init__(self, backend: TokenMemoryBackend, seed: int, *, trees: bool = False) -> None:
        self.random, self.backend, self.known = random.Random(seed), backend, set[str]()
        self.trees = trees

    def propose_one(self, request: Request, tokens: Tokens, num_tokens: int) -> Proposal:
        self.known.add(request.request_id)
        if self.trees and self.random.random() < 0.5:
            count = self.random.randrange(num_tokens + 1)
            right = expected_tokens(self.backend, tokens, count)
            return random_tree(self.random, right, self.backend.capability().vocab_size, count)
        num_right = self.random.choice([0, num_tokens, self.random.randrange(num_tokens + 1)])
        right = expected_tokens(self.backend, tokens, num_right)
        num_other = self.random.randrange(num_tokens - num_right + 1)
        return Proposal((*right, *(self.random.randrange(97) for _ in range(num_other))))

    def observe(self, request_id: str, num_accepted: int) -> None:
        assert request_id in self.known

    def forget(self, request: Request, tokens: Tokens) -> None:
        self.known.discard(request.request_id)


class PreemptAtRandom:
    """A pass of a user: preempts running requests by a seeded coin, `times` times in all."""

    name = "preempt_at_random"

    def __init__(self, seed: int, share: float, times: int = 20) -> None:
        self.random, self.share, self.times = random.Random(seed), share, times

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        for state in list(draft.running):
            if self.times and self.random.random() < self.share:
                self.times -= 1
                draft.preempt(state)
