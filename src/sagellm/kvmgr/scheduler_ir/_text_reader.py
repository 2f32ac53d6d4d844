"""Reads the text form of a graph: a cursor over one line, and a method for each kind of line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, TypedDict

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
from sagellm.core.plan import BlockCopy, BlockTableDelta, Decision, Join, Placement, Prefill, Transfer
from sagellm.core.types import SamplingParams, Tokens
from sagellm.kvmgr.scheduler_ir.graph import IRGraph

SPACE = re.compile(r"[ \t\r]*")
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
WORD_PART = re.compile(r"[A-Za-z0-9_.\-]")
NUMBER = re.compile(r"-?[0-9]{1,18}")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
ANYTHING = re.compile(r'"(?:[^"\\]|\\.)*"?|[%@]?[A-Za-z0-9_.\-]+|.')
MAX_RANGE = 1 << 24
"""Numbers that one range may stand for."""
PARTS = [one.name for one in fields(Placement)]
PARAMS = {one.name for one in fields(SamplingParams)}


class Place(TypedDict):
    """What stands at the end of every operation."""

    op_id: int
    instance: str
    after: tuple[int, ...]


@dataclass(slots=True)
class Line:
    """A cursor; every `take` moves it behind what it read, or raises `PlanError` saying where it stopped."""

    number: int
    text: str
    at: int = 0

    def expected(self, what: str, *, back_to: int | None = None) -> NoReturn:
        """Refuse what stands here."""
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
        """Whether that word or sign stands here; if so, it is read."""
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
        """A word, or a quoted text."""
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
        """`[1, 4:7]` as 1, 4, 5, 6."""
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
            here = self.at
            stop = self.integer("the end of the range")
            if not start < stop <= start + MAX_RANGE:
                self.expected(f"an end from {start + 1} to {start + MAX_RANGE}", back_to=here)
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
        self._kinds: Mapping[str, Callable[[Line, int], Operation]] = {
            "preempt": self._preempt,
            "reject": self._reject,
            "place": self._place,
            "leave": self._leave,
            "join": lambda line, op_id: self._join(line, op_id, resumes=False),
            "resume": lambda line, op_id: self._join(line, op_id, resumes=True),
            "grow": self._grow,
            "copy": self._copy,
            "decode": self._decode,
            "prefill": self._prefill,
            "transfer": self._transfer,
        }

    def read(self, text: str) -> IRGraph:
        for number, content in enumerate(text.split("\n"), 1):
            line = Line(number, content)
            if not line.ends() and not line.has("#"):
                self._read(line)
                if not line.ends():
                    line.expected("the end of the line")
        instances = (
            replace(one, decisions=tuple(decisions))
            for one, decisions in zip(self._instances, self._decisions, strict=True)
        )
        return IRGraph(tuple(instances), tuple(self._ops))

    def _read(self, line: Line) -> None:
        if line.has("step"):
            self._header(line)
        elif line.has("//"):
            if not self._instances:
                line.expected("a line 'step N @instance' before decisions", back_to=0)
            self._decision(line)
        else:
            if not line.text.startswith("%", line.at):
                line.expected("'step', '//' or an operation, as %0 = ...")
            self._operation(line)

    def _header(self, line: Line) -> None:
        step, name = line.integer("the number of the step"), line.instance()
        phases: set[Phase] = set()
        given = False
        while line.has("for"):
            given = True
            if not line.has("none"):
                phases.add(self._phase(line))
        num_draft_tokens = line.integer("the number of tokens to draft") if line.has("drafts") else 0
        able = frozenset(phases) if given else BOTH_PHASES
        self._instances.append(InstanceStep(name, step, able, num_draft_tokens))
        self._decisions.append([])

    def _decision(self, line: Line) -> None:
        pass_name, action = line.word("the name of a pass"), line.word("what it did")
        request = line.string("the request")
        reason = line.string("the reason") if line.has(":") else ""
        self._decisions[-1].append(Decision(pass_name, request, action, reason))

    def _phase(self, line: Line) -> Phase:
        start = line.at
        try:
            return Phase(line.word("a phase"))
        except ValueError:
            line.expected("prefill or decode", back_to=start)

    # -- operations

    def _operation(self, line: Line) -> None:
        op_id = line.op_id()
        line.take("=")
        start = line.at
        kind = line.word("an operation")
        if kind not in self._kinds:
            line.expected(f"one of {', '.join(self._kinds)}", back_to=start)
        self._ops.append(self._kinds[kind](line, op_id))

    def _end(self, line: Line, op_id: int) -> Place:
        first = self._instances[0].name if self._instances else LOCAL
        name = line.instance() if line.has("on") else first
        return {"op_id": op_id, "instance": name, "after": line.op_ids() if line.has("after") else ()}

    def _preempt(self, line: Line, op_id: int) -> PreemptOp:
        return PreemptOp(request=line.string("a request"), **self._end(line, op_id))

    def _reject(self, line: Line, op_id: int) -> RejectOp:
        request = line.string("a request")
        line.take("because")
        return RejectOp(request=request, reason=line.string("a reason"), **self._end(line, op_id))

    def _place(self, line: Line, op_id: int) -> PlaceOp:
        request = line.string("a request")
        parts = {part: line.instance() for part in PARTS if line.has(part)}
        return PlaceOp(request=request, placement=Placement(**parts), **self._end(line, op_id))

    def _leave(self, line: Line, op_id: int) -> LeaveOp:
        row, request = self._row(line)
        return LeaveOp(row=row, request=request, **self._end(line, op_id))

    def _row(self, line: Line) -> tuple[int, str | None]:
        line.take("row")
        row = line.integer("the number of a row")
        return row, line.string("the request") if not line.ends() and line.text[line.at] == '"' else None

    def _named_row(self, line: Line) -> tuple[int, str]:
        row, request = self._row(line)
        if request is None:
            line.expected("the request in double quotes")
        return row, request

    def _join(self, line: Line, op_id: int, *, resumes: bool) -> JoinOp:
        row, request = self._named_row(line)
        line.take("computed")
        computed = line.integer("the number of computed tokens")
        line.take("prompt")
        prompt = line.integer("the number of prompt tokens")
        line.take("blocks")
        blocks = tuple(line.numbers("blocks"))
        line.take("tokens")
        tokens = self._tokens(line)
        params = self._params(line) if line.has("params") else SamplingParams()
        eos = frozenset(line.numbers("token ids")) if line.has("eos") else frozenset[int]()
        join = Join(row, request, tokens, prompt, computed, blocks, params, eos)
        return JoinOp(join=join, resumes=resumes, **self._end(line, op_id))

    def _tokens(self, line: Line) -> bytes:
        start = line.at
        try:
            return Tokens(line.numbers("token ids")).tobytes()
        except OverflowError:
            line.expected("token ids of 32 bits", back_to=start)

    def _params(self, line: Line) -> SamplingParams:
        start = line.at
        given = line.json("sampling parameters as a JSON object")
        if not isinstance(given, dict):
            line.expected("sampling parameters as a JSON object", back_to=start)
        for name in sorted(given.keys() - PARAMS):
            line.expected(f"names of sampling parameters.{nearest(name, PARAMS)}", back_to=start)
        try:
            return SamplingParams(**{name: _value(name, value) for name, value in given.items()})
        except (RequestError, TypeError, ValueError) as error:
            line.expected(f"sampling parameters that are valid ({error})", back_to=start)

    def _grow(self, line: Line, op_id: int) -> BlockTableOp:
        row, request = self._row(line)
        line.take("from")
        first = line.integer("an index into the table")
        line.take("blocks")
        growth = BlockTableDelta(row, first, tuple(line.numbers("blocks")))
        return BlockTableOp(growth=growth, request=request, **self._end(line, op_id))

    def _copy(self, line: Line, op_id: int) -> CopyOp:
        source = line.word("a tier"), line.integer("a block")
        line.take("to")
        target = line.word("a tier"), line.integer("a block")
        return CopyOp(copy=BlockCopy(*source, *target), **self._end(line, op_id))

    def _decode(self, line: Line, op_id: int) -> DecodeOp:
        row, request = self._row(line)
        line.take("at")
        position = line.integer("a position")
        return DecodeOp(row=row, position=position, request=request, **self._end(line, op_id))

    def _prefill(self, line: Line, op_id: int) -> PrefillOp:
        row, request = self._named_row(line)
        line.take("tokens")
        start = line.integer("the first token")
        line.take(":")
        end = line.integer("the end of the tokens")
        prefill = Prefill(row, request, start, end - start, line.has("samples"))
        phase = self._phase(line) if line.has("phase") else Phase.PREFILL
        return PrefillOp(prefill=prefill, phase=phase, **self._end(line, op_id))

    def _transfer(self, line: Line, op_id: int) -> TransferOp:
        request = line.string("a request")
        line.take("blocks")
        blocks = tuple(line.numbers("blocks"))
        line.take("to")
        return TransferOp(transfer=Transfer(request, blocks, line.instance()), **self._end(line, op_id))


def _value(name: str, value: Any) -> Any:
    """A field of `SamplingParams` from JSON, which has lists only."""
    if name == "logit_bias":
        return {int(key): bias for key, bias in value}
    return tuple(value) if isinstance(value, list) else value
