"""What the next turn of a chat begins with, computed while the engine idles.

Chat templates leave the reasoning of earlier turns out of a prompt. So the next turn of a chat does not begin
with the tokens that the model has drawn, and its cached prefix would end before the last answer (vLLM issue
39806, SGLang issue 23315). The server knows the messages, the answer and the template, and so what the next
turn begins with. `turn_behind` renders that, and `NextTurns` has the engine compute it, a few milliseconds at
a time, while no request runs or waits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sagellm.core.blocks import num_common
from sagellm.core.clock import Clock
from sagellm.core.errors import RequestError
from sagellm.core.protocols.tokenizer import Message
from sagellm.core.types import Namespace, SamplingParams, Tokens
from sagellm.engines.llm.completion import Completion, TextDelta
from sagellm.engines.llm.llm import LLM
from sagellm.engines.llm.options import RequestOptions

NEXT_TURN = "next_turn"
"""Its name among the accelerations."""

MAX_TURNS = 64
"""So many are kept: those that wait, and those that are computed and may still be hit."""

CHUNK_S = 0.01
"""A request that comes waits for what is being computed; that is to take so long."""

MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 32, 2048

_USER_TEXTS = ("A", "0")
"""What the user says next is not known: what two turns have in common does not depend on it."""


@dataclass(slots=True, eq=False)
class NextTurn:
    """`tokens` begin the next prompt of a chat; `answered` are its last ones.

    The first `num_known` are the same in both; the first `num_done` have been computed since.
    """

    tokens: Tokens
    answered: Tokens
    num_known: int
    options: RequestOptions
    num_done: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_done >= len(self.tokens)

    def begins(self, tokens: Tokens, tenant: str) -> bool:
        """Whether a prompt of this tenant begins so."""
        length = len(self.tokens)
        if tenant != self.options.tenant or len(tokens) < length or tokens[length - 1] != self.tokens[-1]:
            return False
        return tokens.slice(0, length) == self.tokens.slice(0)


def turn_behind(
    llm: LLM,
    prompt: Tokens,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    answer: Completion,
    options: RequestOptions,
) -> NextTurn | None:
    """The turn behind the first choice of an answer to `messages`.

    `prompt`: the tokens of these; `variables`: those of the template. None where the turn begins with blocks
    that are cached already, and for an answer without reasoning. For any thread; takes as long as encoding
    two prompts. Raises `RequestError` where the template refuses the messages.
    """
    schema, output = llm.capability().kv_schema, answer.choices[0].token_ids
    if schema is None or not _marks_reasoning(prompt, output, llm):
        return None
    said = [*messages, {"role": "assistant", "content": answer.text}]
    first, second = (
        llm.encode([*said, {"role": "user", "content": text}], template_options=variables)
        for text in _USER_TEXTS
    )
    tokens, answered = Tokens(first.slice(0, num_common(first, second))), Tokens([*prompt, *output])
    num_known = num_common(tokens, answered)
    if len(tokens) // schema.block_size <= num_known // schema.block_size:
        return None
    params = SamplingParams(temperature=0, max_tokens=0, num_speculative_tokens=0)
    own = RequestOptions(params, tenant=options.tenant, service_class=options.service_class)
    return NextTurn(tokens, answered, num_known, own, num_known)


def _marks_reasoning(prompt: Tokens, output: Sequence[int], llm: LLM) -> bool:
    """Whether an answer or its prompt's last turn has a marker of reasoning."""
    markers, ends = llm.tokenizer.reasoning_token_ids, llm.tokenizer.eos_token_ids
    if any(token_id in markers for token_id in output):
        return True
    last = itertools.takewhile(lambda token_id: token_id not in ends, reversed(prompt.slice(0)))
    return any(token_id in markers for token_id in last)


