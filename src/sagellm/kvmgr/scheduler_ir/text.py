"""The text form of a graph: one operation per line, as in MLIR.

    step 12 @local
    // chunked_prefill admit "c": "13 tokens from 8 on"
    %0 = leave row 3 "b"
    %1 = join row 3 "c" computed 8 prompt 21 blocks [0:2, 7] tokens [100:121] after %0
    %2 = decode row 1 "a" at 12
    %3 = prefill row 3 "c" tokens 8:21 samples after %1

Each instance has a header line, then the decisions of its passes; the operations follow. `a:b` stands for
a, a + 1, ..., b - 1. Lines that begin with # are comments and are not kept. The text is complete:
`parse_graph` gives back the graph that `print_graph` printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NoReturn

from sagellm.core.errors import PlanError, RequestError, nearest
from sagellm.core.ir import (
    BOTH_PHASES,
    LOCAL,
    BlockTableOp,
    CopyOp,
    DecodeOp,
    InstanceStep,
    JoinOp,
    LeaveOp,
    Operation,
    Phase,
    PlaceOp,
    PreemptOp,
    PrefillOp,
    RejectOp,
    TransferOp,
)
from sagellm.core.plan import (
    BlockCopy,
    BlockTableDelta,
    Decision,
    ExecutionPlan,
    Join,
    PhasePlacement,
    Prefill,
    Transfer,
)
from sagellm.core.types import SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir.graph import IRGraph
from sagellm.kvmgr.scheduler_ir.rows import Rows

MIN_RUN = 3
"""At least this many consecutive numbers are written as a range."""
MAX_RANGE = 1 << 24
"""Most numbers that one range may stand for."""
SPACE = re.compile(r"[ \t\r]*")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
WORD_PART = re.compile(r"[A-Za-z0-9_.\-]")
NUMBER = re.compile(r"-?[0-9]{1,18}")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
ANYTHING = re.compile(r'"(?:[^"\\]|\\.)*"?|[%@]?[A-Za-z0-9_.\-]+|.')
PLACEMENT_PARTS = [field.name for field in fields(PhasePlacement)]
DEFAULT_PARAMS = SamplingParams()
PARAM_NAMES = [field.name for field in fields(SamplingParams)]


def print_graph(graph: IRGraph, *, tokens: bool = True) -> str:
    """The graph as text; equal graphs give equal texts.

    Without `tokens`, the tokens of joins are only counted: shorter, but `parse_graph` cannot read it.
    """
    lines = []
    for step in graph.instances:
        lines.append(_header(step))
        lines += map(_decision, step.decisions)
    first = graph.instances[0].name if graph.instances else None
    lines += [_line(op, first, tokens=tokens) for op in graph.ops]
    return "".join(f"{line}\n" for line in lines)


def parse_graph(text: str) -> IRGraph:
    """The graph of a text. Raises `PlanError` with line, column and what was expected there."""
    return GraphReader().read(text)


def print_plan(plan: ExecutionPlan, rows: Rows | None = None, *, tokens: bool = True) -> str:
    """The text of a plan. `rows`, the batch before it, says which request is in which row."""
    return print_graph(IRGraph.of(plan, rows=rows), tokens=tokens)


def parse_plan(text: str) -> ExecutionPlan:
    """The plan of a text with one instance."""
    return parse_graph(text).to_plan()


# -- printing


def _header(step: InstanceStep) -> str:
    header = f"step {step.step} {instance(step.name)}"
    if step.phases != BOTH_PHASES:
        header += "".join(f" for {phase.value}" for phase in Phase if phase in step.phases) or " for none"
    return header + (f" drafts {step.num_draft_tokens}" if step.num_draft_tokens else "")


def _decision(decision: Decision) -> str:
    text = f"// {word(decision.pass_name)} {word(decision.action)} {quoted(decision.request_id)}"
    return text + (f": {quoted(decision.reason)}" if decision.reason else "")


def _line(op: Operation, first_instance: str | None, *, tokens: bool) -> str:
    body = _join(op, tokens=tokens) if isinstance(op, JoinOp) else _body(op)
    parts = [f"%{op.op_id} = {body}"]
    if op.instance != first_instance:
        parts.append(f"on {instance(op.instance)}")
    if op.after:
        parts.append("after " + ", ".join(f"%{op_id}" for op_id in op.after))
    return " ".join(parts)


def _body(op: Operation) -> str:
    """The part of a line that is special to the kind of operation."""
    match op:
        case PreemptOp():
            return f"preempt {quoted(op.request)}"
        case RejectOp():
            return f"reject {quoted(op.request)} because {quoted(op.reason)}"
        case PlaceOp():
            parts = ((part, getattr(op.placement, part)) for part in PLACEMENT_PARTS)
            return f"place {quoted(op.request)}" + "".join(
                f" {part} {instance(at)}" for part, at in parts if at
            )
        case LeaveOp():
            return f"leave {_row(op.row, op.request)}"
        case BlockTableOp():
            start, blocks = op.delta.first, numbers(op.delta.block_ids)
            return f"table {_row(op.row, op.request)} from {start} blocks {blocks}"
        case CopyOp():
            (source, block), (target, target_block) = op.source, op.target
            return f"copy {word(source)} {block} to {word(target)} {target_block}"
        case DecodeOp():
            return f"decode {_row(op.row, op.request)} at {op.position}"
        case PrefillOp():
            text = f"prefill {_row(op.row, op.request_id)} tokens {op.start}:{op.end}"
            text += " samples" if op.samples else ""
            return text if op.phase is Phase.PREFILL else f"{text} phase {op.phase.value}"
        case TransferOp():
            blocks, target = numbers(op.transfer.block_ids), instance(op.transfer.target_instance)
            return f"transfer {quoted(op.request_id)} blocks {blocks} to {target}"
    return op.word


def _join(op: JoinOp, *, tokens: bool) -> str:
    join = op.join
    token_ids = Tokens.frombytes(join.tokens)
    parts = [
        "resume" if op.resumes else "join",
        _row(join.row, join.request_id),
        f"computed {join.num_computed} prompt {join.num_prompt_tokens} blocks {numbers(join.block_ids)}",
        f"tokens {numbers(token_ids)}" if tokens else f"of {len(token_ids)} tokens",
    ]
    params = {name: getattr(join.params, name) for name in PARAM_NAMES}
    changed = {name: value for name, value in params.items() if value != getattr(DEFAULT_PARAMS, name)}
    if changed:
        as_json = {
            name: [*map(list, value.items())] if isinstance(value, Mapping) else value
            for name, value in changed.items()
        }
        parts.append(f"params {json.dumps(as_json)}")
    if join.eos_token_ids:
        parts.append(f"eos {numbers(sorted(join.eos_token_ids))}")
    return " ".join(parts)


def _row(row: int, request: str | None) -> str:
    return f"row {row}" if request is None else f"row {row} {quoted(request)}"


def quoted(text: str) -> str:
    """A JSON string; characters that cannot be seen are escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def word(text: str) -> str:
    """The text itself if it is one word, else quoted."""
    return text if WORD.fullmatch(text) else quoted(text)


