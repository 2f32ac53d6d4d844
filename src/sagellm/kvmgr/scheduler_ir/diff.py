"""What differs between two plans, request by request.

The plans may be two steps of one run, or one step under two schedulers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from sagellm.core.plan import ExecutionPlan, PhasePlacement
from sagellm.kvmgr.scheduler_ir.rows import Rows
from sagellm.kvmgr.scheduler_ir.text import numbers, quoted


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `sign` is + for added in the second plan, - for missing there, ~ for changed.
    `request_id` is None where the difference concerns no single request."""

    sign: str
    request_id: str | None
    text: str

    def __str__(self) -> str:
        request = "" if self.request_id is None else f"{quoted(self.request_id)} "
        return f"{self.sign} {request}{self.text}"


@dataclass(slots=True)
class RequestPart:
    """What one plan does with one request, as texts. Empty: it does not."""

    fates: list[str] = field(default_factory=list)
    left: bool = False
    placed: str = ""
    join: str = ""
    blocks: str = ""
    work: str = ""
    position: int | None = None
    """Of the token that it decodes."""
    chain: tuple[int, ...] = ()
    """The tokens that are proposed behind it."""
    parents: tuple[int, ...] = ()
    """Of a tree of them."""


def diff(
    a: ExecutionPlan, b: ExecutionPlan, rows_a: Rows | None = None, rows_b: Rows | None = None
) -> list[Change]:
    """The changes from `a` to `b`, with the reasons that passes gave in `b`.

    `rows_a` and `rows_b`, the batches before them, give the request ids of rows; a row without one is printed
    as row N. Between plans of different steps, a decode that continues is no change, nor is an event of `a`
    (joined, left, got blocks, ...) that does not happen again.
    """
    parts_a, parts_b = _parts(a, rows_a), _parts(b, rows_b)
    if a.step != b.step:
        parts_a = {
            name: RequestPart(placed=part.placed, work=part.work, position=part.position, chain=part.chain)
            for name, part in parts_a.items()
        }
    reasons = {decision.request_id: decision for decision in b.decisions}
    found: list[Change] = []
    for name in dict.fromkeys([*parts_a, *parts_b]):
        before, after = parts_a.get(name, RequestPart()), parts_b.get(name, RequestPart())
        changes = list(_of_request(name, before, after, b.step - a.step))
        reason = reasons.get(name)
        if changes and reason is not None and reason.reason:
            text = f"{changes[0].text} ({reason.pass_name}: {reason.reason})"
            changes[0] = replace(changes[0], text=text)
        found += changes
    return [*found, *_moves(a, b)]


def diff_text(
    a: ExecutionPlan, b: ExecutionPlan, rows_a: Rows | None = None, rows_b: Rows | None = None
) -> str:
    """`diff` as text, one line per change; empty for plans that do the same."""
    return "".join(f"{change}\n" for change in diff(a, b, rows_a, rows_b))


def placement_text(placement: PhasePlacement) -> str:
    """The parts that another instance computes, as `prefill @p0, decode @d0`."""
    at = {part.name: getattr(placement, part.name) for part in fields(placement)}
    return ", ".join(f"{part} @{name}" for part, name in at.items() if name)


def _parts(plan: ExecutionPlan, rows: Rows | None) -> dict[str, RequestPart]:
    """What the plan does, by request id or `row N`, in its order."""
    names = {} if rows is None else rows.names
    parts: defaultdict[str, RequestPart] = defaultdict(RequestPart)

    def part_in(row: int) -> RequestPart:
        return parts[names.get(row, f"row {row}")]

    for request in plan.preempted:
        parts[request].fates.append("preempted")
    for request, reason in plan.rejected:
        parts[request].fates.append(f"rejected: {reason}")
    for request, placement in plan.placements:
        parts[request].placed = placement_text(placement)
    for row in plan.left:
        part_in(row).left = True
        names.pop(row, None)
    for join in plan.joined:
        names[join.row] = join.request_id
        parts[join.request_id].join = f"row {join.row}, {join.num_computed} tokens computed"
        parts[join.request_id].blocks = _blocks(0, join.block_ids)
    names |= {op.row: op.request_id for op in plan.prefills}
    for delta in plan.table_deltas:
        part_in(delta.row).blocks = _blocks(delta.first, delta.block_ids)
    for op in plan.prefills:
        samples = ", samples" if op.samples else ""
        parts[op.request_id].work = f"prompt tokens {op.start}:{op.start + op.num_tokens}{samples}"
    for row, position in zip(plan.decode_rows, plan.decode_positions, strict=True):
        part = part_in(row)
        part.position, part.work = position, part.work or f"decode at {position}"
    for chain in plan.chains:
        part_in(chain.row).chain, part_in(chain.row).parents = chain.token_ids, chain.parents
    return parts


def _blocks(first: int, block_ids: Sequence[int]) -> str:
    return f"{numbers(block_ids)} from {first}" if block_ids else ""


def _of_request(name: str, a: RequestPart, b: RequestPart, num_steps: int) -> Iterator[Change]:
    for fate in a.fates:
        if fate not in b.fates:
            yield Change("-", name, fate)
    for fate in b.fates:
        if fate not in a.fates:
            yield Change("+", name, fate)
    if a.left != b.left:
        yield Change("+" if b.left else "-", name, "left")
    yield from _either(name, "placed", a.placed, b.placed)
    yield from _either(name, "joined", a.join, b.join)
    if not _decodes_on(a, b, num_steps):
        yield from _either(name, "computes", a.work, b.work, "before" if num_steps else "not")
    before = RequestPart() if num_steps else a
    yield from _either(name, "proposed are", _proposed(before), _proposed(b))
    yield from _either(name, "blocks", a.blocks, b.blocks)


def _proposed(part: RequestPart) -> str:
    chain = numbers(part.chain) if part.chain else ""
    return f"{chain} behind {numbers(part.parents)}" if part.parents else chain


def _decodes_on(a: RequestPart, b: RequestPart, num_steps: int) -> bool:
    """Whether `b` decodes what follows `a`, of whose chain any part may count."""
    if a.position is None or b.position is None:
        return False
    if not num_steps:
        return a.position == b.position
    return 0 <= b.position - a.position - num_steps <= (len(a.chain) if num_steps == 1 else 0)


def _either(name: str, what: str, a: str, b: str, other: str = "not") -> Iterator[Change]:
    """The change of one text, which may be empty before or after."""
    if a and b and a != b:
        yield Change("~", name, f"{what} {b}, {other} {a}")
    elif a != b:
        yield Change("+" if b else "-", name, f"{what} {b or a}")


def _moves(a: ExecutionPlan, b: ExecutionPlan) -> Iterator[Change]:
    """Copies, transfers and the number of draft tokens, where the plans differ."""
    if a.num_draft_tokens != b.num_draft_tokens:
        yield Change(
            "~", None, f"drafts {b.num_draft_tokens} tokens for each decode, not {a.num_draft_tokens}"
        )
    for sign, plan, other in (("-", a, b), ("+", b, a)):
        if sign == "-" and a.step != b.step:
            continue
        for copy in plan.copies:
            if copy not in other.copies:
                yield Change(sign, None, f"copy {copy.source} to {copy.target}")
        for sent in plan.transfers:
            if sent not in other.transfers:
                blocks = numbers(sent.block_ids)
                yield Change(sign, sent.request_id, f"sends blocks {blocks} to @{sent.target_instance}")