class NextTurns:
    """Owns the turns that are expected. For the thread of the engine.

    A chunk is a request for a leading part of the turn's tokens, so that each one that has ended is cached.
    For the controller of accelerations, tokens that are computed so are spent, and those of them that a
    prompt reuses are saved. `defer` calls what may wait for the instances of a fleet.
    """

    def __init__(
        self, llm: LLM, clock: Clock, defer: Callable[[Callable[[], object]], object] = lambda do: do()
    ) -> None:
        self._llm, self._clock, self._defer = llm, clock, defer
        self._turns: deque[NextTurn] = deque(maxlen=MAX_TURNS)
        self._hits: dict[str, NextTurn] = {}  # by the id of a request that begins with the turn
        self._running: tuple[str, NextTurn, int, float] | None = None  # id, turn, where it stops, begin
        self._chunk_tokens = MIN_CHUNK_TOKENS
        self._ids, self._num_looked_at = itertools.count(), 0
        llm.accelerations.add(NEXT_TURN, is_exact=True)

    def add(self, turn: NextTurn) -> None:
        """Expect a turn. The oldest is forgotten for it where there are too many."""
        if self._llm.accelerations.is_on(NEXT_TURN):
            self._turns.append(turn)

    @property
    def has_work(self) -> bool:
        return any(not turn.is_done for turn in self._turns)

    def begin_chunk(self) -> None:
        """Have the engine compute a chunk of the next turn, if it is idle.

        In a fleet another turn's instance may be: each call looks at one, in turns.
        """
        turns = [turn for turn in self._turns if not turn.is_done]
        if not turns or self._running is not None:
            return
        turn = turns[self._num_looked_at % len(turns)]
        if not self._llm.is_idle(turn.tokens, Namespace(tenant=turn.options.tenant)):
            self._num_looked_at += 1
            return
        stop = min(len(turn.tokens), turn.num_done + self._chunk_tokens)
        request_id = f"next-turn-{next(self._ids)}"
        try:
            self._llm.submit(Tokens(turn.tokens.slice(0, stop)), turn.options, request_id=request_id)
        except RequestError:  # of a prompt that fills the context
            self._turns.remove(turn)
            return
        self._running = request_id, turn, stop, self._clock.now()

    def make_way(self) -> None:
        """Abort the chunk that is being computed, since a request comes."""
        if self._running is not None:
            self._llm.abort(self._running[0])
            self._running = None

    def arrived(self, request_id: str, tokens: Tokens, tenant: str) -> None:
        """A request has come. A turn that it begins with need not be computed any more."""
        turn = next((turn for turn in self._turns if turn.begins(tokens, tenant)), None)
        if turn is None:
            return
        self._turns.remove(turn)
        if turn.num_done > turn.num_known:
            self._hits[request_id] = turn

    def left(self, request_id: str) -> None:
        """A request was aborted."""
        self._hits.pop(request_id, None)

    def take(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """The deltas of a step without those of chunks, which are taken in."""
        others: list[TextDelta] = []
        for delta in deltas:
            if self._running is not None and delta.request_id == self._running[0]:
                self._end_chunk(delta)
                continue
            others.append(delta)
            turn = self._hits.pop(delta.request_id, None)
            if turn is not None:
                num_hit = max(0, min(delta.usage.cached_tokens, turn.num_done) - turn.num_known)
                self._llm.accelerations.count(NEXT_TURN, saved={"tokens": num_hit})
        return others

    def _end_chunk(self, delta: TextDelta) -> None:
        if not delta.is_last:
            return
        assert self._running is not None
        _, turn, stop, began_s = self._running
        self._running = None
        is_lost = not delta.usage.cached_tokens and turn.num_done >= MIN_CHUNK_TOKENS
        if delta.error is not None or is_lost:  # it would fail, or be evicted, again
            if turn in self._turns:
                self._turns.remove(turn)
            return
        turn.num_done, spent_s = stop, self._clock.now() - began_s
        num_computed = delta.usage.prompt_tokens - delta.usage.cached_tokens
        self._llm.accelerations.count(NEXT_TURN, spent={"tokens": num_computed})
        in_time = int(num_computed / spent_s * CHUNK_S) if spent_s > 0 else MAX_CHUNK_TOKENS
        self._chunk_tokens = max(MIN_CHUNK_TOKENS, min(in_time, 2 * self._chunk_tokens, MAX_CHUNK_TOKENS))
        if turn.is_done:
            self._supersede(turn)

    def _supersede(self, turn: NextTurn) -> None:
        """Have the KV that no next turn can begin with evicted first."""
        action = {"action_type": "session.supersede", "payload": {"token_ids": turn.answered.tolist()}}
        self._defer(lambda: self._llm.hint({"actions": [action]}, tenant=turn.options.tenant))
