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
    KeepOp,
    LeaveOp,
    Operation,
    Phase,
    PlaceOp,
    PreemptOp,
    PrefillOp,
    RejectOp,
    TransferOp,
)
from sagellm.core.plan import Decision, ExecutionPlan, PhasePlacement
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
DEFAULT_PARAMS = SamplingParams()
PARAM_NAMES = [field.name for field in fields(SamplingParams)]


def print_graph(graph: IRGraph, *, tokens: bool = True) -> str:
    """The graph as text; equal graphs give equal texts. Without `tokens`, the tokens of joins are only
    counted: shorter, but `parse_graph` cannot read it."""
    lines = []
    for step in graph.instances:
        lines.append(_header(step))
        for decision in step.decisions:
            text = f"// {word(decision.pass_name)} {word(decision.action)} {quoted(decision.request_id)}"
            lines.append(text + (f": {quoted(decision.reason)}" if decision.reason else ""))
    first = graph.instances[0].name if graph.instances else None
    lines += [_line(op, first, tokens=tokens) for op in graph.ops]
    return "".join(f"{line}\n" for line in lines)


def print_plan(plan: ExecutionPlan, rows: Rows | None = None, *, tokens: bool = True) -> str:
    """The text of a plan. `rows`, the batch before it, says which request is in which row."""
    return print_graph(IRGraph.of(plan, rows=rows), tokens=tokens)


# -- printing


def _header(step: InstanceStep) -> str:
    header = f"step {step.step} {instance(step.name)}"
    if step.phases != BOTH_PHASES:
        header += "".join(f" for {phase.value}" for phase in Phase if phase in step.phases) or " for none"
    return header + (f" drafts {step.num_draft_tokens}" if step.num_draft_tokens else "")


def _line(op: Operation, first_instance: str | None, *, tokens: bool) -> str:
    kind = "resume" if isinstance(op, JoinOp) and op.resumes else op.word
    line = f"%{op.op_id} = {kind}"
    for part in FORMS[kind].parts:
        value = getattr(op, part.field)
        if value == part.default:
            continue
        if part.form is TOKENS and not tokens:
            line += f" of {len(Tokens.frombytes(value))} tokens"
            continue
        written = " ".join(filter(None, (part.keyword, part.form.write(value))))
        line += f":{value}" if part.keyword == ":" else f" {written}"
    if op.instance != first_instance:
        line += f" on {instance(op.instance)}"
    if op.after:
        line += " after " + ", ".join(f"%{op_id}" for op_id in op.after)
    return line


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
    """A cursor over one line. Each reading method moves it behind what it read, or raises `PlanError` with
    the column."""

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

    def begins(self, sign: str) -> bool:
        """Whether the rest of the line begins with that sign."""
        self._skip()
        return self.text.startswith(sign, self.at)

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
        return self.string(what) if self.begins('"') else self._match(WORD, what)

    def instance(self, _what: str = "") -> str:
        if not self.has("@"):
            self.expected("an instance, as @name")
        return self.word("the instance's name")

    def op_id(self) -> int:
        if not self.has("%"):
            self.expected("an operation, as %0")
        return self.integer("the operation's number")

    def numbers(self, what: str) -> tuple[int, ...]:
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
        return tuple(found)

    def phase(self, what: str = "a phase") -> Phase:
        start = self.at
        try:
            return Phase(self.word(what))
        except ValueError:
            self.expected("prefill or decode", back_to=start)

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


