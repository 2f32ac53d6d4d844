"""`RemoteTier`: a store that several instances share, as a tier of one of them.

The index holds the paths that this instance has put or was told of: they are not put again. Other instances
put and the server evicts without its knowing, so nothing is loaded before the server was asked.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sagellm.core.blocks import Tier
from sagellm.core.clock import Clock
from sagellm.core.errors import BookkeepingError
from sagellm.core.protocols.kv_pool import BlockQuota, KVPool
from sagellm.core.protocols.kv_tiers import BlockHash, ReadOutcome, TierState
from sagellm.core.protocols.prefix_cache import PrefixHit, PrefixReuseIndex
from sagellm.core.types import Account, Namespace, Tokens
from sagellm.kvmgr.kv_pool.tiers.migrator import HashesOf
from sagellm.kvmgr.kv_pool.tiers.remote_storage import RemoteStorage
from sagellm.kvmgr.kv_pool.tiers.tier import KVTier

log = logging.getLogger("sagellm.tiers")
FIRST_ASK_S = 1e-3
"""Assumed time of an answer before there was one."""


@dataclass(slots=True)
class _Question:
    """Which of the leading blocks of a prompt the server holds.

    `held`: the answer, None if there was none; it took `spent_s`. `is_open`: a request waits for it.
    `is_probe`: it is for a server that is not used now, and no request waits.
    """

    request_id: str
    path: bytes
    namespace: Namespace
    account: Account
    asked_s: float
    until_s: float
    is_probe: bool
    is_open: bool
    held: Sequence[bool] | None = None
    spent_s: float = 0.0


class RemoteTier(KVTier):
    """The books of a shared store, and the questions that wait for an answer.

    A thread of its own asks, in the order of the requests, and calls `on_answer`. A request waits for at most
    `max_ask_s`. `answered`: requests whose question has ended, until `forget`. `ask_s`: the time that recent
    answers took.
    """

    def __init__(
        self,
        index: PrefixReuseIndex,
        pool: KVPool,
        storage: RemoteStorage,
        hashes_of: HashesOf,
        clock: Clock,
        on_answer: Callable[[], None],
        quota: BlockQuota | None = None,
    ) -> None:
        super().__init__(Tier.REMOTE, index, pool, storage, quota)
        self.answered: set[str] = set()
        self.ask_s = FIRST_ASK_S
        self.max_ask_s = storage.store.call_timeout_s
        self.now = clock.now
        self._remote, self._hashes_of, self._on_answer = storage, hashes_of, on_answer
        self._thread = ThreadPoolExecutor(1, "sagellm-kv-ask")
        self._questions: dict[str, _Question] = {}
        self._answers: deque[_Question] = deque()
        self._is_probing = False

    @property
    def fault(self) -> str:
        return self._remote.store.write_fault or ""

    @property
    def can_store(self) -> bool:
        return self._remote.store.takes_blocks

    @property
    def is_asking(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._questions)

    def ask(
        self, request_id: str, tokens: Tokens, namespace: Namespace, num_blocks: int, account: Account,
        limit_s: float,
    ) -> bool:  # fmt: skip
        """Ask which of the first `num_blocks` blocks of a prompt the server holds.

        Returns False where it is not used now; then a thread tries from time to time whether it works again.
        The answer enters the index in `poll`, which names the request then, or when `limit_s` is over.
        """
        is_down = self.storage.fault is not None
        if is_down and self._is_probing:
            return False
        num_tokens, now_s = (1 if is_down else num_blocks) * self.index.block_size, self.now()
        until_s = now_s + min(limit_s, self.max_ask_s)
        path = bytes(tokens.slice(0, num_tokens))
        question = _Question(request_id, path, namespace, account, now_s, until_s, is_down, not is_down)
        self._is_probing |= is_down
        if not is_down:
            self._questions[request_id] = question
        self._thread.submit(self._answer, question)
        return not is_down

    def end_load(self, hit: PrefixHit, first: int, num_read: int, outcome: ReadOutcome) -> None:
        """See `KVTier`. What is behind a block that was not right is put again, unless it is there."""
        if outcome is not ReadOutcome.OK:
            self._damaged.update(self.index.block_ids(hit)[first + num_read :])
        super().end_load(hit, first, num_read, outcome)

    def forget(self, request_id: str) -> None:
        """The request has ended, or needs no more blocks. Unknown ids are ignored."""
        self.answered.discard(request_id)
        question = self._questions.pop(request_id, None)
        if question is not None:
            question.is_open = False

    def poll(self) -> list[str]:
        """Learn what the server has answered; returns the requests whose question has ended."""
        self._damaged.update(self._remote.take_lost())
        ended = []
        while self._answers:
            question = self._answers.popleft()
            self._is_probing &= not question.is_probe
            if question.held is not None:
                self.ask_s = 0.8 * self.ask_s + 0.2 * question.spent_s
                self._learn(question, question.held)
            if question.is_open:
                ended.append(question.request_id)
        now_s = self.now()
        ended += [
            name for name, each in self._questions.items() if each.until_s <= now_s and name not in ended
        ]
        for name in ended:
            self._questions.pop(name).is_open = False
        self.answered.update(ended)
        return ended

    def _answer(self, question: _Question) -> None:
        """On the thread: ask the server, unless no request waits any more."""
        if not question.is_open and not question.is_probe:
            return
        try:
            hashes = self._hashes_of(question.path, question.namespace)
            question.held = self._remote.store.contains(hashes)
        except Exception:  # the thread goes on, and the request computes its prompt
            log.exception("asking the remote KV store failed")
        question.spent_s = self.now() - question.asked_s
        self._answers.append(question)
        self._on_answer()

    def _learn(self, question: _Question, held: Sequence[bool]) -> None:
        """Enter the leading blocks that the server holds.

        Known blocks that it does not hold count as damaged: a load ends before them, and they are put again.
        """
        tokens, namespace = Tokens.frombytes(question.path), question.namespace
        known = self.index.block_ids(self.index.lookup(tokens, namespace))
        for slot, is_held in zip(known, held, strict=False):
            (self._damaged.discard if is_held else self._damaged.add)(slot)
        num_held = [*held, False].index(False)
        arrival = self.arrivals.begin_receive(tokens, namespace, num_held, question.account)
        if arrival is not None:
            self.arrivals.publish(arrival, len(arrival.block_ids))

    def recover(self, block_hash: BlockHash) -> int:
        """Nothing: the server is asked."""
        return 0

    def state(self, num_held: int = 0) -> TierState:
        num_dropped = self.num_dropped + self._remote.num_lost
        return super().state(num_held)._replace(stored=self._remote.num_stored, dropped=num_dropped)

    def check(self) -> None:
        """See `KVTier`; also where a question that has ended is still asked."""
        super().check()
        self._remote.store.check()
        ended = [name for name, question in self._questions.items() if not question.is_open]
        if ended or self.answered & self._questions.keys():
            raise BookkeepingError(f"questions of {ended} have ended, or are asked again")

    def close(self) -> None:
        """Wait for the answer under way; there are no more."""
        for request_id in list(self._questions):
            self.forget(request_id)
        self._thread.shutdown(wait=True, cancel_futures=True)
