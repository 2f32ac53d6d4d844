"""Contracts around an engine: the backend below it and the client above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from sagellm.core.clock import Clock
from sagellm.core.kv_hints import HintOutcome, KVHintsEnvelope
from sagellm.core.plan import ExecutionPlan, StepResult
from sagellm.core.protocols.eviction import EvictionPolicy
from sagellm.core.protocols.kv_tiers import TierState
from sagellm.core.protocols.prefix_cache import MissCounts, PrefixReuseSnapshot, PromptSpan, TenantReuse
from sagellm.core.protocols.scheduler_ir import SchedulerPass
from sagellm.core.types import CapabilityDescriptor, KVCacheSchema, Namespace, Request, RequestOutput, Tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's load now. Blocks by state sum to the pool: in use, cached and unused, free.
    `tier_faults`: for each tier that is not used any more, its name and why."""

    num_running: int
    num_waiting: int
    blocks_active: int
    blocks_cached: int
    blocks_free: int
    num_preemptions: int = 0
    num_steps: int = 0
    reuse: PrefixReuseSnapshot | None = None
    misses: MissCounts | None = None
    tier_faults: Sequence[str] = ()


class TenantUse(NamedTuple):
    """Requests of a tenant in a fleet, against its quota.

    `num_requests` are counted, `num_waiting` wait for it, `num_refused` were refused since the front began.
    """

    num_requests: int = 0
    num_waiting: int = 0
    num_refused: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Tokens that were proposed and accepted, by position in their chain.

    `saved_s`: time of decoding steps that accepted tokens saved, less what steps with chains took longer;
    negative if it has lost time, 0 where it is not measured.
    """

    proposed: Sequence[int] = ()
    accepted: Sequence[int] = ()
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EngineDiagnostics:
    """Figures for an operator that are too costly to gather in each step.

    `evicted_blocks`: evicted cached blocks by cause (`capacity`, `quota`, `cleared`).
    `internal_fragmentation`: share of the slots in running requests' blocks that hold no token;
    `external_fragmentation`: 1 - longest run of free blocks / free blocks. `num_pinned_prefixes` hold
    `num_pinned_blocks` different blocks. `pass_time_s`: seconds spent in each scheduling pass so far.
    `expert_rows`: by layer, how many rows each of its experts has computed. `checkpoints`: `resident`,
    `made` and `evicted` checkpoints of recurrent states; empty for a model without any. `tiers`: memory below
    the device, the nearest first. `num_kv_waits`: how often requests waited for KV from there.
    `num_approximate_tokens`: tokens whose KV was copied from another position. `num_dropped_tokens`: those of
    reasoning whose KV was dropped. `step_s`: seconds that the backend has computed. `communication_s`: those
    of them that the first of several ranks has spent in communication with the others; None for one rank.
    `tenants`: of a fleet with quotas, by tenant.
    """

    evicted_blocks: Mapping[str, int] = field(default_factory=dict)
    internal_fragmentation: float = 0.0
    external_fragmentation: float = 0.0
    num_pinned_prefixes: int = 0
    num_pinned_blocks: int = 0
    pass_time_s: Mapping[str, float] = field(default_factory=dict)
    reuse_by_tenant: Mapping[str, TenantReuse] = field(default_factory=dict)
    expert_rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    speculation: SpeculationCounts = SpeculationCounts()
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    tiers: Sequence[TierState] = ()
    num_kv_waits: int = 0
    num_approximate_tokens: int = 0
    num_dropped_tokens: int = 0
    step_s: float = 0.0
    communication_s: float | None = None
    tenants: Mapping[str, TenantUse] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A hold of the first `num_tokens` tokens of a prompt. Calling it gives it up; twice is an error."""

    num_tokens: int
    num_blocks: int
    release: Callable[[], None]

    def __call__(self) -> None:
        self.release()


Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) when weights begin to load, with 0 done, and as loading goes on."""


@dataclass(frozen=True, slots=True)
class PromptExplanation:
    """`spans` cover the prompt in order. `session_tokens`: the last request of the session, its answer
    included; None if it is not known."""

    spans: Sequence[PromptSpan]
    block_size: int
    bytes_per_block: int
    session_tokens: Tokens | None = None


class InferenceBackend(Protocol):
    """Executes plans. Keeps the batch in rows between steps; owns the KV bytes and their layout.

    The plug-in is a factory: called with the `config` and, if it has parameters of these names, the engine's
    `clock` and a `progress`; other parameters are `engine.backend_options`. A backend with an attribute
    `engine_type`, a subclass of `Engine`, is run by that. `expert_rows()`, where a backend has it, gives
    `EngineDiagnostics.expert_rows`. KV tiers need `kv_bytes()`, which returns its `BlockBytes`, or
    `simulated_tiers`, as `SimulatedBackend` has it. Approximate reuse needs `token_copier()`, which returns
    a `TokenCopies` or raises `UnsupportedModelError`. A backend of several processes has `check_ranks()`,
    which raises `EngineFailedError` once one has ended, `end_ranks(grace_s)`, as that of `EngineCore`, and
    `communication_s`. A backend whose model has a draft head has a `drafter`, a `TokenDrafter`. With the
    feature `DROPPED_BLOCKS` a block table may have `NO_PAGE` for blocks before those that a step computes:
    tokens do not see what they held.

    `execute_by_layer(plan, on_layer)`, where a backend has it, is `execute`, and calls `on_layer(n)` on its
    thread once the KV of the first n layers of the step is written or, on a device with streams, launched: so
    a prompt is sent layer by layer while it is computed.

    `execute` either answers, or raises and no row has moved: the same step, a part of it, or another may
    follow, and rows may be joined anew. Out of device memory is raised as `CapacityError`. After an
    `EngineFailedError` there is no next step.
    """

    def capability(self) -> CapabilityDescriptor: ...

    def get_kv_schema(self) -> KVCacheSchema: ...

    def execute(self, plan: ExecutionPlan) -> StepResult: ...

    def close(self) -> None: ...


class TokenCopies(Protocol):
    """Copies KV within a device, between steps."""

    def copy(self, sources: Sequence[int], targets: Sequence[int], distance: int) -> None:
        """Copy KV from the slots `sources` to `targets`, `distance` positions later.

        A slot is block id x block size + offset. The targets are consecutive positions of one request and no
        sources; what follows them in a block that begins with them is cleared. Returns when the KV is there.
        """


RANKS_END_S = 5.0
"""Ranks that were asked to end get so long, then they are killed."""


@runtime_checkable
class BranchingEngine(Protocol):
    """An engine whose running requests share KV with others that begin alike."""

    def branch(self, request_id: str, request: Request) -> None:
        """As `EngineCore.add`. Shares the whole blocks that a running request has computed so far, with a
        request of a group also those of a partial block. Without such a running request it only adds."""


class EngineCore(Protocol):
    """A host engine: add requests, step, get tokens. Synchronous and single-threaded."""

    @property
    def clock(self) -> Clock: ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` for one that can never be served."""

    def step(self) -> Sequence[RequestOutput]:
        """Run one step; returns what it added to each request, nothing without work."""

    def abort(self, request_id: str) -> bool:
        """Drop a request; its blocks are free or cached when this returns. False if it is unknown or
        ended."""

    def pin_prefix(self, tokens: Tokens, namespace: Namespace) -> PinnedPrefix:
        """Hold what is resident of a prompt until the hold is released. Raises `CapacityError` where too much
        would be held."""

    def clear_cache(self, *, tiers: bool = False) -> int:
        """Evict every cached block that no request and no pin uses; returns their number.

        With `tiers` also below the device.
        """

    def hint(self, envelope: KVHintsEnvelope, namespace: Namespace) -> Sequence[HintOutcome]:
        """Apply KV hints for one tenant's sessions and prompts; returns one outcome per action."""

    def explain(
        self, tokens: Tokens, namespace: Namespace, session_id: str | None = None
    ) -> PromptExplanation:
        """What the cache knows of a prompt, and a session's last request.

        Raises `RequestError` without `kv.miss_attribution`."""

    def set_policy(self, factory: Callable[[], EvictionPolicy]) -> None:
        """Have other eviction policies choose from now on; the cache stays as it is. Where the factory or one
        of its policies raises, nothing has changed."""

    def set_passes(self, passes: Sequence[SchedulerPass]) -> None:
        """Schedule by these passes from the next step on; requests that run go on. Raises `ConfigError` for
        an order that cannot be, and nothing has changed."""

    def has_work(self) -> bool:
        """Whether `step` has something to do. Raises `EngineFailedError` if the engine can take no step."""

    def is_idle(self, tokens: Tokens, namespace: Namespace) -> bool:
        """Whether a prompt could be computed now without holding up a request."""

    def idle_s(self) -> float | None:
        """Seconds until an engine without work should be asked again; None: never."""

    def stats(self) -> EngineStats: ...

    def tier_faults(self) -> Sequence[str]:
        """The KV tiers that are not used now, and why. For any thread."""

    def wake(self) -> None:
        """End a `step` that waits for others. For any thread."""

    def diagnostics(self) -> EngineDiagnostics:
        """Gather the diagnostics between two steps; looks at every block."""

    def capability(self) -> CapabilityDescriptor: ...

    def end_ranks(self, grace_s: float) -> bool:
        """End the processes of the model's other ranks, by force after `grace_s`. False if there are none.

        A step that waits for one then fails within seconds, and no other can follow. For any thread.
        """

    def close(self) -> None:
        """Abort all requests and release everything; the last call. Ends the other ranks first."""
