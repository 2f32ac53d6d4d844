"""Records what each pass did to each request, and why.

A pass gives its reasons with `Draft.record`. What it changes without a record is found by comparing the draft
before and after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sagellm.core.plan import Draft, ExecutionPlan, RequestState
from sagellm.core.protocols.engine import EngineStats
from sagellm.core.protocols.scheduler_ir import SchedulerPass, SchedulingView
from sagellm.core.types import RequestOutput
from sagellm.kvmgr.scheduler_ir.diff import diff_text, placement_text
from sagellm.kvmgr.scheduler_ir.rows import Rows
from sagellm.kvmgr.scheduler_ir.text import numbers, print_plan, quoted


@dataclass(frozen=True, slots=True)
class Effect:
    """What one pass changed for one request without a record of its own."""

    pass_name: str
    request_id: str
    text: str


@dataclass(slots=True)
class StepRecord:
    """One executed step, the batch before it, and what happened beside the plan."""

    plan: ExecutionPlan
    before: Rows
    now_s: float
    effects: list[Effect]
    arrived: Sequence[str] = ()
    ended: Mapping[str, str] = field(default_factory=dict)
    load: EngineStats | None = None

    @property
    def title(self) -> str:
        """The time, the work of the step, and the load after it."""
        plan, load = self.plan, self.load
        work = f"{len(plan.decode_rows)} decode and {plan.num_prefill_tokens} prompt tokens"
        title = f"# {self.now_s:.3f} s: {work}"
        if load is None:
            return title
        blocks = f"{load.blocks_active} used, {load.blocks_cached} cached, {load.blocks_free} free"
        return f"{title}; then {load.num_running} run, {load.num_waiting} wait; blocks: {blocks}"

    @property
    def text(self) -> str:
        """The plan, under the unrecorded effects of passes as comments."""
        effects = (f"# {e.pass_name} {quoted(e.request_id)}: {e.text}\n" for e in self.effects)
        return "".join(effects) + print_plan(self.plan, self.before, tokens=False)


class ScheduleLog:
    """Records an engine step by step. For debugging: it compares every draft and copies every batch."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._effects: list[Effect] = []
        self._rows = Rows()

    def watch(self, passes: Sequence[SchedulerPass]) -> list[SchedulerPass]:
        """The same passes, each wrapped to find its unrecorded effects."""
        return [WatchedPass(inner, self._effects) for inner in passes]

    def record(
        self,
        plan: ExecutionPlan,
        now_s: float,
        arrived: Sequence[str] = (),
        outputs: Sequence[RequestOutput] = (),
        load: EngineStats | None = None,
    ) -> StepRecord:
        """Append an executed step. `arrived` came before it, `load` is the load after it."""
        ended = {
            o.request_id: f"ends ({o.finish_reason.value}{f': {o.error}' if o.error else ''}) "
            f"after {o.num_output_tokens} tokens"
            for o in outputs
            if o.finish_reason is not None
        }
        drawn = {output.request_id: len(output.new_token_ids) for output in outputs}
        step = StepRecord(plan, self._rows.copy(), now_s, self._effects[:], arrived, ended, load)
        self._effects.clear()
        self._rows.follow(plan, [drawn.get(self._rows.names.get(c.row, ""), 1) - 1 for c in plan.chains])
        self.steps.append(step)
        return step

    def diff_text(self, index: int) -> str:
        """The `diff` of step `index` against the step before it."""
        step = self.steps[index]
        if not index:
            return diff_text(ExecutionPlan(step.plan.step), step.plan, None, step.before)
        last = self.steps[index - 1]
        return diff_text(last.plan, step.plan, last.before, step.before)

    def story(self, request_id: str) -> list[str]:
        """What happened to one request, as lines; consecutive equal steps are printed once."""
        runs: list[tuple[int, int, list[str]]] = []
        for step in self.steps:
            lines = list(_lines_of(step, request_id))
            if runs and lines == runs[-1][2] and runs[-1][1] == step.plan.step - 1:
                runs[-1] = (runs[-1][0], step.plan.step, lines)
            elif lines:
                runs.append((step.plan.step, step.plan.step, lines))
        spans = [(f"step {a}" if a == b else f"steps {a} to {b}", lines) for a, b, lines in runs]
        width = max((len(span) for span, _ in spans), default=0)
        return [
            f"{span if not i else '':{width}}  {line}"
            for span, lines in spans
            for i, line in enumerate(lines)
        ]


class WatchedPass:
    """Calls the inner pass and appends its unrecorded effects to `effects`."""

    def __init__(self, inner: SchedulerPass, effects: list[Effect]) -> None:
        self.inner = inner
        self.effects = effects
        self.closes = bool(getattr(inner, "closes", False))

    @property
    def name(self) -> str:
        return self.inner.name

    def __call__(self, draft: Draft, view: SchedulingView) -> None:
        before, num_recorded = _copy(draft), len(draft.decisions)
        self.inner(draft, view)
        explained = {decision.request_id for decision in draft.decisions[num_recorded:]}
        for request_id, text in _changes(before, draft):
            if request_id not in explained:
                self.effects.append(Effect(self.name, request_id, text))