def instance(name: str) -> str:
    return f"@{word(name)}"


def numbers(values: Iterable[int]) -> str:
    """A list in which runs of consecutive numbers are ranges: `[1, 4:7]`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}:{run[-1] + 1}"] if len(run) >= MIN_RUN else map(str, run)
    return f"[{', '.join(parts)}]"


# -- reading


@dataclass(slots=True)
class Line:
    """A cursor over one line.

    Each reading method moves it behind what it read, or raises `PlanError` with the column.
    """

    number: int
    text: str
    at: int = 0

    def expected(self, what: str, *, back_to: int | None = None) -> NoReturn:
        """Raise `PlanError` for the text at the cursor, or at `back_to`."""
        if back_to is not None:
            self.at = back_to
        self._skip()
        found = ANYTHING.match(self.text, self.at)
        seen = f"found {found.group()}" if found else "the line ends"
        raise PlanError(f"line {self.number}, column {self.at + 1}: expected {what}, {seen}")

    def ends(self) -> bool:
        self._skip()
        return self.at == len(self.text)

    def has(self, literal: str) -> bool:
        """Read that word or sign if it comes next; returns whether it does."""
        self._skip()
        end = self.at + len(literal)
        if not self.text.startswith(literal, self.at):
            return False
        if literal.isalpha() and WORD_PART.match(self.text, end):
            return False
        self.at = end
        return True

    def take(self, literal: str) -> None:
        if not self.has(literal):
            self.expected(f"'{literal}'")

    def integer(self, what: str) -> int:
        return int(self._match(NUMBER, what))

    def string(self, what: str) -> str:
        start = self.at
        try:
            text = json.loads(self._match(STRING, f"{what} in double quotes"))
        except ValueError:
            self.expected(f"{what} as a JSON string", back_to=start)
        return str(text)

    def word(self, what: str) -> str:
        """A word or a quoted text."""
        self._skip()
        return self.string(what) if self.text.startswith('"', self.at) else self._match(WORD, what)

    def instance(self) -> str:
        if not self.has("@"):
            self.expected("an instance, as @name")
        return self.word("the instance's name")

    def op_ids(self) -> tuple[int, ...]:
        found = [self.op_id()]
        while self.has(","):
            found.append(self.op_id())
        return tuple(found)

    def op_id(self) -> int:
        if not self.has("%"):
            self.expected("an operation, as %0")
        return self.integer("the operation's number")

    def numbers(self, what: str) -> list[int]:
        """The numbers 1, 4, 5, 6 of `[1, 4:7]`."""
        if not self.has("["):
            self.expected(f"{what} as [1, 4:7]")
        found: list[int] = []
        while not self.has("]"):
            if found and not self.has(","):
                self.expected("',' or ']'")
            start = self.integer("a number or a range")
            if not self.has(":"):
                found.append(start)
                continue
            start_of_stop = self.at
            stop = self.integer("the end of the range")
            if not start < stop <= start + MAX_RANGE:
                self.expected(f"an end from {start + 1} to {start + MAX_RANGE}", back_to=start_of_stop)
            found += range(start, stop)
        return found

    def json(self, what: str) -> Any:
        self._skip()
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        except (ValueError, RecursionError):
            self.expected(what)
        return value

    def _skip(self) -> None:
        found = SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self._skip()
        found = pattern.match(self.text, self.at)
        if found is None:
            self.expected(what)
        self.at = found.end()
        return found.group()


class GraphReader:
    """Reads one text into a graph."""

    def __init__(self) -> None:
        self._instances: list[InstanceStep] = []
        self._decisions: list[list[Decision]] = []
        self._ops: list[Operation] = []

    def read(self, text: str) -> IRGraph:
        for number, content in enumerate(text.split("\n"), 1):
            line = Line(number, content)
            if line.ends() or line.has("#"):
                continue
            if line.has("step"):
                self._header(line)
            elif line.has("//"):
                self._decision(line)
            elif line.text.startswith("%", line.at):
                self._operation(line)
            else:
                line.expected("'step', '//' or an operation, as %0 = ...")
            if not line.ends():
                line.expected("the end of the line")
        instances = (
            replace(step, decisions=tuple(decisions))
            for step, decisions in zip(self._instances, self._decisions, strict=True)
        )
        return IRGraph(tuple(instances), tuple(self._ops))

    def _header(self, line: Line) -> None:
        step, name = line.integer("the number of the step"), line.instance()
        phases: set[Phase] = set()
        given = False
        while line.has("for"):
            given = True
            if not line.has("none"):
                phases.add(_phase(line))
        num_draft_tokens = line.integer("the number of tokens to draft") if line.has("drafts") else 0
        able = frozenset(phases) if given else BOTH_PHASES
        self._instances.append(InstanceStep(name, step, able, num_draft_tokens))
        self._decisions.append([])

    def _decision(self, line: Line) -> None:
        if not self._instances:
            line.expected("a line 'step N @instance' before decisions", back_to=0)
        pass_name, action = line.word("the name of a pass"), line.word("what it did")
        request = line.string("the request")
        reason = line.string("the reason") if line.has(":") else ""
        self._decisions[-1].append(Decision(pass_name, request, action, reason))

    def _operation(self, line: Line) -> None:
        op_id = line.op_id()
        line.take("=")
        start = line.at
        kind = line.word("an operation")
        kind = "table" if kind == "grow" else kind  # older texts
        if kind not in READERS:
            line.expected(f"one of {', '.join(READERS)}", back_to=start)
        make = READERS[kind](line)
        first = self._instances[0].name if self._instances else LOCAL
        instance_name = line.instance() if line.has("on") else first
        after = line.op_ids() if line.has("after") else ()
        self._ops.append(make(op_id=op_id, instance=instance_name, after=after))


Make = Callable[..., Operation]
"""Makes an operation from its `op_id`, `instance` and `after`; the rest was read."""


def _reject(line: Line) -> Make:
    request = line.string("a request")
    line.take("because")
    return partial(RejectOp, request=request, reason=line.string("a reason"))


def _place(line: Line) -> Make:
    request = line.string("a request")
    parts = {part: line.instance() for part in PLACEMENT_PARTS if line.has(part)}
    return partial(PlaceOp, request=request, placement=PhasePlacement(**parts))


def _leave(line: Line) -> Make:
    row, request = _read_row(line)
    return partial(LeaveOp, row=row, request=request)


def _read_join(line: Line, *, resumes: bool = False) -> Make:
    row, request = _named_row(line)
    line.take("computed")
    computed = line.integer("the number of computed tokens")
    line.take("prompt")
    prompt = line.integer("the number of prompt tokens")
    line.take("blocks")
    blocks = tuple(line.numbers("blocks"))
    line.take("tokens")
    start = line.at
    try:
        tokens = Tokens(line.numbers("token ids")).tobytes()
    except OverflowError:
        line.expected("token ids of 32 bits", back_to=start)
    params = _params(line) if line.has("params") else SamplingParams()
    eos = frozenset(line.numbers("token ids")) if line.has("eos") else frozenset[int]()
    join = Join(row, request, tokens, prompt, computed, blocks, params, eos)
    return partial(JoinOp, join=join, resumes=resumes)


def _params(line: Line) -> SamplingParams:
    start = line.at
    given = line.json("sampling parameters as a JSON object")
    if not isinstance(given, dict):
        line.expected("sampling parameters as a JSON object", back_to=start)
    for name in sorted(given.keys() - set(PARAM_NAMES)):
        line.expected(f"names of sampling parameters.{nearest(name, PARAM_NAMES)}", back_to=start)
    try:
        return SamplingParams(**{name: _param(name, value) for name, value in given.items()})
    except (RequestError, TypeError, ValueError) as error:
        line.expected(f"sampling parameters that are valid ({error})", back_to=start)


def _param(name: str, value: Any) -> Any:
    """A field of `SamplingParams` from JSON, which has lists for tuples and pairs."""
    if name == "logit_bias":
        return {int(key): bias for key, bias in value}
    return tuple(value) if isinstance(value, list) else value


def _table(line: Line) -> Make:
    row, request = _read_row(line)
    line.take("from")
    first = line.integer("an index into the table")
    line.take("blocks")
    delta = BlockTableDelta(row, first, tuple(line.numbers("blocks")))
    return partial(BlockTableOp, delta=delta, request=request)


def _copy(line: Line) -> Make:
    source = line.word("a tier"), line.integer("a block")
    line.take("to")
    target = line.word("a tier"), line.integer("a block")
    return partial(CopyOp, copy=BlockCopy(*source, *target))


def _decode(line: Line) -> Make:
    row, request = _read_row(line)
    line.take("at")
    return partial(DecodeOp, row=row, position=line.integer("a position"), request=request)


def _prefill(line: Line) -> Make:
    row, request = _named_row(line)
    line.take("tokens")
    start = line.integer("the first token")
    line.take(":")
    end = line.integer("the end of the tokens")
    prefill = Prefill(row, request, start, end - start, line.has("samples"))
    phase = _phase(line) if line.has("phase") else Phase.PREFILL
    return partial(PrefillOp, prefill=prefill, phase=phase)


def _transfer(line: Line) -> Make:
    request = line.string("a request")
    line.take("blocks")
    blocks = tuple(line.numbers("blocks"))
    line.take("to")
    return partial(TransferOp, transfer=Transfer(request, blocks, line.instance()))


def _phase(line: Line) -> Phase:
    start = line.at
    try:
        return Phase(line.word("a phase"))
    except ValueError:
        line.expected("prefill or decode", back_to=start)


def _read_row(line: Line) -> tuple[int, str | None]:
    line.take("row")
    row = line.integer("the number of a row")
    return row, line.string("the request") if not line.ends() and line.text[line.at] == '"' else None


def _named_row(line: Line) -> tuple[int, str]:
    row, request = _read_row(line)
    if request is None:
        line.expected("the request in double quotes")
    return row, request


READERS: Mapping[str, Callable[[Line], Make]] = {
    "preempt": lambda line: partial(PreemptOp, request=line.string("a request")),
    "reject": _reject,
    "place": _place,
    "leave": _leave,
    "join": _read_join,
    "resume": partial(_read_join, resumes=True),
    "table": _table,
    "copy": _copy,
    "decode": _decode,
    "prefill": _prefill,
    "transfer": _transfer,
}
