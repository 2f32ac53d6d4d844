"""A server's prefix cache in the plainest form: LRU by block, tails first, with vLLM's events."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice

from sagellm.control_plane.kv_events import BlockRemoved, BlockStored, KVEventBatch, ReceivedBatch
from sagellm.core.types import Tokens

BLOCK = 4


class ReferenceCache:
    """Serves one request after the other. `reports_hits`: as with `kv_cache_report_mode: full`.
    `answers_at_once`: an answer is stored at its end, in one event."""

    def __init__(
        self,
        num_blocks: int,
        *,
        reports_hits: bool = False,
        answers_at_once: bool = False,
        block: int = BLOCK,
    ) -> None:
        self.answers_at_once = answers_at_once
        self.num_blocks = num_blocks
        self.reports_hits = reports_hits
        self.block = block
        self.cached: OrderedDict[bytes, None] = OrderedDict()  # the next to be evicted is first
        self.num_queried = self.num_hit = 0
        self.num_batches = 0
        self.items: list[ReceivedBatch] = []

    def hashes(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        chained, found = salt.encode(), []
        for start in range(0, len(tokens) - self.block + 1, self.block):
            part = Tokens(tokens[start : start + self.block]).tobytes()
            chained = blake2b(chained + part, digest_size=16).digest()
            found.append(chained)
        return found

    def serve(
        self, prompt: Sequence[int], answer: Sequence[int] = (), *, salt: str = "", time_s: float = 0.0
    ) -> int:
        """Returns the blocks that were in the cache. The answer's blocks are stored in later batches."""
        hashes = self.hashes(prompt, salt)
        num_hit = next(
            (n for n, block_hash in enumerate(hashes) if block_hash not in self.cached), len(hashes)
        )
        self.num_queried += len(hashes)
        self.num_hit += num_hit
        events: list[BlockStored | BlockRemoved] = []
        if self.reports_hits and num_hit:
            events.append(self._event(prompt, hashes, 0, num_hit, salt))
        whole = self.hashes([*prompt, *answer], salt)
        for block_hash in hashes[:num_hit]:
            self.cached.move_to_end(block_hash)
        self._make_room(len(hashes) - num_hit, set(hashes), events)
        if num_hit < len(hashes):
            events.append(self._event(prompt, hashes, num_hit, len(hashes), salt))
        for block_hash in hashes[num_hit:]:
            self.cached[block_hash] = None
        self._send(events, time_s)
        answered = [(index, index + 1) for index in range(len(hashes), len(whole))]
        if self.answers_at_once and answered:
            answered = [(len(hashes), len(whole))]
        for start, stop in answered:
            later: list[BlockStored | BlockRemoved] = []
            new = [block_hash for block_hash in whole[start:stop] if block_hash not in self.cached]
            self._make_room(len(new), set(whole), later)
            self.cached.update(dict.fromkeys(new))
            later.append(self._event([*prompt, *answer], whole, start, stop, salt))
            self._send(later, time_s)
        for block_hash in reversed(whole):
            self.cached.move_to_end(block_hash)
        return num_hit

    def idle(self) -> None:
        """A step without events."""
        self._send([], 0.0)

    def _make_room(self, num_new: int, own: set[bytes], events: list[BlockStored | BlockRemoved]) -> None:
        short = len(self.cached) + num_new - self.num_blocks
        others = (block_hash for block_hash in self.cached if block_hash not in own)
        victims = list(islice(others, max(0, short)))
        for victim in victims:
            del self.cached[victim]
            events.append(BlockRemoved([victim], "GPU"))

    def _event(
        self, tokens: Sequence[int], hashes: Sequence[bytes], start: int, stop: int, salt: str
    ) -> BlockStored:
        return BlockStored(
            block_hashes=list(hashes[start:stop]),
            parent_block_hash=hashes[start - 1] if start else None,
            token_ids=list(tokens[start * self.block : stop * self.block]),
            block_size=self.block,
            medium="GPU",
            extra_keys=[(salt,) if n == 0 else None for n in range(start, stop)] if salt else None,
        )

    def _send(self, events: list[BlockStored | BlockRemoved], time_s: float) -> None:
        self.items.append(ReceivedBatch(self.num_batches, KVEventBatch(time_s, list(events))))
        self.num_batches += 1
