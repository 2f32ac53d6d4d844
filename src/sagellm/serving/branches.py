"""`branch_from`: completions that go on from a token of an earlier one.

Its tokens are not sent again: for retries and searches over steps of reasoning. They are those that the
model has drawn, so that the branch shares the KV of all of them; text that is sent back may be encoded
otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from sagellm.core.errors import BookkeepingError, RequestError
from sagellm.core.types import Tokens
from sagellm.engines.llm import TextDelta
from sagellm.serving.errors import clipped

WHERE = "branch_from"


class BranchFields(BaseModel):
    """An earlier answer, which may still run, one of its choices, and a token.

    `num_tokens` of the choice stay in front of `prompt`; null: all so far.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str = Field(max_length=128)
    index: int = Field(default=0, ge=0, lt=2**31)
    num_tokens: int | None = Field(default=None, ge=0, lt=2**31)


@dataclass(slots=True)
class _Remembered:
    """The tokens of one generation. `request_ids`: those of the engine, a prompt each."""

    tenant: str
    num_choices: int
    prompts: Sequence[Tokens]
    request_ids: Sequence[str]
    outputs: dict[int, Tokens] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Where a branch begins: behind `tokens`. `parent`: request and choice, which may still run."""

    tokens: Tokens
    parent: tuple[str, int]


class RecentCompletions:
    """The tokens of the last generations, at most `max_tokens` together; the oldest go first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._known: OrderedDict[str, _Remembered] = OrderedDict()
        self._num_tokens = 0

    def open(
        self, name: str, tenant: str, num_choices: int, prompts: Sequence[Tokens], request_ids: Sequence[str]
    ) -> None:
        """A generation has begun."""
        if self._max_tokens:
            self._known[name] = _Remembered(tenant, num_choices, prompts, request_ids)
            self._grow(name, sum(map(len, prompts)))

    def add(self, name: str, position: int, delta: TextDelta) -> None:
        """A step has added to a choice of the prompt at `position`."""
        known = self._known.get(name)
        if known is not None and delta.token_ids:
            choice = position * known.num_choices + delta.index
            known.outputs.setdefault(choice, Tokens()).extend(delta.token_ids)
            self._grow(name, len(delta.token_ids))

    def _grow(self, name: str, count: int) -> None:
        self._known[name].num_tokens += count
        self._num_tokens += count
        while self._num_tokens > self._max_tokens:
            _, oldest = self._known.popitem(last=False)
            self._num_tokens -= oldest.num_tokens

    def find(self, asked: BranchFields, tenant: str) -> BranchPoint:
        """Where a branch begins.

        Raises `RequestError` for an answer, a choice or a token that this tenant does not have."""
        known = self._known.get(asked.id.rpartition("-")[2])
        if known is None or known.tenant != tenant:
            shown = clipped(repr(asked.id))
            raise RequestError(
                f"{WHERE}.id: no answer {shown} is remembered here: send its tokens as a prompt", WHERE
            )
        position, index = divmod(asked.index, known.num_choices)
        if position >= len(known.prompts):
            most = len(known.prompts) * known.num_choices - 1
            raise RequestError(f"{WHERE}.index must be at most {most}, got {asked.index}", WHERE)
        output = known.outputs.get(asked.index, Tokens())
        count = len(output) if asked.num_tokens is None else asked.num_tokens
        if count > len(output):
            so_far = f"the choice has {len(output)} tokens so far"
            raise RequestError(f"{WHERE}.num_tokens: {so_far}, got {count}", WHERE)
        tokens = Tokens([*known.prompts[position], *output.slice(0, count)])
        return BranchPoint(tokens, (known.request_ids[position], index))

    def check(self) -> None:
        """Raise `BookkeepingError` where tokens are not counted as they are."""
        for name, known in self._known.items():
            held = sum(map(len, [*known.prompts, *known.outputs.values()]))
            if held != known.num_tokens:
                raise BookkeepingError(f"{name} holds {held} tokens, {known.num_tokens} are counted")
        if self._num_tokens != sum(known.num_tokens for known in self._known.values()):
            raise BookkeepingError(f"{self._num_tokens} tokens are counted in all")