def parse_graph(text: str) -> IRGraph:
    """The graph of a text. Raises `PlanError` with line, column and what was expected there."""
    instances: list[InstanceStep] = []
    ops: list[Operation] = []
    for number, content in enumerate(text.split("\n"), 1):
        line = Line(number, content)
        if line.ends() or line.has("#"):
            continue
        if line.has("step"):
            instances.append(_read_header(line))
        elif line.has("//"):
            if not instances:
                line.expected("a line 'step N @instance' before decisions", back_to=0)
            step = instances[-1]
            instances[-1] = replace(step, decisions=(*step.decisions, _read_decision(line)))
        elif line.begins("%"):
            ops.append(_read_operation(line, instances[0].name if instances else LOCAL))
        else:
            line.expected("'step', '//' or an operation, as %0 = ...")
        if not line.ends():
            line.expected("the end of the line")
    return IRGraph(tuple(instances), tuple(ops))


def parse_plan(text: str) -> ExecutionPlan:
    """The plan of a text with one instance."""
    return parse_graph(text).to_plan()


def _read_header(line: Line) -> InstanceStep:
    step, name = line.integer("the number of the step"), line.instance()
    phases: set[Phase] | None = None
    while line.has("for"):
        phases = phases or set()
        if not line.has("none"):
            phases.add(line.phase())
    num_draft_tokens = line.integer("the number of tokens to draft") if line.has("drafts") else 0
    return InstanceStep(name, step, BOTH_PHASES if phases is None else frozenset(phases), num_draft_tokens)


def _read_decision(line: Line) -> Decision:
    pass_name, action = line.word("the name of a pass"), line.word("what it did")
    request = line.string("the request")
    return Decision(pass_name, request, action, line.string("the reason") if line.has(":") else "")


def _read_operation(line: Line, first_instance: str) -> Operation:
    op_id = line.op_id()
    line.take("=")
    start = line.at
    kind = line.word("an operation")
    kind = "table" if kind == "grow" else kind  # older texts
    if kind not in FORMS:
        line.expected(f"one of {', '.join(FORMS)}", back_to=start)
    values = {}
    for part in FORMS[kind].parts:
        values[part.field] = part.form.read(line, part.what) if part.comes(line) else part.default
    instance_name = line.instance() if line.has("on") else first_instance
    after = [line.op_id()] if line.has("after") else []
    while after and line.has(","):
        after.append(line.op_id())
    return FORMS[kind].make(op_id=op_id, instance=instance_name, after=tuple(after), **values)


# -- how the fields of operations are written and read


@dataclass(frozen=True, slots=True)
class ValueForm:
    """How values of one kind are written and read. `read` gets the line, and what an error expects."""

    write: Callable[[Any], str]
    read: Callable[[Line, str], Any]


def _params_text(params: SamplingParams) -> str:
    """The parameters that differ from their defaults. JSON has lists for tuples and pairs."""
    values = {name: getattr(params, name) for name in PARAM_NAMES}
    changed = {name: value for name, value in values.items() if value != getattr(DEFAULT_PARAMS, name)}
    return json.dumps(
        {name: [*map(list, v.items())] if isinstance(v, Mapping) else v for name, v in changed.items()}
    )


def _read_params(line: Line, what: str) -> SamplingParams:
    start = line.at
    given = line.json(what)
    if not isinstance(given, dict):
        line.expected(what, back_to=start)
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


def _read_tokens(line: Line, what: str) -> bytes:
    start = line.at
    try:
        return Tokens(line.numbers(what)).tobytes()
    except OverflowError:
        line.expected("token ids of 32 bits", back_to=start)


FLAG = ValueForm(lambda _: "", lambda line, what: True)
INTEGER = ValueForm(str, Line.integer)
WORD_FORM = ValueForm(word, Line.word)
STRING_FORM = ValueForm(quoted, Line.string)
NUMBERS = ValueForm(numbers, Line.numbers)
NUMBER_SET = ValueForm(lambda ids: numbers(sorted(ids)), lambda line, what: frozenset(line.numbers(what)))
INSTANCE = ValueForm(instance, Line.instance)
PHASE = ValueForm(lambda phase: phase.value, Line.phase)
PARAMS = ValueForm(_params_text, _read_params)
TOKENS = ValueForm(lambda data: numbers(Tokens.frombytes(data)), _read_tokens)

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Part:
    """One field in an operation's line: a keyword, or "", and the value. `what` names the value in errors. A
    part with a default is left out where the field has it."""

    keyword: str
    field: str
    form: ValueForm
    what: str = ""
    default: Any = REQUIRED

    def comes(self, line: Line) -> bool:
        """Read the keyword. False if the part is left out."""
        if self.default is REQUIRED:
            line.take(self.keyword)
            return True
        return line.has(self.keyword) if self.keyword else line.begins('"')