def _copy(draft: Draft) -> Draft:
    """A draft that a pass cannot reach, down to its chunks."""
    return replace(
        draft,
        running=draft.running.copy(),
        waiting=draft.waiting.copy(),
        chunks={name: replace(chunk) for name, chunk in draft.chunks.items()},
        skipped_decodes=draft.skipped_decodes.copy(),
        preempted=draft.preempted.copy(),
        rejected=draft.rejected.copy(),
        transfers=draft.transfers.copy(),
        placements=draft.placements.copy(),
    )


def _changes(before: Draft, after: Draft) -> Iterator[tuple[str, str]]:
    """Request ids and texts of what a pass has changed."""
    preempted = sorted(state.request_id for state in after.preempted.keys() - before.preempted.keys())
    yield from ((name, "preempted") for name in preempted)
    for name in after.rejected.keys() - before.rejected.keys():
        yield name, f"rejected: {after.rejected[name]}"
    gone = {state.request_id for state in after.preempted} | after.rejected.keys()
    for name in sorted(after.skipped_decodes.keys() - before.skipped_decodes.keys() - gone):
        yield name, "held: it computes nothing"
    for name in before.chunks.keys() - after.chunks.keys() - gone:
        yield name, "its chunk is taken away: it computes nothing"
    for name, chunk in after.chunks.items():
        old = before.chunks.get(name)
        if old is None:
            yield name, f"{'admitted: ' if chunk.admits else ''}computes tokens {chunk.start}:{chunk.end}"
        elif (old.start, old.end, old.admits) != (chunk.start, chunk.end, chunk.admits):
            yield name, f"computes tokens {chunk.start}:{chunk.end}, before it {old.start}:{old.end}"
    sent = {(sent.request_id, sent.target_instance) for sent in after.transfers}
    sent -= {(sent.request_id, sent.target_instance) for sent in before.transfers}
    yield from ((name, f"its blocks are sent to @{target}") for name, target in sorted(sent))
    for name, placement in after.placements.items():
        if before.placements.get(name) != placement:
            yield name, f"placed: {placement_text(placement)}"
    yield from _moved(before.waiting, after.waiting, "in the queue")
    yield from _moved(before.running, after.running, "in the batch")


def _moved(
    before: Sequence[RequestState], after: Sequence[RequestState], where: str
) -> Iterator[tuple[str, str]]:
    """Requests that moved forward."""
    positions = {state: position for position, state in enumerate(before, 1)}
    for position, state in enumerate(after, 1):
        if position < positions.get(state, 0):
            yield state.request_id, f"moved {where} from place {positions[state]} to {position}"


def _lines_of(step: StepRecord, request_id: str) -> Iterator[str]:
    """What happened to one request in one step, in order."""
    if request_id in step.arrived:
        yield "arrived"
    for effect in step.effects:
        if effect.request_id == request_id:
            yield f"{effect.pass_name}: {effect.text}"
    for decision in step.plan.decisions:
        if decision.request_id == request_id:
            yield f"{decision.pass_name}: {decision.action}" + (
                f", {decision.reason}" if decision.reason else ""
            )
    yield from _work_of(step, request_id)
    if request_id in step.ended:
        yield step.ended[request_id]


def _work_of(step: StepRecord, request_id: str) -> Iterator[str]:
    plan, names = step.plan, step.before.names
    if request_id in plan.preempted:
        yield "preempted: its blocks are given back, it waits again"
    for join in plan.joined:
        if join.request_id == request_id:
            again = "resumes" if request_id in step.before.preempted else "joins"
            cached = f"{join.num_computed} tokens cached"
            yield f"{again} in row {join.row} with {cached}, blocks {numbers(join.block_ids)}"
    for delta in plan.table_deltas:
        if names.get(delta.row) == request_id:
            yield f"gets blocks {numbers(delta.block_ids)} from {delta.first} on"
    for op in plan.prefills:
        if op.request_id == request_id:
            drawn = ", and draws a token" if op.samples else ""
            yield f"computes prompt tokens {op.start}:{op.start + op.num_tokens}{drawn}"
    if any(names.get(row) == request_id for row in plan.decode_rows):
        proposed = sum(len(chain.token_ids) for chain in plan.chains if names.get(chain.row) == request_id)
        yield f"decodes, with {proposed} proposed tokens" if proposed else "decodes"
    for sent in plan.transfers:
        if sent.request_id == request_id:
            yield f"sends blocks {numbers(sent.block_ids)} to @{sent.target_instance}"
