"""`PassPipeline` runs the passes of a strategy over the draft of each step.

The verifier checks the draft before the first pass and after the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from sagellm.core.binding import Binding
from sagellm.core.clock import Clock, MonotonicClock
from sagellm.core.errors import ConfigError
from sagellm.core.plan import Draft
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.kvmgr.scheduler_ir.passes.chunked_prefill import ChunkedPrefillPass
from sagellm.kvmgr.scheduler_ir.passes.memory_aware_preemption import MemoryAwarePreemptionPass
from sagellm.kvmgr.scheduler_ir.verify import verify, verify_operations


class PassPipeline:
    """The passes of one engine, in order.

    `passes` are those that were given. `order` are those that run: every schedule ends with
    `chunked_prefill`, which keeps the token budget, and then `memory_aware_preemption`, which keeps the
    memory. Where they are missing from `passes`, or stand the other way round, they are appended; unless a
    pass does both itself and says so with `closes = True`. `pass_time_s` sums the seconds of each pass, by
    name.
    """

    def __init__(self, passes: Sequence[SchedulerPass] = (), clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self.pass_time_s: dict[str, float] = {}
        self.use(passes)

    def use(self, passes: Sequence[SchedulerPass]) -> None:
        """Replace the passes from the next step on. Raises `ConfigError` for one behind a closing pass."""
        chunking, memory = ChunkedPrefillPass.name, MemoryAwarePreemptionPass.name
        names = [p.name for p in passes]
        closing = next((i for i, p in enumerate(passes) if getattr(p, "closes", False)), None)
        if closing is not None:
            for name in (chunking, memory):
                if name in names[closing + 1 :]:
                    raise ConfigError(f"{names[closing]} closes the schedule: {name} cannot stand behind it")
        self.passes, self.order = list(passes), list(passes)
        if closing is not None:
            return
        if chunking not in names:
            self.order.append(ChunkedPrefillPass())
            names.append(chunking)
        last_chunking = len(names) - 1 - names[::-1].index(chunking)
        if memory not in names[last_chunking:]:  # the memory check must see the final chunks
            self.order.append(MemoryAwarePreemptionPass())

    def add_optimization_pass(self, scheduler_pass: SchedulerPass) -> None:
        """Append a pass; order is order of execution."""
        self.use([*self.passes, scheduler_pass])

    def run(self, draft: Draft, view: SchedulingView, binding: Binding | None = None) -> Draft:
        """Apply all passes to the draft in place and verify it; raises `PlanError`. `binding`: the draft's,
        where passes may have blocks bound early. They do not see it."""
        verify_operations(draft)
        for scheduler_pass in self.order:
            began_s = self._clock.now()
            scheduler_pass(draft, view)
            spent_s = self._clock.now() - began_s
            self.pass_time_s[scheduler_pass.name] = self.pass_time_s.get(scheduler_pass.name, 0.0) + spent_s
        verify(draft, view, binding)
        return draft