@dataclass(frozen=True, slots=True)
class OperationForm:
    """How operations of one kind are made, and the parts of their lines."""

    make: Callable[..., Operation]
    parts: tuple[Part, ...]


REQUEST = Part("", "request_id", STRING_FORM, "a request")
ROW = Part("row", "row", INTEGER, "the number of a row")
IN_ROW = (ROW, Part("", "request_id", STRING_FORM, "the request"))
MAYBE_IN_ROW = (ROW, Part("", "request_id", STRING_FORM, "the request", default=None))
BLOCKS = Part("blocks", "block_ids", NUMBERS, "blocks")
JOIN = (
    *IN_ROW,
    Part("computed", "num_computed", INTEGER, "the number of computed tokens"),
    Part("prompt", "num_prompt_tokens", INTEGER, "the number of prompt tokens"),
    BLOCKS,
    Part("tokens", "tokens", TOKENS, "token ids"),
    Part("params", "params", PARAMS, "sampling parameters as a JSON object", default=DEFAULT_PARAMS),
    Part("eos", "eos_token_ids", NUMBER_SET, "token ids", default=frozenset()),
    Part("state", "state_pages", NUMBERS, "the blocks of a recurrent state", default=()),
)
PREFILL = (
    *IN_ROW,
    Part("tokens", "start", INTEGER, "the first token"),
    Part(":", "end", INTEGER, "the end of the tokens"),
    Part("samples", "samples", FLAG, default=False),
    Part("phase", "phase", PHASE, "a phase", default=Phase.PREFILL),
)
COPY = (
    Part("", "source", INTEGER, "a block"),
    Part("to", "target", INTEGER, "a block"),
)
PLACES = tuple(Part(field.name, field.name, INSTANCE, default="") for field in fields(PhasePlacement))
DECODE = (
    *MAYBE_IN_ROW,
    Part("at", "position", INTEGER, "a position"),
    Part("chain", "chain", NUMBERS, "the proposed tokens", default=()),
    Part("parents", "parents", NUMBERS, "the parents of the tokens", default=()),
)
KEEP = (
    *MAYBE_IN_ROW,
    Part("behind", "num_tokens", INTEGER, "a number of tokens"),
    Part("in", "pages", NUMBERS, "the blocks of a recurrent state"),
)
TABLE = (*MAYBE_IN_ROW, Part("from", "first", INTEGER, "an index into the table"), BLOCKS)
FORMS: Mapping[str, OperationForm] = {
    "preempt": OperationForm(PreemptOp, (REQUEST,)),
    "reject": OperationForm(RejectOp, (REQUEST, Part("because", "reason", STRING_FORM, "a reason"))),
    "place": OperationForm(PlaceOp, (REQUEST, *PLACES)),
    "leave": OperationForm(LeaveOp, MAYBE_IN_ROW),
    "join": OperationForm(JoinOp, JOIN),
    "resume": OperationForm(partial(JoinOp, resumes=True), JOIN),
    "table": OperationForm(BlockTableOp, TABLE),
    "copy": OperationForm(CopyOp, COPY),
    "decode": OperationForm(DecodeOp, DECODE),
    "prefill": OperationForm(PrefillOp, PREFILL),
    "keep": OperationForm(KeepOp, KEEP),
    "transfer": OperationForm(TransferOp, (REQUEST, BLOCKS, Part("to", "target_instance", INSTANCE))),
}
